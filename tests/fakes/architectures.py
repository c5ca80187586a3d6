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
import yaml
from factories import make_llama, make_rollout
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
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

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
VOCAB = 97


@dataclass(frozen=True)
class Architecture:
    """How to make one, and what of it does not work.

    Args:
        wrong: layout -> what the refusal says about it.
    """

    model_type: str
    settings: dict[str, Any]
    wrong: dict[str, str]

    @classmethod
    def of(cls, name: str, model_type: str = "", **settings: Any) -> Architecture:
        return cls(model_type or name, settings, TABLE["wrong"].get(name, {}))

    @property
    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.model_type, **self.settings)

    def build(self, **changes: Any) -> PreTrainedModel:
        """A model with random weights, the same at every call, with the attention that `auto` chooses."""
        config = AutoConfig.for_model(self.model_type, **{**self.settings, **changes})
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config, "auto")).eval()


ZOO = {name: Architecture.of(name, **row) for name, row in TABLE["text"].items()}
ODD = {name: Architecture.of(name, **row) for name, row in TABLE["refused"].items()}
"""Architectures that are refused, unless sequences are short or a server samples."""
COMPOSITES: dict[str, dict[str, Any]] = TABLE["composites"]
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
    return build_batch(rollouts)


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
WITH_EXPERTS = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64}
"""Such sizes of mixtures of experts."""
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""As vLLM's kernels and its reader of config.json want DeepSeek-V3."""
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
    for parameter in model.parameters():
        if not parameter.any():  # Gemma 3's projector begins with zeros, and sees nothing
            torch.nn.init.normal_(parameter, std=0.2)
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
    if model_type == "gemma3":  # as on the Hub: transformers gives other names if it was not loaded from files
        file, names = folder / "model.safetensors", ("vision_tower.", "vision_tower.vision_model.")
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
    shape: Any = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 64}
    shape |= {"num_attention_heads": HEADS, "max_position_embeddings": 256, "initializer_range": 0.02}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    model = make_llama(seed=0, **shape, **special, tie_word_embeddings=True)
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
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
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
