"""A zoo of tiny models with random weights, one for each way in which architectures differ in what training can do with
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from factories import make_rollout
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from offline_grpo.model.load import attention_of
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
