"""`train.sharding=fsdp2`: every process holds a part of each weight, gradient, master and optimizer state, by PyTorch's
own FSDP2.

    weights      fp32, spread: they are the masters. A block's are gathered in `train.precision` while it computes.
    gradients    summed in fp32 and spread again after every block and microbatch: whole ones would not fit
    adapters     LoRA's are small: every process has all of them, as without sharding; the base is frozen and spread

Embeddings, final norm and head are one more group, gathered around the whole of `Scoring.forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import register_dataclass, tree_leaves, tree_map

from offline_grpo.errors import ConfigError, GrpoError
from offline_grpo.interfaces import Scorer
from offline_grpo.model.adapters import has_adapters
from offline_grpo.model.layers import blocks_of, experts_of
from offline_grpo.model.policy import Policy, buckets, on_disk
from offline_grpo.model.scoring import Scoring
from offline_grpo.train.sharding import Sharding
from offline_grpo.types import TokenBatch, TokenStats

T = TypeVar("T")
Named = Iterable[tuple[str, Tensor]]
GATHERED_BYTES = 2**28
"""Of whole tensors that are gathered together. A larger one goes alone."""
ALIGNED_BYTES = 16

register_dataclass(TokenStats)  # FSDP2 looks there for tensors whose backward pass it must prepare


@dataclass
class FullyShardedPolicy(Sharding):
    """A `Sharding` by FSDP2. Rank 0 alone writes and pushes; the others help it to gather tensors, see `lead`."""

    _policy: Policy | None = field(default=None, init=False)
    _gathering: Generator[tuple[str, Tensor]] | None = field(default=None, init=False)

    def prepare(self, policy: Policy) -> None:
        """Raises ConfigError for a model without a list of blocks, or with weights of several formats."""
        self._shard(policy.scoring, is_trained=True)
        self._policy, policy.is_sharded, policy.logprobs = policy, True, self._led_logprobs

    def prepare_reference(self, reference: Scorer) -> None:
        """The base of an adapted policy is spread already."""
        if isinstance(reference, Scoring):
            self._shard(reference, is_trained=False)

    def _shard(self, scoring: Scoring, *, is_trained: bool) -> None:
        # What is spread, and in which format: adapters stay whole, weights that are trained become fp32 masters.
        model, device = scoring.causal_lm, scoring.device
        mesh = init_device_mesh(device.type, (self.ranks.world_size,))
        settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
        widens = is_trained and not has_adapters(scoring.model)
        if has_adapters(scoring.model):
            settings["ignored_params"] = {p for p in scoring.model.parameters() if p.requires_grad}
        elif len({p.dtype for p in model.parameters()}) > 1:
            fault = f"{type(model).__name__} keeps some weights in another format than train.precision"
            fix = "use train.precision=fp32, or train.sharding=none"
            raise ConfigError(f"train.sharding=fsdp2: {fault}; {fix}")
        if widens:
            settings["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )

        # Block by block, so that one is gathered at a time, its experts for themselves, while attention computes; then
        # what is left, around the whole forward pass. Gradients are summed and not averaged: the loss of each process
        # is a share.
        blocks = blocks_of(model)
        for module in (*experts_of(blocks), *blocks, scoring):
            for parameter in module.parameters() if widens else ():
                if not isinstance(parameter, DTensor):
                    parameter.data = parameter.data.float()
            fully_shard(module, **settings)
            spread: Any = module
            spread.set_gradient_divide_factor(1.0)
            spread.set_force_sum_reduction_for_comms(True)
        root: Any = scoring
        root._get_fsdp_state()._lazy_init()  # it is the root, also where a block runs first

    def num_microbatches(self, own: int) -> int:
        """All processes gather every block in every pass."""
        return max(self.ranks.gather([own]))

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """FSDP2 has done so already, except for adapters."""
        super().reduce_gradients([p for p in parameters if not isinstance(p, DTensor)])
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def clip_gradients(self, parameters: Sequence[Tensor], max_norm: float) -> float:
        """The norm is that of all processes' parts together."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    @contextmanager
    def gathered(self, policy: Policy) -> Iterator[None]:
        modules = [module for module in policy.scoring.modules() if isinstance(module, FSDPModule)]
        root: Any = policy.scoring
        root.set_reshard_after_forward(False)  # and of all modules in it
        try:
            for module in modules:
                module.unshard()
            yield
        finally:
            root.set_reshard_after_forward(True)
            for module in modules:
                module.reshard()

    def lead(self, action: Callable[[], T], tensors: Any = None) -> T:
        """The other processes do what rank 0 tells them, until it is done."""
        # Rank 0 acts. Whatever needs the others sends them a message on the way, see `_wholes_of` and `_led_logprobs`.
        message: Any = None
        if self.ranks.is_main:
            result, error = None, None
            try:
                result = action()
            except GrpoError as caught:
                error = caught
            if self._gathering is not None:
                self._gathering.close()
            self._gathering = None
            message = ("done", result, error)

        # The others wait for messages and take part; rank 0 has only the last one left to send.
        while (message := self.ranks.broadcast(message))[0] != "done":
            if message[0] == "score":
                assert self._policy is not None
                self._policy.scoring.logprobs_alone(message[1].to(self._policy.device))
            else:
                for _ in self._wholes_of(message[0], tensors):
                    pass
            message = None
        if message[2] is not None:
            raise message[2]
        return message[1]

    def full_weights(self, policy: Policy) -> Iterator[tuple[str, Tensor]]:
        """Of an adapted policy the adapters alone: the base never changes."""
        if not policy.is_sharded:
            return super().full_weights(policy)
        if has_adapters(policy.model):
            return iter(self._weights())
        return self._gather("weights")

    def whole(self, tensors: T, folder: Path) -> T:
        found = on_disk(self._gather("tensors", tensors), folder)
        whole = iter(found.values())
        return tree_map(lambda leaf: next(whole) if isinstance(leaf, DTensor) else leaf, tensors)

    def like(self, target: Tensor, tensor: Tensor) -> Tensor:
        """No process waits."""
        if not isinstance(target, DTensor) or isinstance(tensor, DTensor) or target.shape != tensor.shape:
            return tensor
        return distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements, src_data_rank=None)

    def _gather(self, what: str, tensors: Any = None) -> Iterator[tuple[str, Tensor]]:
        """On rank 0, inside `lead`: `_wholes_of`, for which the others are called."""
        self.ranks.broadcast((what,))
        self._gathering = self._wholes_of(what, tensors)
        return self._gathering

    def _wholes_of(self, what: str, tensors: Any) -> Generator[tuple[str, Tensor]]:
        """The policy's "weights", which each process rounds to the policy's format before they are gathered, or the
        spread ones among `tensors`, by their number. Every process must go through all of it.
        """
        if what == "weights":
            return _wholes(self._weights(), self._policy.dtype if self._policy is not None else None)
        leaves = enumerate(tree_leaves(tensors))
        return _wholes(((str(number), leaf) for number, leaf in leaves if isinstance(leaf, DTensor)), None)

    def _weights(self) -> Named:
        policy = self._policy
        assert policy is not None
        for name, parameter in policy.causal_lm.named_parameters():
            if not isinstance(parameter, DTensor):
                yield name, parameter.detach()
            elif not has_adapters(policy.model):
                yield name, parameter

    def _led_logprobs(self, batch: TokenBatch) -> Tensor:
        """`Policy.logprobs`, where rank 0 alone has a batch, inside `lead`."""
        assert self._policy is not None
        self.ranks.broadcast(("score", batch.to(torch.device("cpu"))))
        return self._policy.scoring.logprobs_alone(batch.to(self._policy.device))


