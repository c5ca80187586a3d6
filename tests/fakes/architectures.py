"""A zoo of tiny models with random weights: one for each way in which architectures differ in what training can do with
them, composites (a text model of each family that is published with a tower, for images or for sound), and a GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from factories import make_rollout
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.load import attention_of, load_policy
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.settings import LoraConfig, ModelConfig
from offline_grpo.train.batch import build_batch
from offline_grpo.types import TokenBatch

VOCAB = 97
NEW: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What config.json calls the sizes of today's models."""
OLD: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "n_inner": 48,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


@dataclass(frozen=True)
class Architecture:
    """How to make one, and what of it does not work.

    Args:
        wrong: layout -> what the refusal says about it.
    """

    model_type: str
    settings: dict[str, Any]
    wrong: dict[str, str]

    @property
    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.model_type, **self.settings)

    def build(self, **changes: Any) -> PreTrainedModel:
        """A model with random weights, the same at every call, with the attention that `auto` chooses."""
        config = AutoConfig.for_model(self.model_type, **{**self.settings, **changes})
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config, "auto")).eval()


def new(model_type: str, wrong: dict[str, str] | None = None, **settings: Any) -> Architecture:
    return Architecture(model_type, {**NEW, **settings}, wrong or {})


def old(model_type: str, sizes: dict[str, Any], wrong: dict[str, str] | None = None, **settings: Any) -> Architecture:
    return Architecture(model_type, {**sizes, **settings}, wrong or {})


