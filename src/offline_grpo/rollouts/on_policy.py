"""Rollouts sampled from the policy as it is now."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from offline_grpo.errors import require
from offline_grpo.generation.sample import sample_in_order
from offline_grpo.interfaces import Advantage, RolloutClient, Source, Task
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.rollouts.curriculum import Curriculum, outcome
from offline_grpo.seeding import derive_seed
from offline_grpo.types import Metrics, Problem, RolloutGroup, SamplingParams


@lru_cache(maxsize=2)
def permutation(length: int, seed: int) -> tuple[int, ...]:
    """0 .. length-1 in an order that the seed alone decides."""
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return tuple(order)


@dataclass(kw_only=True)
class OnPolicy(Source):
    """Samples `group_size` completions of `problems_per_iteration` problems in `next`, and scores them. Process `rank`
    of `world_size` samples every `world_size`-th problem. `resample_zero_signal`: DAPO, arXiv 2503.14476.
    """

    problems_per_iteration: int
    group_size: int
    shuffle: bool
    pass_rate: list[float] | None
    pass_rate_from: str | None
    pass_rate_decay: float
    resample_zero_signal: bool
    max_resamples: int
    soft_overlong_tokens: int | None
    penalize_length_if_solved: bool
    seed: int

    client: RolloutClient
    task: Task
    problems: Sequence[Problem]
    codec: TokenizerCodec
    sampling: SamplingParams
    advantage: Advantage
    on_failure: str
    rank: int
    world_size: int

    _scoring_wait_s: float = field(default=0.0, init=False)
    _curriculum: Curriculum | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.pass_rate is not None:
            self._curriculum = Curriculum(
                problems=self.problems,
                index_at=self._index_at,
                count=self.problems_per_iteration,
                band=self.pass_rate,
                decay=self.pass_rate_decay,
                store=self.pass_rate_from,
            )

    @staticmethod
    def check(config: Any) -> None:
        settings, longest = config.rollouts, config.generation["max_new_tokens"]
        require(settings["max_resamples"] > 0, "data.max_resamples", settings["max_resamples"], "must be at least 1")
        tokens = settings["soft_overlong_tokens"]
        fix = f"must be at least 1, and less than generation.max_new_tokens={longest}; null gives no penalty"
        require(tokens is None or 0 < tokens < longest, "data.soft_overlong_tokens", tokens, fix)
        if settings["pass_rate_from"] is not None:
            from offline_grpo.rollouts.store.reader import shards_of  # pyarrow

            shards_of(Path(settings["pass_rate_from"]).expanduser(), key="data.pass_rate_from", phase="train")

    def start(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        if self._curriculum is not None:
            self._curriculum.start(iteration, (state or {}).get("curriculum"))

    def sampled(self, iteration: int, groups: Sequence[RolloutGroup]) -> None:
        if self._curriculum is not None:
            self._curriculum.sampled(iteration, groups)

    def state_dict(self) -> Mapping[str, Any]:
        return {} if self._curriculum is None else {"curriculum": self._curriculum.state_dict()}

    def next(self, iteration: int) -> list[RolloutGroup]:
        """A function of the seed, the iteration, the weights and the curriculum alone: a resumed run draws the same."""
        self._scoring_wait_s = 0.0
        first = iteration * self.problems_per_iteration
        places = range(self.problems_per_iteration)[self.rank :: self.world_size]
        seeds = [derive_seed(self.seed, "rollout", first + i) for i in places]
        indices = self._indices(iteration)
        problems = [self.problems[indices[i]] for i in places]
        groups = self._sample(list(zip(problems, seeds, strict=True)))
        others = self._others(iteration) if self.resample_zero_signal else []
        for start in range(0, len(others), self.problems_per_iteration):
            draws = others[start : start + self.problems_per_iteration]
            silent = [n for n, i in enumerate(places) if i < len(draws) and self._is_silent(groups[n])]
            for n, group in zip(silent, self._sample([draws[places[n]] for n in silent]), strict=True):
                old = groups[n]
                groups[n] = replace(
                    group,
                    num_replaced=old.num_replaced + 1,
                    num_discarded_tokens=old.num_discarded_tokens
                    + sum(rollout.num_sampled for rollout in old.rollouts),
                    discarded=(*old.discarded, outcome(old)),
                )
        return groups

    def metrics(self) -> Metrics:
        return {"time/scoring_wait_s": self._scoring_wait_s, **self.curriculum_metrics()}

    def curriculum_metrics(self) -> Metrics:
        """Of the last iteration; empty without a curriculum."""
        return {} if self._curriculum is None else self._curriculum.metrics

    def _sample(self, draws: Sequence[tuple[Problem, int]]) -> list[RolloutGroup]:
        groups = sample_in_order(
            self.client, self.task, self.codec, draws, self.sampling, group_size=self.group_size, on_scored=self._waited
        )
        if self.soft_overlong_tokens is not None:
            groups = [self._with_penalties(group, "overlong", self.soft_overlong_tokens) for group in groups]
        if self.penalize_length_if_solved:
            half = self.sampling.max_new_tokens / 2
            solved = [all(rollout.score.is_correct for rollout in group.rollouts) for group in groups]
            pairs = zip(groups, solved, strict=True)
            groups = [self._with_penalties(group, "length", half) if is_solved else group for group, is_solved in pairs]
        return groups

    def _is_silent(self, group: RolloutGroup) -> bool:
        scored = group.with_failures(self.on_failure).scored()
        return scored is None or self.advantage.is_silent(scored)

    def _waited(self, seconds: float) -> None:
        self._scoring_wait_s += seconds

    def _with_penalties(self, group: RolloutGroup, name: str, cache: float) -> RolloutGroup:
        """The group with a part of this name in every reward."""
        rollouts = []
        for rollout in group.rollouts:
            penalty = overlong_penalty(rollout.num_sampled, self.sampling.max_new_tokens, cache)
            score = rollout.score
            score = replace(score, reward=score.reward + penalty, parts={**score.parts, name: penalty})
            rollouts.append(replace(rollout, score=score))
        return replace(group, rollouts=tuple(rollouts))

    def _others(self, iteration: int) -> list[tuple[Problem, int]]:
        """Draws for groups to be replaced: the i-th group takes every `problems_per_iteration`-th, from i on.

        They depend on the iteration alone. Its own problems are left out, and no other comes twice.
        """
        own, curriculum = {*self._indices(iteration)}, self._curriculum
        seed, wanted = derive_seed(self.seed, "resample", iteration), self.problems_per_iteration * self.max_resamples
        known: Sequence[int] = range(len(self.problems))
        if curriculum is not None:
            known = [index for index in known if curriculum.keeps(index, iteration)]
        indices = random.Random(seed).sample(known, min(len(known), wanted + len(own)))
        chosen = [index for index in indices if index not in own][:wanted]
        return [(self.problems[index], derive_seed(seed, "rollout", n)) for n, index in enumerate(chosen)]

    def _indices(self, iteration: int) -> list[int]:
        """The problems of an iteration, of all processes."""
        if self._curriculum is not None:
            return self._curriculum.choose(iteration)
        first = iteration * self.problems_per_iteration
        return [self._index_at(first + i) for i in range(self.problems_per_iteration)]

    def _index_at(self, position: int) -> int:
        """The problem at `position` of the endless sequence of passes."""
        epoch, offset = divmod(position, len(self.problems))
        if self.shuffle:
            return permutation(len(self.problems), derive_seed(self.seed, "order", epoch))[offset]
        return offset


def overlong_penalty(num_tokens: int, longest: int, cache: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to `longest - cache` tokens, from there on
    linear down to -1 at `longest`, and -1 beyond."""
    return -min(max(num_tokens - (longest - cache), 0) / cache, 1.0)
