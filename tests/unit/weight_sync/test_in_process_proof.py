"""Architectures that transformers computes in another way in long sequences, or with a cache: refused, or right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import COMPOSITES, ODD, ZOO, build_composite
from factories import make_policy

from offline_grpo.errors import ConfigError
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model.policy import Policy
from offline_grpo.model.proof import check_causality, settle_layout
from offline_grpo.model.scoring import measure_logit_transform
from offline_grpo.weight_sync.in_process import prove_sampling

CPU = torch.device("cpu")
FORESEES = r"is not causal: what follows a token changes its logprob, by .* in sequences of 120 tokens; use shorter"
DRIFTS = r"is sampled in process .* nats away from its own forward pass; use generation=vllm_server$"
BREAKS = r"cannot be sampled in process \(.*\); use generation=vllm_server$"


def proven(model: Any, num_tokens: int, *, batch_size: int = 8) -> Policy:
    """The policy, if nothing refuses it."""
    tokenizer: Any = SimpleNamespace(eos_token_id=2, pad_token_id=0)
    policy = make_policy(model, tokenizer)
    policy.scoring.logits = measure_logit_transform(model)
    settle_layout(policy.scoring, None, CPU)
    check_causality(policy.scoring, num_tokens, CPU)
    prove_sampling(TransformersClient(model=model, tokenizer=tokenizer, batch_size=batch_size), policy, num_tokens)
    return policy


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, FORESEES) for name in ("deepseek_v32", "glm_moe_dsa", "doge", "deepseek_v4")),
        *((name, DRIFTS) for name in ("zamba2", "nemotron_h")),
        *((name, BREAKS) for name in ("minimax", "recurrent_gemma")),
        ("modernbert_decoder", r"changes its hidden states or logits .*; choose another model$"),
    ],
)
def test_it_is_refused(name: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.train_id=\S*: \w+ForCausalLM {fault}") as refused:
        proven(ODD[name].build(), 120)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "num_tokens"), [("deepseek_v32", 16), ("qwen3_5", 120), ("gpt_oss", 120)])
def test_what_is_right_passes(name: str, num_tokens: int) -> None:
    """Of a sparse architecture, in sequences of which nothing is left out."""
    proven((ODD | ZOO)[name].build(), num_tokens)


@pytest.mark.parametrize(
    "name", [n if n in ("qwen3_vl", "gemma4") else pytest.param(n, marks=pytest.mark.slow) for n in COMPOSITES]
)
def test_a_composite_is_sampled_as_text(name: str) -> None:
    """Nothing of the rows before, whose number was another, stays; a sampled token that stands for an image is one."""
    model = build_composite(name)
    for batch_size in (8, 3):
        proven(model, 60, batch_size=batch_size)
