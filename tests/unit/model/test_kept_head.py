"""The head that keeps its tiles, against materialised logits in float64. On a CPU the kernel is plain PyTorch, see
tests/gpu.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from offline_grpo.model import lm_head
from offline_grpo.model.lm_head import KeptHead, TiledHead

N, H, V = 13, 8, 50
EVERYTHING = 1 << 40


def leaf(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(torch.bfloat16).requires_grad_()


def oracle(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, softcap: float | None
) -> list[Tensor]:
    """Logprobs, entropies, and the gradients of a weighted sum of the logprobs, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    logits = leaves[0] @ leaves[1].T + (leaves[2] if bias is not None else 0)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature.double()[:, None], -1)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    return [
        logprobs.detach(),
        -(log_p.exp() * log_p).sum(-1).detach(),
        *torch.autograd.grad(logprobs @ coefs(), leaves),
    ]


def coefs() -> Tensor:
    return torch.linspace(-1, 2, N, dtype=torch.float64)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("has_bias", "softcap"), [(False, None), (True, 3.0)])
@pytest.mark.parametrize(
    ("shape", "kept_bytes"), [((N, V), EVERYTHING), ((N, 7), 2 * N * 7 * 3), ((5, 7), 2 * 5 * 7 * 4), ((N, 7), 0)]
)
def test_values_and_gradients(shape: tuple[int, int], kept_bytes: int, has_bias: bool, softcap: float | None) -> None:
    hidden, weight, bias = leaf(N, H, seed=0), leaf(V, H, seed=1), leaf(V, seed=2) if has_bias else None
    targets = torch.randint(V, (N,), generator=torch.Generator().manual_seed(3))
    temperature = torch.linspace(0.3, 3, N)
    expected = oracle(hidden, weight, bias, targets, temperature, softcap)
    logprobs, entropy = KeptHead.apply(hidden, weight, bias, targets, temperature, softcap, shape, kept_bytes)
    assert not entropy.requires_grad
    found = torch.autograd.grad(logprobs.double() @ coefs(), [t for t in (hidden, weight, bias) if t is not None])
    for value, right in zip((logprobs, entropy), expected[:2], strict=True):
        torch.testing.assert_close(value.detach().double(), right, rtol=2e-6, atol=2e-6)
    for gradient, right in zip(found, expected[2:], strict=True):
        assert relative(gradient, right) < 0.006, "bfloat16 has 8 bits"


@pytest.mark.parametrize("shape", [(N, V), (5, 7)])
def test_a_target_that_is_all_but_certain_keeps_its_small_gradient(shape: tuple[int, int]) -> None:
    """1 - p is 1e-4: the difference of two bfloat16 numbers would be 0, or tens of times too large."""
    hidden, weight = leaf(N, H, seed=0, scale=0.05), leaf(V, H, seed=1, scale=0.05)
    temperature = torch.ones(N)
    bias = torch.full((V,), -1.0)
    bias[5] = 12.0
    targets = torch.full((N,), 5)
    expected = oracle(hidden, weight, bias.bfloat16(), targets, temperature, None)
    assert float(expected[0].max()) > -2e-4
    logprobs, _ = KeptHead.apply(hidden, weight, bias.bfloat16(), targets, temperature, None, shape, EVERYTHING)
    found = torch.autograd.grad(logprobs.double() @ coefs(), [hidden, weight])
    for gradient, right in zip(found, expected[2:4], strict=True):
        assert relative(gradient, right) < 0.01


def test_a_target_in_a_tile_far_below_the_peak_keeps_its_gradient() -> None:
    """200 nats below: nothing of that tile can be told from 0 beside the peak; the target's own gradient is whole."""
    hidden, weight = leaf(N, H, seed=0), leaf(V, H, seed=1)
    bias = torch.zeros(V)
    bias[40:] = 200.0
    targets = torch.arange(N)
    expected = oracle(hidden, weight, bias.bfloat16(), targets, torch.ones(N), None)
    logprobs, _ = KeptHead.apply(hidden, weight, bias.bfloat16(), targets, torch.ones(N), None, (N, 10), EVERYTHING)
    found = torch.autograd.grad(logprobs.double() @ coefs(), [hidden, weight])
    assert all(torch.isfinite(gradient).all() for gradient in found)
    for gradient, right in zip(found, expected[2:4], strict=True):
        assert relative(gradient, right) < 0.006


@pytest.mark.parametrize(
    ("kept_gib", "bonus", "is_kept"), [(3.0, False, True), (3.0, True, False), (0.0, False, False)]
)
def test_when_tiles_are_kept(kept_gib: float, bonus: bool, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "is_compiled_by_default", lambda _: True)
    chosen: list[str] = []
    for name in ("KeptHead", "_TiledHead"):
        stand_in = type(name, (), {"apply": staticmethod(lambda *_, name=name: chosen.append(name))})
        monkeypatch.setattr(lm_head, name, stand_in)
    hidden, weight = torch.zeros(N, H, dtype=torch.bfloat16), torch.zeros(V, H, dtype=torch.bfloat16)
    targets, temperature = torch.zeros(N, dtype=torch.int64), torch.ones(N)
    head = TiledHead(tile_width=None, kept_gib=kept_gib)
    head(hidden, weight, None, targets, temperature, entropy_requires_grad=bonus)
    assert chosen == ["KeptHead" if is_kept else "_TiledHead"]


INTERPRETED = """
import torch
from offline_grpo.model import head_kernel, lm_head
torch.manual_seed(0)
for softcap in (None, 3.0):
    for width in (37, 256, 300):
        logits, bias, bits_per_logit = 5 * torch.randn(9, width), torch.randn(width).bfloat16(), torch.rand(9) + 0.5
        for args in ((logits, bias, softcap, bits_per_logit), (logits, None, softcap, bits_per_logit)):
            stats, powers = head_kernel.stats_and_powers(*args, keep=True)
            right, expected = lm_head._stats_and_powers(*args, keep=True)
            for found, value in zip(stats, right, strict=True):
                torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(powers, expected)
            assert head_kernel.stats_and_powers(*args, keep=False)[1] is None
"""


@pytest.mark.slow
def test_the_kernel_is_right() -> None:
    """By Triton's interpreter, without a GPU; it is switched on before Triton is imported."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
