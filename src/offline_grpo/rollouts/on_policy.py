"""Rollouts sampled from the policy as it is now: each process samples its share of the iteration's problems, all get all groups."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache

from offline_grpo.interfaces import RolloutClient, Task
from offline_grpo.model.text import cut_at_stop
from offline_grpo.placement.ranks import Ranks
from offline_grpo.seeding import derive_seed
from offline_grpo.types import Completion, Message, Problem, Rollout, RolloutGroup, SamplingParams


@lru_cache(maxsize=2)
def permutation(length: int, seed: int) -> tuple[int, ...]:
    """0 .. length-1 in an order that the seed alone decides."""
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return tuple(order)


class OnPolicy:
    """Samples `group_size` completions of `problems_per_iteration` problems and scores them.

    Args:
        encode: messages -> prompt token ids.
        decode: token ids -> text without special tokens.
        shuffle: visit the problems in a new order on each pass over them.
    """

    def __init__(
        self,
        *,
        client: RolloutClient,
        task: Task,
        problems: Sequence[Problem],
        encode: Callable[[Sequence[Message]], list[int]],
        decode: Callable[[Sequence[int]], str],
        sampling: SamplingParams,
        problems_per_iteration: int,
        group_size: int,
        shuffle: bool,
        seed: int,
        ranks: Ranks,
    ) -> None:
        self._client = client
        self._task = task
        self._problems = problems
        self._encode = encode
        self._decode = decode
        self._sampling = sampling
        self._problems_per_iteration = problems_per_iteration
        self._group_size = group_size
        self._shuffle = shuffle
        self._seed = seed
        self._ranks = ranks

    def next(self, iteration: int) -> list[RolloutGroup]:
        """The iteration's groups. A function of the seed, the iteration and the weights alone: a resumed run draws the same."""
        first = iteration * self._problems_per_iteration
        positions = range(first, first + self._problems_per_iteration)[self._ranks.rank :: self._ranks.world_size]
        return self._ranks.gather_interleaved(lambda: self._sample(positions))

    def _sample(self, positions: Sequence[int]) -> list[RolloutGroup]:
        mine = [self._problems[self._index(position)] for position in positions]
        prompts = [self._encode(problem.messages) for problem in mine]
        seeds = [derive_seed(self._seed, "rollout", position) for position in positions]
        completions = self._client.generate(prompts, self._sampling, group_size=self._group_size, seeds=seeds)
        return [self._group(*triple) for triple in zip(mine, prompts, completions, strict=True)]

    def _index(self, position: int) -> int:
        """Which problem stands at `position` of the endless sequence of passes."""
        epoch, offset = divmod(position, len(self._problems))
        return permutation(len(self._problems), derive_seed(self._seed, "order", epoch))[offset] if self._shuffle else offset

    def _group(self, problem: Problem, prompt: list[int], completions: list[Completion]) -> RolloutGroup:
        return RolloutGroup(problem, tuple(self._rollout(problem, prompt, completion) for completion in completions))

    def _rollout(self, problem: Problem, prompt: list[int], completion: Completion) -> Rollout:
        text = cut_at_stop(self._decode(completion.token_ids), self._sampling.stop)
        return Rollout(tuple(prompt), completion, text, self._task.score(problem, text))
