"""Layouts: how a flat batch becomes the rows that a decoder reads, and its output flat again. `auto` chooses one.

    Padded           one row per sequence
    Tree             one row per prompt, which holds the tree of its sequences' prefixes: shared ones are computed once
    Varlen, Flash4   all sequences end to end in one row, without padding; a kernel attends within each of them

In a tree a token attends to its ancestors, which are the tokens before it in its sequence:

    2+3=5   2+3=6   2+3=56      one row:     2 + 3 = 5 6 6          the second 6 is the child of 5
                                position:    0 1 2 3 4 4 5

That pays where prompts are long and completions short: the attention mask grows with the square of the row's length.

Varlen's kernel is torch's, which is FlashAttention 2; Flash4's is FlashAttention 4 of the package `flash-attn-4`, which
is twice as fast on long sequences, on Hopper and Blackwell GPUs, and compiles its kernels when they first run.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from offline_grpo.disk import user_cache
from offline_grpo.errors import require
from offline_grpo.installed import install_command
from offline_grpo.interfaces import Layout
from offline_grpo.types import TokenBatch

CHUNK = "attention_chunk_size"
"""In config.json: tokens attend to those of their own chunk of the sequence."""
MAX_ROW_TOKENS = 512
MAX_SHARE_OF_PADDED = 0.5
VARLEN = "offline_grpo_varlen"
FLASH4 = "offline_grpo_fa4"  # transformers has rules of its own for names with "flash"
GENERATIONS = (9, 10)
"""Compute capabilities, Hopper's and Blackwell's, that FlashAttention 4 has forward and backward kernels for."""
HARMLESS = frozenset(
    {"dropout", "position_ids", "cu_seq_lens_k", "max_length_k", "is_causal", "use_cache", "output_attentions"}
)
"""Arguments of transformers' attention functions that can be ignored here; any other argument that is set is refused.
"""


class Padded:
    """One row per sequence, padded on the right to the longest. Runs everywhere.

    Causal attention never looks to the right, so padding needs no mask.
    """

    pads = True

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Accept every device and format."""

    def hidden_states(self, decoder: nn.Module, batch: TokenBatch) -> Tensor:
        rows = batch.token_ids.new_zeros(batch.num_sequences, max(batch.sequence_lengths))  # [S, L]
        rows = rows.index_put((batch.sequence_ids, batch.position_ids), batch.token_ids)
        hidden = decoder(input_ids=rows, use_cache=False).last_hidden_state  # [S, L, H]
        return hidden[batch.sequence_ids, batch.position_ids]  # [T, H]

    def attention(self, decoder: nn.Module, batch: TokenBatch) -> AbstractContextManager[None]:
        """The model's own."""
        return nullcontext()


