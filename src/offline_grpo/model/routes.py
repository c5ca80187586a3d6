"""Routers of a mixture of experts: which experts they choose, and how they are made to choose given ones.

A router of transformers returns, of its N tokens, logits [N, E] of the experts, the chosen ones [N, K] and their
weights [N, K]: a module is one if it returns these. To follow given routes it computes a second time, and `topk` is
answered with them: the weights are what the family makes of its live logits there, so that the router learns.

Routes are [T, L, K] int16: the experts of each token in each block of the model. -1 stands for the router's own choice:
of a token whose routes nobody knows, and of a block without a router.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
    seen: Tensor  # [N, K] int16, the router's own choice in its last pass


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
        return scores.gather(1, self.chosen), self.chosen


def choose(router: Any, args: Any, kwargs: Any, output: tuple[Tensor, ...]) -> Any:
    """The hook of every router: one function, so that blocks share what is compiled."""
    slot: Slot = router.offline_grpo_slot
    [own] = [each for each in output if each.dtype == torch.int64]
    slot.seen = own.to(torch.int16)
    if slot.given is None:
        return None
    with Answer(torch.where(slot.given < 0, own, slot.given.long()), max(each.shape[1] for each in output)):
        return router.forward(*args, **kwargs)


def top_k_of(output: Any, num_tokens: int) -> int | None:
    """K, if it is what a router returns of so many tokens, in whatever order."""
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(each, Tensor) for each in output)):
        return None
    chosen = [each for each in output if each.dtype == torch.int64]
    if len(chosen) != 1 or any(each.dim() != 2 or len(each) != num_tokens for each in output):
        return None
    sizes = sorted(each.shape[1] for each in output)  # K, K, E
    return sizes[0] if sizes[0] == sizes[1] == chosen[0].shape[1] else None


class Routers:
    """The routers of one model, by the number of their block."""

    def __init__(self, model: PreTrainedModel, token_ids: Tensor) -> None:
        """Finds those that a pass over `token_ids` [1, T] meets, before blocks are compiled. Raises ValueError where
        there are none, or several in a block.
        """
        # peft wraps the module whose weight has an adapter, and returns what that returns: the inner one is the router.
        blocks, found, sizes, hooks = blocks_of(model), list[tuple[int, nn.Module]](), set[int](), []

        def look(block: int, module: nn.Module, output: Any) -> None:
            size, inside = top_k_of(output, token_ids.numel()), {*module.modules()}
            if size is not None and not any(other in inside for _, other in found):
                found.append((block, module))
                sizes.add(size)

        for number, block in enumerate(blocks):
            for module in block.modules():
                hooks.append(module.register_forward_hook(lambda m, _, output, at=number: look(at, m, output)))
        with not_compiled(model), torch.no_grad():
            model(input_ids=token_ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        self._slots = {number: Slot() for number, _ in found}
        if len(sizes) != 1 or len(self._slots) < len(found):
            raise ValueError("has no router in its blocks that returns logits, weights and experts, or has several")
        self.shape = len(blocks), sizes.pop()  # L, K
        for number, router in found:
            router.offline_grpo_slot = self._slots[number]  # type: ignore[assignment]
            router.register_forward_hook(choose, with_kwargs=True)

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

    def seen(self, places: Tensor) -> Tensor:
        """[T, L, K] what the routers would have chosen in the last pass, for tokens that stood at `places` [T]."""
        routes = torch.full((len(places), *self.shape), -1, dtype=torch.int16, device=places.device)
        for number, slot in self._slots.items():
            routes[:, number] = slot.seen[places]
        return routes


class Rows:
    """Stands for a decoder, so that a layout tells where each token [T] of a batch stands among those of its rows, one
    row after the other: in place of hidden states, it gets numbers. And how many those are (`size`).
    """

    def __init__(self, layout: Layout, decoder: nn.Module, batch: TokenBatch) -> None:
        decoder_like: Any = self
        self.config, self.parameters = decoder.config, decoder.parameters
        self.places = layout.hidden_states(decoder_like, batch)[:, 0]

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
