"""The varlen layout with FlashAttention 4, which is twice as fast as torch's kernel on long sequences, on Hopper and
Blackwell GPUs. The package `flash-attn-4` compiles its kernels when they first run, and keeps them in the user's cache.
"""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from offline_grpo.disk import user_cache
from offline_grpo.errors import require
from offline_grpo.model.layouts.varlen import Varlen, has_varlen_kernel, register

FLASH4 = "offline_grpo_fa4"  # transformers has rules of its own for names with "flash"
GENERATIONS = (9, 10)
"""Compute capabilities, Hopper's and Blackwell's, that it has forward and backward kernels for."""


def has_flash4(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the package is installed and `device` is of a generation that it is for."""
    if not (has_varlen_kernel(device, dtype) and torch.cuda.is_available()):
        return False
    try:
        is_installed = find_spec("flash_attn.cute") is not None
    except ImportError:  # there is no package flash_attn, or one that is older or broken
        return False
    return is_installed and torch.cuda.get_device_capability(device)[0] in GENERATIONS


class Flash4(Varlen):
    """See the module."""

    kernel: ClassVar[str] = FLASH4

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError where the kernel does not run."""
        fix = "needs a Hopper or Blackwell GPU, bf16 or fp16, and the package flash-attn-4 (`uv sync --extra vllm`)"
        require(has_flash4(device, dtype), "model.layout", "flash4", f"{fix}; use model.layout=auto")


@functools.cache
def _interface() -> Any:
    """The package's functions without autograd: torch.compile can call them only as operators with a backward pass."""
    cache = user_cache("flash-attn-4")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache))
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface


def _settings(boundaries: Tensor, longest: int, scale: float, window: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": boundaries,
        "cu_seqlens_k": boundaries,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        "causal": True,
        "window_size_left": None if window == 0 else window - 1,  # besides the token itself
        "window_size_right": None if window == 0 else 0,
    }


@torch.library.custom_op("offline_grpo::flash4", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """See `varlen.Kernel`; no window is 0. Returns also ln(sum(exp(scores))), [heads, T] in float32."""
    out, logsumexp, *_ = _interface()._flash_attn_fwd(
        q, k, v, return_lse=True, **_settings(boundaries, longest, scale, window)
    )
    return out, logsumexp


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("offline_grpo::flash4_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    boundaries: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    settings = _settings(boundaries, longest, scale, window)
    return _interface()._flash_attn_bwd(q, k, v, out, grad.contiguous(), logsumexp.contiguous(), **settings)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, boundaries, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, boundaries)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    return _forward(q, k, v, boundaries, longest, q.shape[-1] ** -0.5 if scale is None else scale, window or 0)[0]


register(FLASH4, _kernel)
