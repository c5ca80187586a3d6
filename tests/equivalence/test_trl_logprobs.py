"""The loss head agrees with TRL's functions for logits and with its fused head, in values and gradients.

TRL is imported by the tests, so that those for a GPU can be collected where it is not installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offline_grpo.model.lm_head import TiledHead

TEMPERATURE = 0.7


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [24, 16], weight [300, 16], bias [300], targets [24]; float32 leaves."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).requires_grad_() for shape in ((24, 16), (300, 16), (300,))
    )
    return hidden, weight, bias, torch.randint(300, (24,), generator=generator)


def gradients(logprobs: Tensor, entropy: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    coefs = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    return torch.autograd.grad((coefs * logprobs).sum() + (coefs.flip(0) * entropy).sum(), leaves)


def test_logits_functions(inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    hidden, weight, bias, targets = inputs
    hidden, weight, bias = (leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias))
    temperature = torch.full((len(hidden),), TEMPERATURE, dtype=torch.float64)
    actual = TiledHead(tile_width=64)(hidden, weight, bias, targets, temperature, entropy_requires_grad=True)
    logits = (hidden @ weight.T + bias) / TEMPERATURE  # [N, V]
    expected = selective_log_softmax(logits, targets), entropy_from_logits(logits)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    leaves = [hidden, weight, bias]
    torch.testing.assert_close(gradients(*actual, leaves), gradients(*expected, leaves), rtol=1e-10, atol=1e-12)


def test_fused_head(inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight, bias, targets = inputs
    temperature = torch.full((len(hidden),), TEMPERATURE)
    actual = TiledHead(tile_width=64)(hidden, weight, bias, targets, temperature, entropy_requires_grad=True)
    expected = ChunkedLogProbFunction.apply(hidden, weight, bias, targets, TEMPERATURE, 128, None, 1.0, ("entropy",))[
        :2
    ]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    leaves = [hidden, weight, bias]
    torch.testing.assert_close(gradients(*actual, leaves), gradients(*expected, leaves), rtol=1e-4, atol=1e-4)