def _wholes(named: Named, dtype: torch.dtype | None) -> Generator[tuple[str, Tensor]]:
    """Each tensor whole, in `dtype` if there is one. Also those that nobody asks for any more: the other processes
    gather them all.
    """
    rest = buckets(named, GATHERED_BYTES)
    try:
        for bucket in rest:
            yield from _gathered(bucket, dtype)
    finally:
        for bucket in rest:
            _gathered(bucket, dtype)


@torch.no_grad()
def _gathered(bucket: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None) -> list[tuple[str, Tensor]]:
    """The tensors whole, by one message, in which each process has a piece of the same size for each of them."""
    spread = [tensor for _, tensor in bucket if isinstance(tensor, DTensor)]
    if not spread:
        return list(bucket)

    # A process's part of a tensor is a run of its rows, at most `rows` of them: each gets an area of that size.
    group = spread[0].device_mesh.get_group()
    parts = [(local := tensor.to_local()).to(dtype or local.dtype).reshape(-1).view(torch.uint8) for tensor in spread]
    rows = [-(-tensor.shape[0] // group.size()) for tensor in spread]
    sizes = [n * prod(t.shape[1:]) * (dtype or t.dtype).itemsize for n, t in zip(rows, spread, strict=True)]
    areas = [-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes]
    mine = torch.empty(sum(areas), dtype=torch.uint8, device=parts[0].device)
    own = [area[: len(part)] for area, part in zip(mine.split(areas), parts, strict=True)]
    torch._foreach_copy_(own, parts)  # pyright: ignore[reportPrivateImportUsage]
    of_all = torch.empty(group.size(), len(mine), dtype=torch.uint8, device=mine.device)
    distributed.all_gather_into_tensor(of_all.view(-1), mine, group=group)

    # The areas of all processes, one below the other and without what fills them up, are the whole tensor.
    pieces, found = zip(of_all.split(areas, dim=1), sizes, strict=True), []
    for name, tensor in bucket:
        kind = dtype or tensor.dtype
        whole = tensor
        if isinstance(tensor, DTensor):
            area, size = next(pieces)
            whole = area[:, :size].reshape(-1)[: tensor.numel() * kind.itemsize].view(kind).view(tensor.shape)
        found.append((name, whole.to(kind)))
    return found
