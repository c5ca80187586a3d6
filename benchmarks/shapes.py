"""Shapes of models that people train, for benchmarks with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offline_grpo.model.layers import is_composite
from offline_grpo.model.tiny import CHAT_TEMPLATE, build_char_tokenizer

QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


def qwen3(hidden: int, intermediate: int, layers: int, heads: int) -> Qwen3Config:
    blocks: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": heads}
    return Qwen3Config(**QWEN3, **blocks, hidden_size=hidden, intermediate_size=intermediate)


def qwen3_moe(hidden: int, expert: int, layers: int, heads: int, experts: int, vocab: int = 151936) -> Qwen3MoeConfig:
    """Eight experts for each token, and four heads for keys and values."""
    blocks: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 4}
    sizes = {"hidden_size": hidden, "moe_intermediate_size": expert, "intermediate_size": 3 * hidden}
    routing = {"num_experts": experts, "num_experts_per_tok": 8, "norm_topk_prob": True}
    more = {"vocab_size": vocab, "tie_word_embeddings": False}
    return Qwen3MoeConfig(**{**QWEN3, **blocks, **sizes, **routing, **more})


def qwen2(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int) -> Qwen2Config:
    blocks: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 2}
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate}
    return Qwen2Config(**sizes, **blocks, max_position_embeddings=positions, tie_word_embeddings=True, eos_token_id=2)


def llama(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, positions: int, **more: Any
) -> LlamaConfig:
    blocks: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate}
    return LlamaConfig(**sizes, **blocks, max_position_embeddings=positions, **more)


IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def qwen2_5_vl(text: dict[str, Any], tower: dict[str, Any]) -> Qwen2_5_VLConfig:
    """With the ids that `save_model`'s tokenizer has, and rotary sections of the published shares."""
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    sections = [half // 4, half * 3 // 8, half * 3 // 8]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    text = {"rope_parameters": rope, "tie_word_embeddings": True, "max_position_embeddings": 32768, **text}
    tower = {"out_hidden_size": text["hidden_size"], "patch_size": 14, "window_size": 112, **tower}
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids: Any = {
        name: seeing_tokenizer(1).convert_tokens_to_ids(token) for name, token in zip(names, IMAGE_TOKENS, strict=True)
    }
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)


def seeing_tokenizer(length: int) -> Any:
    tokenizer: Any = build_char_tokenizer(length)
    tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TOKENS]})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<image>", "".join(IMAGE_TOKENS[:3]))
    return tokenizer


ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

SIZES: dict[str, PretrainedConfig] = {
    "small": qwen2(128, 128, 256, 2, 4, 4096),
    "qwen2_5_0_5b": qwen2(151936, 896, 4864, 24, 14, 4096),
    "tiny": LlamaConfig(
        vocab_size=2000, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
    ),
    "11m": Qwen2Config(
        vocab_size=32000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **ENDS,
    ),
    "135m": llama(49152, 576, 1536, 30, 9, 3, 8192, tie_word_embeddings=True, **ENDS),  # SmolLM2
    "0.6b": qwen3(1024, 3072, 28, 16),
    "1.1b": llama(32000, 2048, 5632, 22, 32, 4, 2048, tie_word_embeddings=False, **ENDS),  # TinyLlama
    "1.7b": qwen3(2048, 6144, 28, 16),
    "4b": qwen3(2560, 9728, 36, 32),
    "qwen2_5_vl_3b": qwen2_5_vl(
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
        | {"num_attention_heads": 16, "num_key_value_heads": 2},
        {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420}
        | {"fullatt_block_indexes": [7, 15, 23, 31]},
    ),
    "small_vl": qwen2_5_vl(
        {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "fullatt_block_indexes": [1]},
    ),
    "small_moe": qwen3_moe(128, 64, 2, 4, 16, vocab=128),
    "3b_a0.6b": qwen3_moe(1024, 512, 14, 16, 128),
    "30b_a3b": qwen3_moe(2048, 768, 48, 32, 128),
    "8b": llama(128256, 4096, 14336, 32, 32, 8, 131072, tie_word_embeddings=False),
}
"""Four small ones, SmolLM2-135M, Qwen2.5-0.5B, Qwen3-0.6B, -1.7B, -4B, TinyLlama-1.1B, Qwen2.5-VL-3B, Llama-3.1-8B;
mixtures of experts: a small one, one of 3B weights, Qwen3-30B-A3B.
"""


def save_model(folder: Path, shape: str, dtype: str) -> Path:
    """Random weights, made on the GPU if there is one; token 2 ends a sequence. A tokenizer of characters; of a model
    that sees, also its processor.
    """
    torch.manual_seed(0)
    config: Any = SIZES[shape]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        kind: Any = AutoModelForMultimodalLM if is_composite(config) else AutoModelForCausalLM
        model: Any = kind.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id = 2
    model.save_pretrained(str(folder))
    length = config.get_text_config().max_position_embeddings
    if is_composite(config):
        tokenizer = seeing_tokenizer(length)
        parts: Any = (Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), tokenizer.chat_template)
        Qwen2_5_VLProcessor(*parts).save_pretrained(str(folder))
    else:
        build_char_tokenizer(length).save_pretrained(str(folder))
    del model
    torch.cuda.empty_cache()  # servers take their shares of what is free
    return folder
