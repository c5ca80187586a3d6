"""Fingerprints: equal for equal bits wherever they lie, different for any other."""

from __future__ import annotations

import numpy
import pytest
import torch

from offline_grpo.engine.inside_vllm import offline_grpo_fingerprint as module
from offline_grpo.engine.inside_vllm.offline_grpo_fingerprint import fingerprints, sums

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


def test_more_than_one_real_chunk() -> None:
    size = module.CHUNK_ELEMENTS_CPU
    tensor = torch.zeros(size + 2, dtype=torch.int8)
    first, second = tensor.clone(), tensor.clone()
    first[size - 1] = 1
    second[size] = 1
    assert len(set(fingerprints([tensor, first, second]))) == 3
