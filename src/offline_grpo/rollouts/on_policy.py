"""Rollouts sampled from the policy as it is now."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from offline_grpo.errors import require
from offline_grpo.generation.sample import sample_in_order
from offline_grpo.interfaces import Advantage, RolloutClient, Source, Task
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.rollouts.curriculum import Curriculum, outcome
from offline_grpo.seeding import derive_seed
from offline_grpo.settings import RunConfig
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

    samples: ClassVar[bool] = True

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
    def check(config: RunConfig) -> None:
        settings, longest = config.rollouts, config.generation["max_new_tokens"]
        require(settings["max_resamples"] > 0, "data.max_resamples", settings["max_resamples"], "must be at least 1")
        tokens = settings["soft_overlong_tokens"]
        fix = f"must be at least 1, and less than generation.max_new_tokens={longest}; null gives no penalty"
        require(tokens is None or 0 < tokens < longest, "data.soft_overlong_tokens", tokens, fix)
        if settings["pass_rate_from"] is not None:
            from offline_grpo.rollouts.store import shards_of  # pyarrow

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
        count = self.problems_per_iteration

        # 1. This process's share of the iteration's problems, each with a seed of its own.
        places, indices = range(count)[self.rank :: self.world_size], self._indices(iteration)
        seeds = [derive_seed(self.seed, "rollout", iteration * count + i) for i in places]
        groups = self._sample([(self.problems[indices[i]], seed) for i, seed in zip(places, seeds, strict=True)])
        if not self.resample_zero_signal:
            return groups

        # 2. Other problems, for groups without signal: none of the iteration's own, none twice, drawn by seed and
        #    iteration alone. The i-th group of the iteration takes the i-th of each `count` of them.
        seed, wanted, own = derive_seed(self.seed, "resample", iteration), count * self.max_resamples, {*indices}
        known: Sequence[int] = range(len(self.problems))
        if self._curriculum is not None:
            known = [index for index in known if self._curriculum.keeps(index, iteration)]
        candidates = random.Random(seed).sample(known, min(len(known), wanted + len(own)))
        chosen = [index for index in candidates if index not in own][:wanted]
        others = [(self.problems[index], derive_seed(seed, "rollout", n)) for n, index in enumerate(chosen)]

        # 3. Each group without signal is replaced, until it has some or the other problems are used up. What was thrown
        #    away is counted, and the curriculum sees it.
        for start in range(0, len(others), count):
            draws = others[start : start + count]
            scored = [group.with_failures(self.on_failure).scored() for group in groups]
            is_silent = [group is None or self.advantage.is_silent(group) for group in scored]
            silent = [n for n, i in enumerate(places) if i < len(draws) and is_silent[n]]
            for n, group in zip(silent, self._sample([draws[places[n]] for n in silent]), strict=True):
                old = groups[n]
                num_discarded = old.num_discarded_tokens + sum(rollout.num_sampled for rollout in old.rollouts)
                groups[n] = replace(
                    group,
                    num_replaced=old.num_replaced + 1,
                    num_discarded_tokens=num_discarded,
                    discarded=(*old.discarded, outcome(old)),
                )
        return groups

    def metrics(self) -> Metrics:
        return {"time/scoring_wait_s": self._scoring_wait_s, **self.curriculum_metrics()}

    def curriculum_metrics(self) -> Metrics:
        """Of the last iteration; empty without a curriculum."""
        return {} if self._curriculum is None else self._curriculum.metrics

    def _sample(self, draws: Sequence[tuple[Problem, int]]) -> list[RolloutGroup]:
        """Sample and score a group of each problem, and add the penalties for length that are set."""

        def on_scored(seconds: float) -> None:
            self._scoring_wait_s += seconds

        groups = sample_in_order(
            self.client, self.task, self.codec, draws, self.sampling, group_size=self.group_size, on_scored=on_scored
        )
        for n, group in enumerate(groups):
            if self.soft_overlong_tokens is not None:
                groups[n] = self._with_penalties(groups[n], "overlong", self.soft_overlong_tokens)
            if self.penalize_length_if_solved and all(rollout.score.is_correct for rollout in group.rollouts):
                groups[n] = self._with_penalties(groups[n], "length", self.sampling.max_new_tokens / 2)
        return groups

    def _with_penalties(self, group: RolloutGroup, name: str, cache: float) -> RolloutGroup:
        """Add DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) to every reward, as its part `name`: 0 up
        to `cache` tokens below the limit, then linear down to -1 at the limit. The limit holds for each sequence, so of
        a rollout's sequences the longest counts, in sampled tokens.
        """
        scores = []
        for rollout in group.rollouts:
            longest = max(sum(rollout.is_sampled[start:end]) for start, end in rollout.bounds)
            num_beyond = longest - (self.sampling.max_new_tokens - cache)
            penalty, score = -min(max(num_beyond, 0) / cache, 1.0), rollout.score
            scores.append(replace(score, reward=score.reward + penalty, parts={**score.parts, name: penalty}))
        return group.with_scores(scores)

    def _indices(self, iteration: int) -> list[int]:
        """Of all processes: which problems this iteration has."""
        if self._curriculum is not None:
            return self._curriculum.choose(iteration)
        first = iteration * self.problems_per_iteration
        return [self._index_at(first + i) for i in range(self.problems_per_iteration)]

    def _index_at(self, position: int) -> int:
        """Which problem is at `position`, if all problems come once per epoch, epoch after epoch."""
        epoch, offset = divmod(position, len(self.problems))
        if self.shuffle:
            return permutation(len(self.problems), derive_seed(self.seed, "order", epoch))[offset]
        return offset
