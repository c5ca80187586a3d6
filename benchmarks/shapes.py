"""Shapes of models that people train, for benchmarks with random weights."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

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


SIZES: dict[str, PretrainedConfig] = {
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
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "135m": LlamaConfig(  # SmolLM2
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "0.6b": qwen3(1024, 3072, 28, 16),
    "1.1b": LlamaConfig(  # TinyLlama
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "1.7b": qwen3(2048, 6144, 28, 16),
    "4b": qwen3(2560, 9728, 36, 32),
    "8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
}
"""Two small ones, SmolLM2-135M, Qwen3-0.6B, TinyLlama-1.1B, Qwen3-1.7B, Qwen3-4B and Llama-3.1-8B."""
