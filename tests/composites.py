"""Tiny composites with random weights: a text model of each family that is published with a tower, for images or for
sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from architectures import LINEAR, NEW
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.load import load_policy
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.settings import LoraConfig, ModelConfig

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
