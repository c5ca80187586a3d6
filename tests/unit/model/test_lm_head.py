"""The loss heads against materialised logits and autograd in float64, and their promises about memory and precision. On
a CPU the kernel of the one that keeps its tiles is plain PyTorch, see tests/gpu.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from offline_grpo.model import lm_head
from offline_grpo.model.lm_head import KeptHead, TiledHead

NUM_TOKENS, HIDDEN, VOCAB = 13, 8, 50


def make_inputs(
    dtype: torch.dtype = torch.float64, *, num_tokens: int = NUM_TOKENS, scale: float = 1.0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "hidden": normal(num_tokens, HIDDEN).to(dtype).requires_grad_(),
        "weight": normal(VOCAB, HIDDEN).to(dtype).requires_grad_(),
        "bias": normal(VOCAB).to(dtype).requires_grad_(),
        "targets": torch.randint(VOCAB, (num_tokens,), generator=generator),
        "temperature": (0.1 + 9.9 * torch.rand(num_tokens, generator=generator)).float(),
    }


def materialised(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, in float64."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature.double()[:, None], dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def gradients(outputs: tuple[Tensor, Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a weighted sum of both outputs whose weights differ from token to token, in sign too."""
    coefs = torch.linspace(-1, 2, len(outputs[0]), dtype=torch.float64)
    total = (coefs * outputs[0]).sum()
    if outputs[1].requires_grad:
        total = total + (coefs.flip(0) * outputs[1]).sum()
    return torch.autograd.grad(total, leaves, retain_graph=True)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("tile_width", [None, 7])
