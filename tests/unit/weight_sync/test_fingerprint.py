"""Fingerprints: equal for equal bits wherever they lie, different for any other."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy
import pytest
import torch

from offline_grpo.engine.inside_vllm import offline_grpo_weights as module
from offline_grpo.engine.inside_vllm.offline_grpo_weights import as_part, fingerprints, sums, texts, totals

DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def one(tensor: torch.Tensor) -> str:
    [text] = fingerprints([tensor])
    return text


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(0)
    return (100 * torch.randn(shape)).to(dtype)


def by_hand(words: numpy.ndarray) -> str:
    """The documented sum, in Python's own integers."""
    return f"{sum(int(word) * (2 * place + 1) for place, word in enumerate(words)) % 2**64:016x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_against_arithmetic_without_overflow(dtype: torch.dtype) -> None:
    tensor = random(6, 8, dtype=dtype)
    assert one(tensor) == by_hand(tensor.numpy().reshape(-1).view(numpy.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row", "rows"), [(1, 4), (3, 5)])
def test_views_and_copies_are_equal(dtype: torch.dtype, row: int, rows: int) -> None:
    """Trainer and server hold a parameter at different places of their storages, even and odd ones."""
    whole = random(9, 5, dtype=dtype)
    view = whole.narrow(0, row, rows)
    assert one(view) == one(view.clone()) == one(torch.nn.Parameter(view, requires_grad=False))
    transposed = view.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert one(transposed) == one(view)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 8])
def test_every_bit_counts(dtype: torch.dtype, size: int) -> None:
    tensor = random(size, dtype=dtype)
    expected = one(tensor)
    raw = tensor.view(torch.uint8).numpy()
    for byte in range(len(raw)):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert one(tensor) != expected, (byte, bit)
            raw[byte] ^= 1 << bit
    assert one(tensor) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_depend_on_the_numbers_alone(dtype: torch.dtype) -> None:
    """As a server may have transposed or permuted them."""
    tensor = random(7, 12, dtype=dtype)
    [expected] = sums([tensor])
    others = [tensor.T, tensor[torch.randperm(7)], torch.cat([tensor, tensor])[:7]]
    assert sums(others) == [expected] * 3
    for place in ((0, 0), (6, 11)):
        other = tensor.clone()
        other[place] = 17
        assert sums([other]) != [expected]
    of_size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    by_hand = sum(int(number) for number in tensor.reshape(-1).view(of_size[tensor.itemsize]))
    assert int(expected, 16) == by_hand % 2**64


def test_more_than_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large tensor, and of small ones after it."""
    monkeypatch.setattr(module, "BATCH_WORDS", 2 * module.PIECE_WORDS)
    size = 8 * module.PIECE_WORDS
    tensor = torch.zeros(size + 16, dtype=torch.int8)
    first, second, small = tensor.clone(), tensor.clone(), random(3, 4)
    first[size - 1] = second[size] = 1
    found = fingerprints([tensor, first, second, small])
    assert len(set(found)) == 4
    assert found[3] == one(small)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(12, 1100), (12, 5)])
def test_parts_add_up(dtype: torch.dtype, dim: int, shape: tuple[int, int]) -> None:
    """Those of a server's workers, uneven ones: 7 rows and 5, 10 bytes each, have no whole words."""
    whole = random(*shape, dtype=dtype)
    parts = [
        part.contiguous() for part in whole.split([7, whole.shape[dim] - 7] if whole.shape[dim] > 7 else [2, 3], dim)
    ]
    starts = [0, parts[0].shape[dim]]
    found = totals(as_part(part, dim, start, whole.shape[dim]) for part, start in zip(parts, starts, strict=True))
    assert texts(found.sum(0, keepdim=True)) == [one(whole)]
    assert texts(found.flip(0)[:1]) != [one(whole)]


INTERPRETED = """
import torch
from offline_grpo.engine.inside_vllm import offline_grpo_weights as module
from offline_grpo.engine.inside_vllm import offline_grpo_fingerprint_kernel as kernel
kernel.SPLIT, kernel.BLOCK = 3, 16
torch.manual_seed(0)
tensors = [(100 * torch.randn(n)).to(dtype) for n in (1, 47, 48, 1000) for dtype in (torch.float32, torch.int8)]
batch = [(module._words(tensor), first) for tensor in tensors for first in (0, 5)]
assert kernel.add_up(batch).tolist() == module._totals(batch).tolist()
"""


@pytest.mark.slow
def test_the_kernel_adds_up_alike() -> None:
    """By Triton's interpreter, without a GPU; it is switched on before Triton is imported."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
