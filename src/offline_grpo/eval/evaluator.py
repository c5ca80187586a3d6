"""Samples every held-out problem several times and reports pass@k."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from offline_grpo.errors import ConfigError
from offline_grpo.eval.pass_at_k import ReplicateTable, check_ks, metrics_with_intervals
from offline_grpo.interfaces import RolloutClient, Task
from offline_grpo.model.text import cut_at_stop
from offline_grpo.seeding import derive_seed
from offline_grpo.types import FinishReason, Message, Metrics, Problem, SamplingParams


@dataclass(frozen=True, slots=True)
class Replicate:
    """One scored answer, reduced to what the metrics need, so that processes exchange little."""

    reward: float
    is_correct: bool
    is_truncated: bool
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class PassAtKEvaluator:
    """Draws `replicates` completions of each problem and averages (see `pass_at_k.py` for the metrics).

    The seed of a completion depends on `seed_base`, cycle, problem and replicate alone, so the metrics are the same however the
    work is batched or spread over processes.

    Args:
        encode: chat messages -> prompt token ids.
        decode: completion token ids -> text without special tokens.
        rank, world_size: which share of the completions this process draws.
        gather: called with what returns this process's list; gives the lists of all processes, joined in rank order, on every process.
    """

    task: Task
    problems: Sequence[Problem]
    encode: Callable[[Sequence[Message]], list[int]]
    decode: Callable[[Sequence[int]], str]
    sampling: SamplingParams
    ks: Sequence[int]
    replicates: int
    seed_base: int
    bootstrap_samples: int
    rank: int = 0
    world_size: int = 1
    gather: Callable[[Callable[[], list[Replicate]]], list[Replicate]] = lambda share: share()

    def __post_init__(self) -> None:
        check_ks(self.ks, self.replicates)
        if not self.problems:
            raise ConfigError("eval.num_ids: the evaluation has no problems; raise eval.num_ids, name eval.ids, or set eval.enabled=false")
        if self.bootstrap_samples < 1:
            raise ConfigError(f"eval.bootstrap_samples={self.bootstrap_samples}: must be at least 1")
        if self.sampling.temperature == 0 and self.replicates > 1:
            raise ConfigError(
                f"eval.replicates={self.replicates}: greedy decoding gives the same completion every time; "
                "set eval.replicates=1 and eval.ks=[1], or sample at a temperature above 0"
            )

    def evaluate(self, client: RolloutClient, *, cycle: int) -> Metrics:
        """Metrics of one evaluation. Every process calls it and gets the same result."""
        work = [(problem, replicate) for problem in self.problems for replicate in range(self.replicates)]
        share = work[len(work) * self.rank // self.world_size : len(work) * (self.rank + 1) // self.world_size]
        replicates = self.gather(lambda: self._sample(client, share, cycle))
        assert len(replicates) == len(work), f"gather returned {len(replicates)} results for {len(work)} completions"
        return metrics_with_intervals(
            self._table(replicates),
            self.ks,
            bootstrap_samples=self.bootstrap_samples,
            seed=derive_seed(self.seed_base, cycle, "bootstrap"),
        )

    def _sample(self, client: RolloutClient, work: Sequence[tuple[Problem, int]], cycle: int) -> list[Replicate]:
        if not work:  # more processes than completions
            return []
        prompts = {problem.problem_id: self.encode(problem.messages) for problem, _ in work}
        groups = client.generate(
            [prompts[problem.problem_id] for problem, _ in work],
            self.sampling,
            group_size=1,
            seeds=[derive_seed(self.seed_base, cycle, problem.problem_id, replicate) for problem, replicate in work],
        )
        return [
            self._replicate(problem, completion.token_ids, completion.finish_reason)
            for (problem, _), (completion,) in zip(work, groups, strict=True)
        ]

    def _replicate(self, problem: Problem, token_ids: Sequence[int], finish_reason: FinishReason) -> Replicate:
        text = cut_at_stop(self.decode(token_ids), self.sampling.stop)
        score = self.task.score(problem, text)
        return Replicate(score.reward, score.is_correct, finish_reason is FinishReason.LENGTH, len(token_ids))

    def _table(self, replicates: list[Replicate]) -> ReplicateTable:
        shape = (len(self.problems), self.replicates)
        return ReplicateTable(
            rewards=np.array([r.reward for r in replicates], dtype=np.float64).reshape(shape),
            is_correct=np.array([r.is_correct for r in replicates], dtype=np.bool_).reshape(shape),
            is_truncated=np.array([r.is_truncated for r in replicates], dtype=np.bool_).reshape(shape),
            num_tokens=np.array([r.num_tokens for r in replicates], dtype=np.int64).reshape(shape),
        )