def test_values_and_gradients_are_those_of_materialised_logits(tile_width: int | None, softcap: float | None) -> None:
    inputs = make_inputs()
    leaves = [inputs["hidden"], inputs["weight"], inputs["bias"]]
    expected = materialised(**inputs, softcap=softcap)
    actual = TiledHead(tile_width=tile_width)(**inputs, softcap=softcap, entropy_requires_grad=True)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients(actual, leaves), gradients(expected, leaves), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_many_tokens_are_split_too(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 5 rows and 16 columns; the gradient of the weights is rounded once all the same."""
    inputs, tile_bytes = make_inputs(dtype), 5 * 16 * (8 if dtype == torch.float64 else 4)
    leaves = [inputs["hidden"], inputs["weight"], inputs["bias"]]
    whole = TiledHead(tile_width=16)(**inputs, entropy_requires_grad=True)
    monkeypatch.setattr(lm_head, "CPU_TILE_BYTES", tile_bytes)
    monkeypatch.setattr(lm_head, "MIN_TILE_WIDTH", 16)
    parts = TiledHead(tile_width=None)(**inputs, entropy_requires_grad=True)
    assert parts[0].grad_fn is not None
    assert parts[0].grad_fn.shape == (5, 16)  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(parts, whole)
    for found, expected in zip(gradients(parts, leaves), gradients(whole, leaves), strict=True):
        assert (found != expected).double().mean() <= (0.05 if dtype == torch.bfloat16 else 1)
        torch.testing.assert_close(found, expected)


def test_two_tokens_by_hand() -> None:
    # Logits 0 and ln 3 at temperature 1: p = 1/4, 3/4. At temperature 0.5 the gap doubles: p = 1/10, 9/10.
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [1.0986122886681098]])
    temperature, targets = torch.tensor([1.0, 0.5]), torch.tensor([0, 1])
    logprobs, entropy = TiledHead(tile_width=None)(
        hidden, weight, None, targets, temperature, entropy_requires_grad=False
    )
    torch.testing.assert_close(logprobs, torch.tensor([-1.3862944, -0.1053605]))
    torch.testing.assert_close(entropy, torch.tensor([0.5623351, 0.3250830]))


def test_entropy_as_metric_has_no_gradient_and_leaves_that_of_the_logprobs_alone() -> None:
    inputs = make_inputs()
    leaves = [inputs["hidden"], inputs["weight"], inputs["bias"]]
    logprobs, entropy = TiledHead(tile_width=None)(**inputs, entropy_requires_grad=False)
    expected_logprobs, expected_entropy = materialised(**inputs)
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, expected_entropy.detach())
    torch.testing.assert_close(gradients((logprobs, entropy), leaves), gradients((expected_logprobs, entropy), leaves))


@pytest.mark.parametrize("temperature", [0.1, 10.0])
def test_logits_of_ten_thousand(temperature: float) -> None:
    # Logits are whole numbers that float32 holds exactly; neighbours differ by 0 .. 3, so p is far from one-hot.
    logits = 10_000.0 + torch.arange(24).reshape(4, 6) % 4  # [4, 6]
    logits[1] -= 20_000.0
    hidden, weight = torch.eye(4, requires_grad=True), logits.T.contiguous().requires_grad_()
    arguments = (hidden, weight, None, torch.tensor([0, 3, 2, 5]), torch.full((4,), temperature))
    actual, expected = TiledHead(tile_width=4)(*arguments, entropy_requires_grad=True), materialised(*arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(gradients(actual, [weight]), gradients(expected, [weight]), rtol=1e-5, atol=1e-6)


def test_bfloat16_inputs_cost_only_the_rounding_of_their_gradients() -> None:
    inputs = make_inputs(torch.bfloat16)
    leaves = [inputs["hidden"], inputs["weight"], inputs["bias"]]
    actual, expected = TiledHead(tile_width=16)(**inputs, entropy_requires_grad=True), materialised(**inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    assert [gradient.dtype for gradient in gradients(actual, leaves)] == [torch.bfloat16] * 3
    torch.testing.assert_close(gradients(actual, leaves), gradients(expected, leaves), rtol=2**-7, atol=1e-5)


def test_no_tokens() -> None:
    inputs = make_inputs(torch.float32, num_tokens=0)
    outputs = TiledHead(tile_width=None)(**inputs, entropy_requires_grad=True)
    assert [tuple(output.shape) for output in outputs] == [(0,), (0,)]
    gradient_hidden, gradient_weight, gradient_bias = gradients(
        outputs, [inputs["hidden"], inputs["weight"], inputs["bias"]]
    )
    assert gradient_hidden.shape == (0, HIDDEN)
    assert not gradient_weight.any()
    assert not gradient_bias.any()


class Watch(TorchDispatchMode):
    """Counts operations and records the size of the largest tensor that any of them returns."""

    num_operations = 0
    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_no_tensor_is_larger_than_two_tiles_or_an_input() -> None:
    num_tokens, vocab, hidden_size, tile_width = 64, 1000, 8, 128
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    targets, temperature = torch.arange(num_tokens), torch.ones(num_tokens)
    with Watch() as largest:
        outputs = TiledHead(tile_width=tile_width)(
            hidden, weight, None, targets, temperature, entropy_requires_grad=True
        )
        (outputs[0].sum() + outputs[1].sum()).backward()
    assert largest.num_elements == 2 * num_tokens * tile_width


EVERYTHING = 1 << 40


def check_kept(
    inputs: dict[str, Any], shape: tuple[int, int], *, kept_bytes: int = EVERYTHING, rtol: float, bias: bool = False
) -> Tensor:
    """Of the head that keeps its tiles, in bfloat16, against the definition; `rtol` of gradients. Returns logprobs."""
    names = ["hidden", "weight", *(["bias"] if bias else [])]
    exact = inputs | {name: inputs[name].detach().double().requires_grad_() for name in names}
    expected = materialised(**exact)
    tensors = [inputs[name] for name in ("hidden", "weight", "bias", "targets", "temperature")]
    found = KeptHead.apply(*tensors, inputs.get("softcap"), shape, kept_bytes)
    assert not found[1].requires_grad
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6, check_dtype=False)
    ours = gradients(found, [inputs[name] for name in names])
    theirs = gradients((expected[0], found[1]), [exact[name] for name in names])
    for gradient, right in zip(ours, theirs, strict=True):
        assert gradient.isfinite().all()
        assert (gradient.double() - right).norm() < rtol * right.norm()
    return found[0]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(
    ("shape", "kept_bytes"),
    [((13, 50), EVERYTHING), ((13, 7), 2 * 13 * 7 * 3), ((5, 7), 2 * 5 * 7 * 4), ((13, 7), 0)],
)
def test_kept_tiles_give_the_same(shape: tuple[int, int], kept_bytes: int, softcap: float | None) -> None:
    inputs: dict[str, Any] = make_inputs(torch.bfloat16)
    inputs |= {"softcap": softcap, "temperature": torch.linspace(0.3, 3, 13)}
    if softcap is None:
        inputs["bias"] = None
    # bfloat16 has 8 bits; those of the bias are sums over tokens that cancel in part
    check_kept(inputs, shape, kept_bytes=kept_bytes, rtol=0.006 if softcap is None else 0.01, bias=softcap is not None)


@pytest.mark.parametrize("shape", [(13, 50), (5, 7)])
def test_a_target_that_is_all_but_certain_keeps_its_small_gradient(shape: tuple[int, int]) -> None:
    """1 - p is 1e-4: the difference of two bfloat16 numbers would be 0, or tens of times too large."""
    inputs = make_inputs(torch.bfloat16, scale=0.05) | {"targets": torch.full((13,), 5), "temperature": torch.ones(13)}
    inputs["bias"] = torch.full((VOCAB,), -1.0).index_fill(0, torch.tensor([5]), 12.0).bfloat16().requires_grad_()
    assert check_kept(inputs, shape, rtol=0.01).max().item() > -2e-4


def test_a_target_in_a_tile_far_below_the_peak_keeps_its_gradient() -> None:
    """200 nats below: nothing of that tile can be told from 0 beside the peak; the target's own gradient is whole."""
    inputs = make_inputs(torch.bfloat16) | {"targets": torch.arange(13), "temperature": torch.ones(13)}
    inputs["bias"] = (200.0 * (torch.arange(VOCAB) >= 40)).bfloat16().requires_grad_()
    check_kept(inputs, (13, 10), rtol=0.006)


@pytest.mark.parametrize(
    ("kept_gib", "bonus", "is_kept"), [(3.0, False, True), (3.0, True, False), (0.0, False, False)]
)
def test_when_tiles_are_kept(kept_gib: float, bonus: bool, is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "is_compiled", lambda *_: True)
    chosen: list[str] = []
    for name in ("KeptHead", "_TiledHead"):
        stand_in = type(name, (), {"apply": staticmethod(lambda *_, name=name: chosen.append(name))})
        monkeypatch.setattr(lm_head, name, stand_in)
    hidden, weight = torch.zeros(3, HIDDEN, dtype=torch.bfloat16), torch.zeros(VOCAB, HIDDEN, dtype=torch.bfloat16)
    targets, temperature = torch.zeros(3, dtype=torch.int64), torch.ones(3)
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
