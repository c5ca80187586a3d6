"""Routers of a mixture of experts: which experts they choose, and how they are made to choose given ones.

A router of transformers returns, of its N tokens, logits [N, E] of the experts, the chosen ones [N, K] and their
weights [N, K]. Whatever it is called, a module is one if it returns these. To follow given routes it computes a second
time, and whatever it asks `topk` for is answered with them: the weights are those that the family makes of its live
logits there, so that the router learns.

Routes are [T, L, K] int16: the experts of each token in each block of the model. -1 stands for the router's own choice:
of a token whose routes nobody knows, and of a block without a router.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from offline_grpo.interfaces import Layout
from offline_grpo.model.layers import blocks_of, not_compiled
from offline_grpo.types import TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Slot:
    """What a router is told, and tells. Its tensors are none of the module: the compiler takes shapes of those for
    constants, and would compile every microbatch anew. It has no number, so that blocks share what is compiled.
    """

    given: Tensor | None = None  # [N, K] int16, to be followed
    seen: Tensor | None = None  # [N, K] int16, the router's own choice in its last pass
    is_read: bool = False


class TopK(NamedTuple):
    """As torch's own answer."""

    values: Tensor
    indices: Tensor


class Answer(TorchFunctionMode):
    """Inside, `topk` over E experts finds those that are given. A choice among groups of experts (DeepSeek) is left
    open, because those of other groups would have no weight.
    """

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        super().__init__()
        self.chosen, self.num_experts = chosen, num_experts  # [N, K] int64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk) or args[0].dim() != 2:
            return func(*args, **(kwargs or {}))
        scores = args[0]  # [N, E], or of groups
        if scores.shape[1] != self.num_experts:
            return func(scores, scores.shape[1], dim=-1)
        return TopK(scores.gather(1, self.chosen), self.chosen)


def choose(router: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """The hook of every router: one function, so that blocks share what is compiled."""
    slot: Slot = router.offline_grpo_slot
    if slot.given is None and not slot.is_read:
        return None
    logits, own = logits_and_choice(output)
    slot.seen = own.to(torch.int16)
    if slot.given is None:
        return None
    with Answer(torch.where(slot.given < 0, own, slot.given.long()), logits.shape[1]):
        return router.forward(*args, **kwargs)


def logits_and_choice(output: Any) -> tuple[Tensor, Tensor]:
    """Of what a router returns: [N, E] and [N, K] int64. Raises ValueError where it is not what a router returns."""
    if isinstance(output, tuple) and len(output) == 3 and all(isinstance(each, Tensor) for each in output):
        chosen = [each for each in output if each.dtype == torch.int64]
        scores = sorted((each for each in output if each.is_floating_point()), key=lambda each: each.shape[-1])
        is_router = len(chosen) == 1 and len(scores) == 2 and all(each.dim() == 2 for each in output)
        if is_router and scores[0].shape == chosen[0].shape and len(scores[1]) == len(chosen[0]):
            return scores[1], chosen[0]
    raise ValueError("not of a router")


class Routers:
    """The routers of one model, by the number of their block."""

    def __init__(self, slots: dict[int, Slot], num_blocks: int, top_k: int) -> None:
        self._slots, self.shape = slots, (num_blocks, top_k)  # L, K

    @classmethod
    def of(cls, model: PreTrainedModel, token_ids: Tensor) -> Routers:
        """Those that a pass over `token_ids` [1, T] meets, before blocks are compiled. Raises ValueError where it finds
        none, or not one in a block.
        """
        # peft wraps the module whose weight has an adapter, and returns what that returns: the inner one is the router.
        blocks, found, hooks = blocks_of(model), dict[int, list[nn.Module]](), []
        top_k = set[int]()

        def look(block: int, module: nn.Module, output: Any) -> None:
            with suppress(ValueError):
                own, before = logits_and_choice(output)[1], found.setdefault(block, [])
                if len(own) == token_ids.numel() and not any(inner in before for inner in module.modules()):
                    before.append(module)
                    top_k.add(own.shape[1])

        for number, block in enumerate(blocks):
            for module in block.modules():
                hooks.append(module.register_forward_hook(lambda m, _, output, at=number: look(at, m, output)))
        try:
            with not_compiled(model), torch.no_grad():
                model(input_ids=token_ids, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

        # Each gets its slot, and the hook.
        found = {number: routers for number, routers in found.items() if routers}
        if not found or any(len(routers) > 1 for routers in found.values()) or len(top_k) > 1:
            raise ValueError("has no router in its blocks that returns logits, weights and experts, or has several")
        slots = {number: Slot() for number in found}
        for number, [router] in found.items():
            router.offline_grpo_slot = slots[number]  # type: ignore[assignment]
            router.register_forward_hook(choose, with_kwargs=True)
        return cls(slots, len(blocks), top_k.pop())

    @contextmanager
    def following(self, routes: Tensor, places: Tensor, size: int) -> Iterator[None]:
        """Inside, routers follow `routes` [T, L, K] of tokens that stand at `places` [T] among the `size` of a pass.
        Where several stand at one place (the layout `tree`), the first of them is followed.
        """
        order = torch.arange(len(places), device=places.device)
        first = torch.full((size,), len(places), device=places.device).scatter_reduce(0, places, order, "amin")
        given = torch.cat([routes, torch.full_like(routes[:1], -1)])[first]  # [size, L, K]
        for number, slot in self._slots.items():
            slot.given = given[:, number]
        try:
            yield
        finally:
            for slot in self._slots.values():
                slot.given = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, `seen` will know what routers choose, also if they follow nothing."""
        for slot in self._slots.values():
            slot.is_read = True
        try:
            yield
        finally:
            for slot in self._slots.values():
                slot.is_read = False

    def seen(self, places: Tensor) -> Tensor:
        """[T, L, K] what the routers would have chosen in the last pass, for tokens that stood at `places` [T]."""
        routes = torch.full((len(places), *self.shape), -1, dtype=torch.int16, device=places.device)
        for number, slot in self._slots.items():
            assert slot.seen is not None
            routes[:, number] = slot.seen[places]
        return routes


def places_of(layout: Layout, decoder: nn.Module, batch: TokenBatch) -> tuple[Tensor, int]:
    """Where each token [T] of the batch stands among those of the decoder's rows, one row after the other, and how many
    those are. The layout says it: instead of hidden states, it gets numbers.
    """
    rows: Any = _Rows(decoder)
    return layout.hidden_states(rows, batch)[:, 0], rows.size


class _Rows:
    """Stands for a decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        self.config, self.parameters = decoder.config, decoder.parameters

    def __call__(self, input_ids: Tensor, **_: Any) -> Any:
        self.size = input_ids.numel()
        numbers = torch.arange(self.size, device=input_ids.device)
        return SimpleNamespace(last_hidden_state=numbers.view(*input_ids.shape, 1))


def differing(given: Tensor, seen: Tensor) -> Tensor:
    """Of routes [T, L, K] that were followed, and of the routers' own: in how many decisions, each of one token in one
    block, other experts were chosen, and how many there were: [2, L] int64.
    """
    given, seen = given.sort(-1).values, seen.sort(-1).values
    is_known = (given[..., 0] >= 0) & (seen[..., 0] >= 0)
    return torch.stack([((given != seen).any(-1) & is_known).sum(0), is_known.sum(0)])
