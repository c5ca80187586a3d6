"""`train.sequence_parallel=N`: N processes share every sequence (DeepSpeed-Ulysses, arXiv 2309.14509).

    row          the T tokens of a microbatch end to end, in N slices of C tokens, of which each process has one
    attention    all-to-all turns C tokens of H heads into N x C tokens of H / N heads; a kernel sees whole sequences
    statistics   each process says those of the tokens that its slice predicts; added up they are [T], on all of them

So every process computes the loss of whole sequences, and its backward pass goes into its own slice alone. Gradients of
parameters are sums over processes, as they are without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from offline_grpo.errors import require
from offline_grpo.interfaces import Layout
from offline_grpo.model.layers import layer_configs
from offline_grpo.model.layouts import CHUNK, Varlen, attend, kernel_arguments, switched
from offline_grpo.types import TokenBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

KEY = "train.sequence_parallel"
NAME = "offline_grpo_ulysses"
WHOLE_SEQUENCES = {"full_attention", "sliding_attention"}
"""Kinds of layers that an all-to-all of heads is enough for. Recurrences and convolutions would need the slice before.
"""


def check_shareable(model_config: PretrainedConfig, size: int, *, has_pictures: bool) -> None:
    """Raise ConfigError for a model whose sequences `size` processes cannot share."""
    config: Any = model_config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ())} - WHOLE_SEQUENCES
    chunked = {"chunked_attention"} if getattr(config, CHUNK, None) else set()
    if others := sorted(kinds | chunked):
        fix = f"shares out the heads of attention, and {config.model_type} has layers of {', '.join(others)}; use 1"
        require(False, KEY, size, fix)
    heads = sorted({getattr(layer, "num_attention_heads", None) or 0 for layer in layer_configs(config)})
    fix = f"shares out {' or '.join(map(str, heads))} heads of attention: it must divide them; use 1"
    require(all(number > 0 and number % size == 0 for number in heads), KEY, size, fix)
    require(not has_pictures, KEY, size, "shares out text alone, and these problems have pictures; use 1")


class Ulysses(Varlen):
    """A slice of a row for each process of a group. The kernel is that of `alone`, by which a process scores without
    the others; where `alone` pads, it is torch's for one sequence after the other.
    """

    def __init__(self, alone: Layout, group: distributed.ProcessGroup) -> None:
        self.alone, self.group = alone, group
        self.size, self.rank = group.size(), group.rank()
        self._function = torch.compiler.disable(self._attend)  # messages between processes are not to be compiled

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """It was when `alone` was settled."""

    def hidden_states(self, decoder: nn.Module, batch: TokenBatch) -> Tensor:
        """[C, H] of this process's slice. What the last slices are short of is a sequence of its own, of zeros."""
        first, length = self._slice(batch)
        missing = self.size * length - len(batch.token_ids)
        rows = (pad(values, (0, missing))[None] for values in (batch.token_ids, batch.position_ids))  # [1, N * C]
        token_ids, position_ids = (row[:, first : first + length] for row in rows)
        lengths = (*batch.sequence_lengths, missing) if missing else batch.sequence_lengths
        with self.attention(decoder, batch):
            hidden = decoder(
                input_ids=token_ids,  # [1, C]
                position_ids=position_ids,
                use_cache=False,
                **kernel_arguments(lengths, batch.token_ids.device),
            ).last_hidden_state  # [1, C, H]
        return hidden[0]

    @contextmanager
    def attention(self, decoder: nn.Module, batch: TokenBatch) -> Iterator[None]:
        """The group's inside; afterwards the model's own."""
        with switched(decoder, NAME, self._function):
            yield

    def own(self, batch: TokenBatch, at: Tensor) -> tuple[int, slice]:
        """Where this process's slice begins, and which of the trained tokens `at` [N] it predicts. Waits for a GPU."""
        first, length = self._slice(batch)
        bounds = torch.tensor((first, first + length), device=at.device)
        return first, slice(*torch.searchsorted(at - 1, bounds).tolist())

    def whole(self, values: Tensor) -> Tensor:
        """What all processes of the group have together, where each has zeros in the others' places."""
        return _Total.apply(values, self.group)  # type: ignore[return-value]

    def _slice(self, batch: TokenBatch) -> tuple[int, int]:
        """Its first token and its length C."""
        length = -(-len(batch.token_ids) // self.size)
        return self.rank * length, length

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **how: Any
    ) -> tuple[Tensor, None]:
        """As `layouts.attend`, on [1, heads, C, D] of this process's slice."""
        # Fewer keys' heads than processes: each is sent to several.
        times = self.size // gcd(self.size, key.shape[1])
        rows = (query, *(x.repeat_interleave(times, 1) if times > 1 else x for x in (key, value)))
        q, k, v = (_Exchange.apply(x[0].transpose(0, 1), self.group, True) for x in rows)  # [N * C, heads / N, D]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        kernel = self.alone.kernel if isinstance(self.alone, Varlen) else one_by_one
        out, _ = attend(kernel, module, q, k, v, attention_mask, **how)  # [1, N * C, heads / N, D]
        return _Exchange.apply(out[0], self.group, False)[None], None


def one_by_one(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float | None, window: int) -> Tensor:
    """torch's attention for one sequence after the other, [T, heads, D]. Runs everywhere."""
    out = []
    for begin, end in pairwise(boundaries.tolist()):
        query, keys, values = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, L, D]
        how: dict[str, Any] = {"is_causal": True}
        if window > 0:  # the token itself counts
            seen = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device)
            how = {"attn_mask": seen.tril().triu(1 - window)}
        found = scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True, **how)
        out.append(found[0].transpose(0, 1))
    return torch.cat(out)


class _Exchange(torch.autograd.Function):
    """All-to-all of [C, heads, D] to [N * C, heads / N, D], or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: distributed.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchanged(grads[0], ctx.group, not ctx.to_heads), None, None


def _exchanged(x: Tensor, group: distributed.ProcessGroup, to_heads: bool) -> Tensor:
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1) if to_heads else x.unflatten(0, (group.size(), -1))
    sent = parts.contiguous()  # [N, C, heads / N, D], of which row r goes to process r
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)


class _Total(torch.autograd.Function):
    """The sum over the group. As all of its processes compute the same loss of it, each keeps its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: distributed.ProcessGroup) -> Tensor:
        total = x.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None
