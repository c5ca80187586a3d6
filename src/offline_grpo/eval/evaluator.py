"""Samples every held-out problem several times and reports pass@k; `recording` writes a line for every problem."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offline_grpo.disk import write_whole
from offline_grpo.eval.statistics import ReplicateTable, metrics_with_intervals
from offline_grpo.formats import significant, utf8
from offline_grpo.generation.sample import sample_groups
from offline_grpo.interfaces import RolloutClient, Task
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.seeding import derive_seed
from offline_grpo.settings import EvalConfig
from offline_grpo.types import FinishReason, Metrics, Problem, Rollout, RolloutGroup, SamplingParams, by_task


@dataclass(frozen=True, kw_only=True)
class PassAtKEvaluator:
    """Draws `replicates` completions of each problem and averages (see `statistics.py` for the metrics); of a mixture,
    also task by task. A completion that could not be scored is wrong, with a reward of 0.

    The seed of a completion depends on `seed_base`, cycle, problem and replicate alone, so the metrics are the same
    however the work is batched or spread over processes.

    Args:
        rank, world_size: process `rank` of `world_size` samples every `world_size`-th problem.
    """

    task: Task
    problems: Sequence[Problem]
    codec: TokenizerCodec
    sampling: SamplingParams
    ks: Sequence[int]
    replicates: int
    seed_base: int
    rank: int
    world_size: int

    @classmethod
    def of(cls, settings: EvalConfig, **others: Any) -> PassAtKEvaluator:
        """With the values of the group `eval`, and the other arguments."""
        values = {name: getattr(settings, name) for name in ("ks", "replicates", "seed_base")}
        return cls(**values, **others)

    def sample(self, client: RolloutClient, *, cycle: int) -> list[RolloutGroup]:
        """See `Evaluator.sample`. One group of `replicates` rollouts per problem."""
        return [group for _, group in sorted(self.groups(client, cycle=cycle), key=lambda pair: pair[0])]

    def groups(self, client: RolloutClient, *, cycle: int) -> Iterator[tuple[int, RolloutGroup]]:
        """This process's groups, each with its index among them, as soon as all of its completions are judged."""
        # All requests are open at once, and completions come in any order: a group waits until it is whole.
        mine = self.problems[self.rank :: self.world_size]
        draws = [
            (problem, derive_seed(self.seed_base, cycle, problem.problem_id, replicate))
            for problem in mine
            for replicate in range(self.replicates)
        ]
        rollouts: dict[int, dict[int, Rollout]] = defaultdict(dict)
        for draw, single in sample_groups(client, self.task, self.codec, draws, self.sampling, group_size=1):
            index, replicate = divmod(draw, self.replicates)
            rollouts[index][replicate] = single.rollouts[0]
            if len(rollouts[index]) == self.replicates:
                done = rollouts.pop(index)
                group = RolloutGroup(mine[index], tuple(done[i] for i in range(self.replicates)))
                yield index, group.with_failures("zero")

    def metrics(self, groups: Sequence[RolloutGroup], *, cycle: int) -> Metrics:
        assert len(groups) == len(self.problems), f"{len(groups)} groups for {len(self.problems)} problems"
        # Over all problems, and for each task of a mixture over its own.
        metrics: dict[str, float] = {}
        for place, own in ({"": groups} | {f"task/{name}/": own for name, own in by_task(groups).items()}).items():
            rows = [group.rollouts for group in own]  # N of n
            table = ReplicateTable(
                rewards=np.array([[r.score.reward for r in row] for row in rows], dtype=np.float64),
                is_correct=np.array([[r.score.is_correct for r in row] for row in rows], dtype=np.bool_),
                is_truncated=np.array([[r.finish_reason is FinishReason.LENGTH for r in row] for row in rows]),
                num_tokens=np.array([[r.num_sampled for r in row] for row in rows], dtype=np.int64),
            )
            found = metrics_with_intervals(table, self.ks)
            metrics |= {f"{place}{name}": value for name, value in found.items()}
        return metrics


@contextmanager
def recording(path: Path) -> Iterator[Callable[[int, RolloutGroup], None]]:
    """Yields a function that writes a problem's line of JSON as soon as it is judged: prompt, reference answer, and its
    replicates in the order in which they were seeded. At the end lines are put in order.
    """
    with path.open("w", encoding="utf-8") as file:

        def add(index: int, group: RolloutGroup) -> None:
            problem = group.problem
            assert problem is not None
            line = {
                "index": index,
                "problem_id": problem.problem_id,
                "messages": [dict(message) for message in problem.messages],
                "answer": problem.answer,
                "replicates": [
                    {
                        "reward": significant(rollout.score.reward, 6),
                        "is_correct": rollout.score.is_correct,
                        "parts": {name: significant(value, 6) for name, value in rollout.score.parts.items()},
                        "num_tokens": rollout.num_sampled,
                        "finish_reason": rollout.finish_reason,
                        "text": rollout.text,
                    }
                    for rollout in group.rollouts
                ],
            }
            file.write(utf8(json.dumps(line, ensure_ascii=False)) + "\n")
            file.flush()

        yield add
    with path.open(encoding="utf-8") as file:  # `str.splitlines` would end lines inside a text too, at U+2028
        lines = sorted(file, key=lambda line: json.loads(line)["index"])
    write_whole(path, "".join(lines))
