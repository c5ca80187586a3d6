"""Compiled blocks and the loss head that keeps its tiles, on every architecture of the zoo."""

from __future__ import annotations

import logging

import pytest
import torch
from architectures import ZOO, long_batch
from factories import compose_config, make_scoring
from torch import Tensor

from offline_grpo.model.layers import not_compiled
from offline_grpo.model.lm_head import KeptHead
from offline_grpo.model.proof import settle_compile, settle_layout
from offline_grpo.model.scoring import measure_logit_transform
from offline_grpo.run import train

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3", "qwen3_moe", "gemma2", "gpt2"])
def test_auto_compiles_what_it_can_and_changes_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    scoring = make_scoring(ZOO[name].build().to(CUDA, torch.bfloat16))
    scoring.logits = measure_logit_transform(scoring.causal_lm)
    settle_layout(scoring, None, CUDA)
    with caplog.at_level(logging.INFO):
        settle_compile(scoring, "auto", CUDA)
    batch = long_batch().to(CUDA)
    compiled = scoring.logprobs(batch)
    with not_compiled(scoring.model):
        plain = scoring.logprobs(batch)
    mask = batch.completion_mask
    error = (compiled - plain)[mask].square().mean().sqrt() / plain[mask].std()
    print(f"{name}: {caplog.messages[-1]}; relative error {error:.1e}")
    assert error < 0.05, "kernels that are fused round less often; beyond this `auto` would not have compiled"


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("height", "kept_bytes"), [(333, 1 << 40), (100, 0)])
def test_the_kept_head_is_right(height: int, kept_bytes: int, softcap: float | None) -> None:
    torch.manual_seed(0)
    num_tokens, hidden_size, vocab_size = 333, 256, 5003

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=CUDA).bfloat16().requires_grad_()

    hidden, weight, bias = leaf(num_tokens, hidden_size), leaf(vocab_size, hidden_size), leaf(vocab_size)
    targets = torch.randint(vocab_size, (num_tokens,), device=CUDA)
    temperature = torch.linspace(0.5, 2, num_tokens, device=CUDA) * 10
    coefs = torch.linspace(-1, 2, num_tokens, device=CUDA)
    logprobs, entropy = KeptHead.apply(hidden, weight, bias, targets, temperature, softcap, (height, 1024), kept_bytes)
    found = torch.autograd.grad(logprobs @ coefs, [hidden, weight, bias])
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = wide[0] @ wide[1].T + wide[2]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature.double()[:, None], -1)
    right = log_p.gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5)
    for gradient, expected in zip(found, torch.autograd.grad(right @ coefs.double(), wide), strict=True):
        assert (gradient.double() - expected).norm() / expected.norm() < 0.006


@pytest.mark.parametrize(
    "overrides", [["train.gradient_checkpointing=true"], ["model/lora=default"]], ids=["recomputed", "lora"]
)
def test_a_run_trains_with_compiled_blocks(tmp_path, overrides: list[str]) -> None:
    small = ["train.iterations=2", "eval.enabled=false", "train.precision=bf16", "train.lr=1e-4"]
    train(compose_config(*small, *overrides), tmp_path)
    text = (tmp_path / "run.log").read_text()
    assert "model.compile=auto: compiled the blocks" in text
