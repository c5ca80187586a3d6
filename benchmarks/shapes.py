"""Shapes of models that people train, for benchmarks with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from offline_grpo.model.tiny import build_char_tokenizer

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
    "8b": llama(128256, 4096, 14336, 32, 32, 8, 131072, tie_word_embeddings=False),
}
"""Three small ones, SmolLM2-135M, Qwen2.5-0.5B, Qwen3-0.6B, -1.7B, -4B, TinyLlama-1.1B and Llama-3.1-8B."""


def save_model(folder: Path, shape: str, dtype: str) -> Path:
    """Random weights, made on the GPU if there is one; token 2 ends a sequence. A tokenizer of characters."""
    torch.manual_seed(0)
    config: Any = SIZES[shape]
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    model.save_pretrained(str(folder))
    build_char_tokenizer(config.max_position_embeddings).save_pretrained(str(folder))
    del model
    torch.cuda.empty_cache()  # servers take their shares of what is free
    return folder