class Tree(Padded):
    """One row per prompt. Batches that share little, and models whose attention takes no mask, get padded rows."""

    def hidden_states(self, decoder: nn.Module, batch: TokenBatch) -> Tensor:
        # The layer with the shortest window or chunk must see a whole row: the mask below knows of neither. A size of
        # True, which is 1, says only that there is a window.
        config: Any = decoder.config
        trees = prefix_trees(batch) if config._attn_implementation in ("sdpa", "eager") else None  # they take masks
        ends = ("window", "window_size", CHUNK)
        sizes = [size for name, size in vars(config).items() if name.endswith(ends) and isinstance(size, int)]
        window = min((size for size in sizes if size > 1), default=math.inf)
        if trees is None or trees.token_ids.shape[1] > window:
            return super().hidden_states(decoder, batch)

        # Tokens of several sequences stand in one row: a mask keeps them apart, and positions are those in a sequence.
        mask = trees.attention_mask(next(decoder.parameters()).dtype)  # [R, 1, L, L]
        hidden = decoder(
            input_ids=trees.token_ids, position_ids=trees.position_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state  # [R, L, H]
        return hidden[trees.rows, trees.columns]  # [T, H]


@dataclass(frozen=True)
class PrefixTrees:
    """A batch as R rows of up to L nodes each, and where each of its T tokens stands."""

    token_ids: Tensor  # [R, L]
    position_ids: Tensor  # [R, L]
    parents: Tensor  # [R, L], of a root: itself
    rows: Tensor  # [T]
    columns: Tensor  # [T]

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """Added to attention scores, [R, 1, L, L]: 0 for a node and its ancestors, else the smallest number."""
        num_rows, length = self.token_ids.shape
        device = self.token_ids.device
        is_ancestor = torch.eye(length, dtype=torch.bool, device=device).repeat(num_rows, 1, 1)  # [R, L, L]
        every_row = torch.arange(num_rows, device=device)
        for node in range(1, length):  # parents come first, so theirs is complete
            is_ancestor[:, node] |= is_ancestor[every_row, self.parents[:, node]]
        blocked = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        return torch.where(is_ancestor, torch.zeros_like(blocked), blocked)[:, None]


def prefix_trees(batch: TokenBatch) -> PrefixTrees | None:
    """The batch's trees, one row per distinct prompt; None where rows of whole sequences would be about as good."""
    token_ids, is_completion = (values.cpu().numpy().tobytes() for values in (batch.token_ids, batch.completion_mask))
    lengths, device = batch.sequence_lengths, batch.token_ids.device
    trees = _grown(token_ids, is_completion, lengths, batch.owners)
    return None if trees is None else PrefixTrees(**{name: values.to(device) for name, values in vars(trees).items()})


@functools.lru_cache(maxsize=16)
def _grown(
    token_bytes: bytes, mask_bytes: bytes, lengths: tuple[int, ...], owners: tuple[int, ...]
) -> PrefixTrees | None:
    """Kept, because the policy is trained on the batches that the reference has scored, in each epoch again."""
    token_ids = np.frombuffer(token_bytes, np.int64).tolist()
    is_completion = np.frombuffer(mask_bytes, np.bool_).tolist()
    sequences = [token_ids[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]
    # The prompt of a sequence: the tokens before its first completion token. Where a rollout forks, its sequences have
    # the shortest one as far as they begin with it: what one is trained on is the context of the next.
    prompts: list[tuple[int, ...]] = []
    shortest: dict[int, tuple[int, ...]] = {}
    for owner, sequence, end in zip(owners, sequences, accumulate(lengths), strict=True):
        mask = is_completion[end - len(sequence) : end]
        prompts.append(tuple(sequence[: mask.index(True)] if True in mask else sequence))
        shortest[owner] = min(shortest.get(owner, prompts[-1]), prompts[-1], key=len)

    nodes: list[list[tuple[int, int, int]]] = []  # of each row: token, position and parent, parents before children
    row_of_prompt: dict[tuple[int, ...], int] = {}
    node_of: dict[tuple[int, int, int], int] = {}  # by row, parent (-1 above roots) and token
    rows: list[int] = []
    columns: list[int] = []
    for owner, sequence, prompt in zip(owners, sequences, prompts, strict=True):
        # Each prompt has a row.
        common = shortest[owner]
        row = row_of_prompt.setdefault(common if prompt[: len(common)] == common else prompt, len(nodes))
        if row == len(nodes):
            nodes.append([])

        # The sequence's path from the root down, with new nodes where it leaves the paths before.
        parent = -1
        for position, token in enumerate(sequence):
            node = node_of.setdefault((row, parent, token), len(nodes[row]))
            if node == len(nodes[row]):
                nodes[row].append((token, position, max(parent, 0)))
            columns.append(node)
            parent = node
        rows += [row] * len(sequence)

    longest, num_padded = max(map(len, nodes)), len(lengths) * max(lengths)
    if longest > MAX_ROW_TOKENS or len(nodes) * longest > MAX_SHARE_OF_PADDED * num_padded:
        return None
    filled = torch.tensor([row + [(0, 0, 0)] * (longest - len(row)) for row in nodes])  # [R, L, 3]
    return PrefixTrees(*filled.unbind(-1), rows=torch.tensor(rows), columns=torch.tensor(columns))


def has_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length attention runs on `device` in `dtype`."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def has_flash4(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the package is installed and `device` is of a generation that it is for."""
    if not (has_varlen_kernel(device, dtype) and torch.cuda.is_available()):
        return False
    try:
        is_installed = find_spec("flash_attn.cute") is not None
    except ImportError:  # there is no package flash_attn, or one that is older or broken
        return False
    return is_installed and torch.cuda.get_device_capability(device)[0] in GENERATIONS


class Varlen(Padded):
    """All sequences end to end, each told apart by torch's variable-length attention. Needs CUDA and 16 bit."""

    pads = False
    kernel: ClassVar[str] = VARLEN
    """Its name in transformers; see `switched`."""

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError where the kernel does not run."""
        has = f"{device.type} and {str(dtype).removeprefix('torch.')}"
        fix = f"needs a CUDA device and train.precision=bf16 or fp16, and this run has {has}; use model.layout=auto"
        require(has_varlen_kernel(device, dtype), "model.layout", "varlen", fix)

    def hidden_states(self, decoder: nn.Module, batch: TokenBatch) -> Tensor:
        if not _packs(decoder, batch):
            return super().hidden_states(decoder, batch)
        with self.attention(decoder, batch):
            hidden = decoder(
                input_ids=batch.token_ids[None],  # [1, T]
                position_ids=batch.position_ids[None],
                use_cache=False,
                **kernel_arguments(batch.sequence_lengths, batch.token_ids.device),
            ).last_hidden_state  # [1, T, H]
        return hidden[0]

    @contextmanager
    def attention(self, decoder: nn.Module, batch: TokenBatch) -> Iterator[None]:
        """Variable-length attention inside; afterwards the model's own, which sampling needs."""
        if not _packs(decoder, batch):
            yield
            return
        with switched(decoder, self.kernel, _attending(self.kernel)):
            yield


class Flash4(Varlen):
    """With FlashAttention 4."""

    kernel: ClassVar[str] = FLASH4

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError where the kernel does not run."""
        fix = f"needs a Hopper or Blackwell GPU, bf16 or fp16, and flash-attn-4 (`{install_command('vllm')}`)"
        require(has_flash4(device, dtype), "model.layout", "flash4", f"{fix}; use model.layout=auto")


def _packs(decoder: nn.Module, batch: TokenBatch) -> bool:
    """Whether the kernel is right for this batch: it knows windows, and no chunks; padded rows know both."""
    chunk = getattr(decoder.config, CHUNK, None)
    return chunk is None or max(batch.sequence_lengths) <= chunk


def kernel_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Where each sequence begins in the one row: a kernel attends within those boundaries."""
    boundaries = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)  # [S+1]
    return {"cu_seq_lens_q": boundaries.to(device, non_blocking=True), "max_length_q": max(lengths)}


@contextmanager
def switched(decoder: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, the decoder attends by `function`; afterwards by what it did before. A model that asks for another kind
    of attention gets a ValueError. No way to make masks is registered: transformers then makes none, and does not wait
    for the GPU.
    """
    from transformers import AttentionInterface  # which takes seconds

    config: Any = decoder.config
    before = config._attn_implementation
    AttentionInterface.register(name, function)
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


@functools.cache  # for the compiler, which begins anew for another function
def _attending(kernel: str) -> Callable[..., tuple[Tensor, None]]:
    return functools.partial(attend, kernel)


def attend(
    kernel: str | Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, kv_heads, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,  # 1 / sqrt(D) if None
    sliding_window: int | None = None,  # the token itself counts
    cu_seq_lens_q: Tensor | None = None,  # [S+1], boundaries of the sequences
    max_length_q: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, [1, T, heads, D], and no attention weights."""
    # What transformers passes on, but for what can be ignored, is what the kernels know.
    if cu_seq_lens_q is None:
        raise ValueError("variable-length attention needs cu_seq_lens_q: this model drops the arguments of its decoder")
    others["attention_mask"] = attention_mask
    unknown = sorted(n for n, value in others.items() if n not in HARMLESS and value is not None and value is not False)
    if unknown:
        raise ValueError(f"variable-length attention has no {', '.join(unknown)}")
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [T, heads, D]
    if callable(kernel):
        return kernel(q, k, v, cu_seq_lens_q, scaling, sliding_window or 0)[None], None
    if kernel == FLASH4:
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return _flash4_forward(q, k, v, cu_seq_lens_q, max_length_q, scale, sliding_window or 0)[0][None], None

    # FlashAttention 2, of which older torch versions do not repeat the keys of several heads themselves.
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if sliding_window is None else sliding_window - 1  # besides the token itself
    how: dict[str, Any] = {"scale": scaling, "window_size": (left, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        how["enable_gqa"] = True
    elif (heads_per_kv := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(heads_per_kv, dim=1), v.repeat_interleave(heads_per_kv, dim=1)
    out: Any = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **how)
    return out[None], None


@functools.cache
def flash4_interface() -> Any:
    """The package's functions without autograd: torch.compile can call them only as operators with a backward pass."""
    cache = user_cache("flash-attn-4")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache))
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    return interface


def _flash4_settings(boundaries: Tensor, longest: int, scale: float, window: int) -> dict[str, Any]:
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
def _flash4_forward(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """[T, heads, D] as in `attend`, where no window is 0; and ln(sum(exp(scores))), [heads, T] in float32."""
    out, logsumexp, *_ = flash4_interface()._flash_attn_fwd(
        q, k, v, return_lse=True, **_flash4_settings(boundaries, longest, scale, window)
    )
    return out, logsumexp


@_flash4_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("offline_grpo::flash4_backward", mutates_args=())
def _flash4_backward(
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
    settings = _flash4_settings(boundaries, longest, scale, window)
    settings["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return flash4_interface()._flash_attn_bwd(q, k, v, out, grad.contiguous(), logsumexp.contiguous(), **settings)


@_flash4_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _flash4_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, boundaries, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, boundaries)


def _flash4_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_flash4_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


_flash4_forward.register_autograd(_flash4_gradients, setup_context=_flash4_save)


LAYOUTS: dict[str, type[Layout]] = {"padded": Padded, "tree": Tree, "varlen": Varlen, "flash4": Flash4}


def layout_named(name: str) -> Layout | None:
    """The layout that `model.layout=NAME` asks for; None for `auto` (see `layouts_for`)."""
    if name == "auto":
        return None
    names = ", ".join(("auto", *LAYOUTS))
    fix = f"must be one of {names}; a layout of your own is chosen by model/layout={name}"
    require(name in LAYOUTS, "model.layout", name, fix)
    return LAYOUTS[name]()


def layouts_for(layout: Layout | None, device: torch.device, dtype: torch.dtype) -> list[Layout]:
    """`layout`; where it is None (`auto`), those that run on `device` in `dtype`, the fastest first and padded rows
    last. Raises ConfigError where `layout` does not run there.
    """
    if layout is not None:
        layout.check(device, dtype)
        return [layout]
    found: list[Layout] = [Flash4()] if has_flash4(device, dtype) else []
    if has_varlen_kernel(device, dtype):
        found.append(Varlen())
    elif device.type == "cpu":  # building trees reads token ids, which on a GPU would wait for it
        found.append(Tree())
    return [*found, Padded()]
