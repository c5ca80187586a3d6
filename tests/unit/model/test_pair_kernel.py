"""The Triton kernels of the filtered head, in Triton's interpreter; on a GPU see tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

KERNELS = """
import torch
from offline_grpo.model import pair_kernel
from offline_grpo.model.filtered_head import GATHERED
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for size, vocab, width, pairs in ((37, 50, 300, 300), (5, 3, 72, 41), (4, 6, 16, 0)):
        a, b = torch.randn(size, width).to(dtype), torch.randn(vocab, width).to(dtype)
        rows, ids, factors = torch.randint(size, (pairs,)), torch.randint(vocab, (pairs,)), torch.randn(pairs)
        ids[: pairs // 2] = 1
        found, right = pair_kernel.products(a, b, rows, ids), GATHERED.products(a, b, rows, ids)
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-4)
        for args in ((factors, a, rows, b, ids), (factors, b, ids, a, rows)):
            torch.testing.assert_close(pair_kernel.sums(*args), GATHERED.sums(*args))
"""


def test_the_kernels_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    subprocess.run([sys.executable, "-c", KERNELS], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