LEAKS = "logprobs differ from those of one sequence at a time"
BOTH = {"tree": LEAKS, "varlen": LEAKS}
ZOO: dict[str, Architecture] = {
    "llama": new("llama"),
    "mistral_window": new("mistral", sliding_window=6),
    "qwen2": new("qwen2"),
    "qwen3": new("qwen3", head_dim=8),
    "qwen2_moe": new("qwen2_moe", shared_expert_intermediate_size=24, **EXPERTS),
    "qwen3_moe": new("qwen3_moe", head_dim=8, **EXPERTS),
    "mixtral": new("mixtral", num_local_experts=4),
    "phimoe": new("phimoe", num_local_experts=4),
    "gemma": new("gemma", head_dim=8),
    "gemma2": new(
        "gemma2",
        {"varlen": "no softcap"},
        head_dim=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": new("gemma3_text", head_dim=8, query_pre_attn_scalar=8, sliding_window=6, sliding_window_pattern=2),
    "gemma3_capped": new("gemma3_text", head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=4.0),
    "gemma4": new(
        "gemma4_text",
        head_dim=8,
        global_head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
    ),
    "phi": new("phi"),
    "phi3": new("phi3"),
    "stablelm": new("stablelm", {"varlen": "drops the arguments"}),
    "olmo2": new("olmo2"),
    "olmo3": new("olmo3"),
    "granite": new(
        "granite", logits_scaling=4.0, attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=3.0
    ),
    "cohere": new("cohere", logit_scale=0.25),
    "cohere2": new("cohere2", logit_scale=0.25, head_dim=8),
    "glm4": new("glm4", head_dim=8),
    "smollm3": new("smollm3"),
    "minicpm3": new("minicpm3", num_key_value_heads=4, dim_model_base=4, **LATENT),
    "starcoder2": new("starcoder2"),
    "llama4": new(
        "llama4_text",
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=64,
        interleave_moe_layer_step=1,
    ),
    "deepseek_v3": new(
        "deepseek_v3",
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        **LATENT,
    ),
    "gpt_oss": new(
        "gpt_oss",
        {"varlen": "no s_aux"},
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        rope_scaling=None,
    ),
    "gpt2": old("gpt2", GPT),
    "gpt_neo": old(
        "gpt_neo",
        {k: v for k, v in OLD.items() if k not in ("num_hidden_layers", "num_attention_heads")},
        {"varlen": LEAKS},
        num_layers=2,
        num_heads=4,
        intermediate_size=48,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
    ),
    "gpt_neox": old("gpt_neox", OLD, intermediate_size=48),
    "gptj": old("gptj", GPT, {"varlen": LEAKS}, rotary_dim=4),
    "opt": old("opt", OLD, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=512, init_std=0.2, dropout=0.1),
    "bloom": old("bloom", OLD, {"tree": "ValueError", "varlen": LEAKS}, n_layer=2, n_head=4),
    "falcon": old("falcon", OLD, {"varlen": "TypeError"}),
    "falcon_alibi": old("falcon", OLD, {"tree": "ValueError", "varlen": "TypeError"}, alibi=True),
    "mpt": old(
        "mpt",
        {"vocab_size": VOCAB, "initializer_range": 0.2},
        {"tree": LEAKS, "varlen": "AttributeError"},
        d_model=32,
        n_heads=4,
        n_layers=2,
        expansion_ratio=2,
        max_seq_len=512,
    ),
    "qwen3_next": new("qwen3_next", BOTH, head_dim=8, shared_expert_intermediate_size=24, **EXPERTS, **LINEAR),
    "qwen3_5": new("qwen3_5_text", BOTH, head_dim=8, **LINEAR),
    "lfm2": new("lfm2", BOTH, layer_types=["conv", "full_attention"], block_multiple_of=8),
    "falcon_h1": new("falcon_h1", BOTH, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, **MAMBA),
    "bamba": new("bamba", BOTH, mamba_n_heads=8, attn_layer_indices=[1], **MAMBA),
    "jamba": new(
        "jamba",
        BOTH,
        mamba_d_state=8,
        mamba_dt_rank=4,
        mamba_d_conv=4,
        mamba_expand=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        use_mamba_kernels=False,
    ),
    "mamba": old(
        "mamba",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
        {"tree": "RuntimeError", "varlen": LEAKS},
        state_size=8,
    ),
    "mamba2": old(
        "mamba2",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
        BOTH,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=8,
    ),
}
SPARSE: dict[str, Any] = {
    **LATENT,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
}
ODD: dict[str, Architecture] = {
    "deepseek_v32": new("deepseek_v32", **SPARSE),
    "glm_moe_dsa": new("glm_moe_dsa", **SPARSE),
    "doge": new("doge", keep_window_size=16),
    "deepseek_v4": new(
        "deepseek_v4",
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
        sliding_window=8,
        mlp_layer_types=["moe", "moe"],
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        qk_rope_head_dim=8,
    ),
    "minimax": new(
        "minimax",
        head_dim=8,
        num_local_experts=4,
        block_size=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "recurrent_gemma": new(
        "recurrent_gemma",
        attention_window_size=64,
        lru_width=32,
        num_hidden_layers=3,
        w_init_variance_scale=1.0,
    ),
    "zamba2": new(
        "zamba2",
        layers_block_type=["linear_attention", "hybrid"],
        n_mamba_heads=8,
        mamba_d_state=8,
        mamba_ngroups=1,
        chunk_size=8,
        time_step_min=0.05,
    ),
    "nemotron_h": new(
        "nemotron_h",
        layers_block_type=["linear_attention", "full_attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=1,
        ssm_state_size=8,
        chunk_size=8,
        head_dim=8,
        time_step_min=0.05,
    ),
    "modernbert_decoder": new("modernbert-decoder", local_attention=12, cls_token_id=1, sep_token_id=2),
}
"""Architectures that are refused, unless sequences are short or a server samples."""
CANNOT_SAMPLE_IN_PROCESS = {"mamba", "mamba2"}
ONE_OF_EACH_KIND = {"llama", "gemma2", "gpt_oss", "gpt_neo", "bloom", "qwen3_next", "mamba2"}
"""Of attention (full, soft-cap, sinks, window, ALiBi), experts, recurrences and convolutions."""
EVERY_ARCHITECTURE = [n if n in ONE_OF_EACH_KIND else pytest.param(n, marks=pytest.mark.slow) for n in ZOO]


def long_batch() -> TokenBatch:
    """Two prompts, with completions of up to 31 tokens."""
    generator = torch.Generator().manual_seed(5)

    def ids(length: int) -> list[int]:
        return torch.randint(8, VOCAB, (length,), generator=generator).tolist()

    prompts = [ids(20), ids(5)]
    rollouts = [make_rollout(prompt, ids(1 + 6 * i)) for prompt in prompts for i in range(6)]
    return build_batch(rollouts, mask_truncated=False)


TEXT: dict[str, Any] = {**NEW, "tie_word_embeddings": False}
QWEN_IDS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
QWEN_TOWER = {
    "depth": 2,  # as many blocks as the text has
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def _llama(**settings: Any) -> dict[str, Any]:
    return {"model_type": "llama", **TEXT, **settings}


COMPOSITES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"text_config": {**TEXT, **MROPE}, "vision_config": QWEN_TOWER, **QWEN_IDS},
    "qwen3_vl": {
        "text_config": {**TEXT, "head_dim": 8, **MROPE},
        "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **QWEN_IDS,
    },
    "qwen3_5": {
        "text_config": {**TEXT, "head_dim": 8, **LINEAR},
        "vision_config": {**QWEN_TOWER, "num_position_embeddings": 16},
        **QWEN_IDS,
    },
    "gemma3": {
        "text_config": {**NEW, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6},
        "vision_config": {**TOWER, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "boi_token_index": 3,
        "eoi_token_index": 4,
        "image_token_index": 5,
    },
    "gemma4": {
        "text_config": {
            **NEW,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": NEW["vocab_size"],
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
        },
        "audio_config": None,
        "image_token_id": 3,
        "video_token_id": 4,
        "audio_token_id": 5,
        "boi_token_id": 6,
        "eoi_token_id": 7,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8},
        "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 8},
        "image_token_index": 3,
    },
    "llama4": {
        "text_config": {
            **TEXT,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 64,
            "interleave_moe_layer_step": 1,
        },
        "vision_config": {
            **TOWER,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "image_token_index": 3,
        "boi_token_index": 4,
        "eoi_token_index": 5,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
        "image_token_id": 3,
    },
    "llava": {
        "text_config": _llama(),
        "vision_config": {"model_type": "clip_vision_model", **TOWER},
        "image_token_index": 3,
    },
    "idefics3": {"text_config": _llama(), "vision_config": TOWER, "image_token_id": 3, "pad_token_id": 0},
    "smolvlm": {"text_config": _llama(), "vision_config": TOWER, "image_token_id": 3, "pad_token_id": 0},
    "glm4v": {
        "text_config": {**TEXT, **MROPE},
        "vision_config": {**QWEN_TOWER, "image_size": 16},
        "image_token_id": 3,
        "video_token_id": 4,
        "image_start_token_id": 5,
        "image_end_token_id": 6,
    },
    "lfm2_vl": {
        "text_config": {
            "model_type": "lfm2",
            **NEW,
            "layer_types": ["conv", "full_attention"],
            "block_multiple_of": 8,
        },
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 8,
            "num_patches": 16,
        },
        "projector_hidden_size": 32,
        "image_token_id": 3,
    },
    "mllama": {
        "text_config": {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": None},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
        "image_token_index": 97,
    },
    "qwen2_audio": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 16,
            "max_source_positions": 20,
        },
        "audio_token_index": 3,
    },
}


IN_EVERY_RUN = {"qwen2_5_vl", "gemma4", "llama4"}
"""Positions in three dimensions, tied embeddings with inputs for each layer, and a head inside the decoder's module."""
EVERY_COMPOSITE = [n if n in IN_EVERY_RUN else pytest.param(n, marks=pytest.mark.slow) for n in COMPOSITES]


def build_composite(
    model_type: str,
    *,
    text: Mapping[str, Any] = MappingProxyType({}),
    tower: Mapping[str, Any] = MappingProxyType({}),
    **ids: int,
) -> PreTrainedModel:
    """A model with random weights, the same at every call; `text`, `tower` and `ids` change its configuration."""
    settings = COMPOSITES[model_type]
    name = "vision_config" if "vision_config" in settings else "audio_config"
    parts = {"text_config": {**settings["text_config"], **text}, name: {**settings[name], **tower}, **ids}
    torch.manual_seed(0)
    return AutoModelForMultimodalLM.from_config(AutoConfig.for_model(model_type, **{**settings, **parts})).eval()


def save_composite(model_type: str, folder: Path, **changes: Any) -> Path:
    """One with a tokenizer, and a file of its processor."""
    build_composite(model_type, **changes).save_pretrained(folder)
    build_char_tokenizer(512).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "X"}')
    return folder


SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""That vLLM's kernels take, on CPUs and GPUs. Those for Qwen3.5 take bf16 alone on a CPU."""
SERVED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "qwen2_5_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
        {"hidden_size": 64, "out_hidden_size": 128},
        {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    ),
    "gemma3": (
        {"query_pre_attn_scalar": 32, "initializer_range": 0.05},  # else it repeats what it reads
        {"hidden_size": 128},
        {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"},
    ),
}
"""Text, tower, and tokens that stand for images."""
HUB = {
    "gemma3": ("vision_tower.", "vision_tower.vision_model."),
    "qwen2_audio": ("language_model.model.model.", "language_model.model."),
}
"""A part of names of tensors, and how it is called on the Hub."""


def save_served(model_type: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """One that vLLM serves with its tower, whose processor takes images of 16 pixels."""
    text, tower, tokens = SERVED[model_type]
    tokenizer: Any = build_char_tokenizer(512)
    tokenizer._set_model_specific_special_tokens(special_tokens=tokens)
    tokenizer.add_tokens(list(tokens.values()), special_tokens=True)
    tokenizer.add_tokens(["\n" * number for number in (2, 3, 4)])  # vLLM looks for them in Gemma 3's
    suffix = "id" if model_type == "qwen2_5_vl" else "index"
    ids = {f"{name}_{suffix}": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    model: Any = build_composite(model_type, text={**SIZES, **text, "vocab_size": len(tokenizer)}, tower=tower, **ids)
    model.to(dtype).save_pretrained(folder)
    processor: Any
    if model_type == "qwen2_5_vl":
        from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

        how = {"size": {"shortest_edge": 64, "longest_edge": 256}, "patch_size": 4}
        images, videos = Qwen2VLImageProcessor(**how), Qwen2VLVideoProcessor(**how)
        processor = Qwen2_5_VLProcessor(image_processor=images, tokenizer=tokenizer, video_processor=videos)
    else:
        from transformers import Gemma3ImageProcessor, Gemma3Processor

        images = Gemma3ImageProcessor(size={"height": 16, "width": 16})
        processor = Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=4)
    processor.save_pretrained(folder)
    return with_names_of_the_hub(model_type, folder)


def with_names_of_the_hub(model_type: str, folder: Path) -> Path:
    """Those that servers know: transformers gives a model other ones that was not loaded from files."""
    if model_type in HUB:
        file, names = folder / "model.safetensors", HUB[model_type]
        save_file({name.replace(*names): p for name, p in load_file(file).items()}, file, {"format": "pt"})
    return folder


def load_composite(
    folder: Path, *, lora: Sequence[str] | None = None, checkpoint: Path | None = None, **how: Any
) -> Policy:
    """The policy as a run loads it, in fp32 on the CPU; `lora`: which layers get adapters."""
    adapters = None if lora is None else LoraConfig(4, 8, 0.0, list(lora), None)
    return load_policy(
        ModelConfig("x", None, "cpu", "auto", "auto", None, False, None, trust_remote_code=False, lora=adapters),
        str(folder),
        **{
            "layout": None,
            "head": TiledHead(tile_width=None),
            "device": torch.device("cpu"),
            "precision": "fp32",
            "train_layer_indices": None,
            "gradient_checkpointing": 0.0,
            "checkpoint": checkpoint,
            **how,
        },
    )


HEADS = 2
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def smollm_tokenizer() -> PreTrainedTokenizerFast:
    """BPE of bytes, digits one by one, as SmolLM has it; learns blanks and a few words."""
    tokenizer = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the  sum   of\n\nthe  numbers  7\n\n8   9  is\n\n10"] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


def write_gguf(file: Path, pre: str = "smollm") -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Write a tied Llama whose matrices have 8 bits, and return what a reader should get: the rounded model, and the
    tokenizer.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize  # which tests on a GPU have not

    tokenizer = smollm_tokenizer()
    torch.manual_seed(0)
    shape: Any = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), **shape, **special, tie_word_embeddings=True, max_position_embeddings=256
    )
    model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_vocab_size(len(tokenizer))
    writer.add_rope_dimension_count(64 // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    state = tokenizer.backend_tokenizer
    merges = [" ".join(pair) for pair in json.loads(state.to_str())["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([state.id_to_token(i) for i in range(len(tokenizer))])
    writer.add_token_types([3] * 3 + [1] * (len(tokenizer) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        matrix = parameter.detach().numpy()
        if name.endswith("norm.weight") or "layernorm" in name:
            writer.add_tensor(_gguf_name(name), matrix)
            continue
        is_rotated = "q_proj" in name or "k_proj" in name  # llama.cpp pairs neighbours, transformers the two halves
        stored = _paired(matrix) if is_rotated else matrix
        bits = quantize(np.ascontiguousarray(stored), GGMLQuantizationType.Q8_0)
        writer.add_tensor(_gguf_name(name), bits, raw_dtype=GGMLQuantizationType.Q8_0)
        rounded = dequantize(bits, GGMLQuantizationType.Q8_0)
        parameter.data.copy_(torch.from_numpy(_halved(rounded) if is_rotated else rounded))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer


def _paired(matrix: np.ndarray) -> np.ndarray:
    return matrix.reshape(HEADS, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def _halved(matrix: np.ndarray) -> np.ndarray:
    return matrix.reshape(HEADS, -1, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def _gguf_name(name: str) -> str:
    if "layers." not in name:
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    block, _, layer = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    return f"blk.{block}.{NAMES[layer]}.weight"
