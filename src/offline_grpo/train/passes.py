"""Passes over an iteration's batch, of which every process makes a share, in microbatches: those of the updates, and
before them those without gradients, in which policy, reference and teacher say how likely they find its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offline_grpo import progress
from offline_grpo.interfaces import Advantage, Loss, Scorer
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import Scoring
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import TrainConfig
from offline_grpo.train.batch import build_batch, microbatches, share_of_rank, split_updates
from offline_grpo.train.sharding import Sharding
from offline_grpo.types import RolloutGroup, TokenBatch


@dataclass
class Passes:
    """The models that go over a batch, and what decides which passes an iteration needs."""

    policy: Policy
    reference: Scorer | None
    loss: Loss
    advantage: Advantage
    config: TrainConfig
    ranks: Ranks
    sharding: Sharding
    reward_penalty: Callable[[TokenBatch], Tensor] | None = None  # [S], see `loss.base.reward_penalty`
    teacher: Scorer | None = None

    def updates_of(self, num_sequences: int) -> list[range]:
        """The sequences of each update of one epoch over a batch of this many."""
        config, per_update = self.config, None
        if config.grad_accum_steps is not None:
            assert config.batch_size is not None
            per_update = config.batch_size * config.grad_accum_steps
        num_updates = config.updates_per_iteration
        return split_updates(num_sequences, num_updates=num_updates, sequences_per_update=per_update)

    def needs_old(self, batch: TokenBatch) -> bool:
        """Whether logprobs of the policy before its updates are needed: by what comes before the updates, or for a
        ratio that is not the one of a single update, to itself.
        """
        has_several_updates = len(self.updates_of(batch.num_sequences)) * self.config.epochs > 1
        is_needed = self.reward_penalty is not None or "old" in self.advantage.needs
        return is_needed or (has_several_updates and self.loss.ratio_reference == "old")

    def score(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the logprobs of the old policy, and of the reference, where the iteration needs them.
        Reference logprobs that came with the rollouts take the place of a pass.
        """
        old = self._values(self.policy.scoring, batch) if self.needs_old(batch) else None
        ref = None
        if self.reference is not None and batch.ref_logprobs is None:
            ref = self._values(self.reference, batch)
        return batch.with_logprobs(old=old, ref=ref)

    def entropies(self, batch: TokenBatch) -> Tensor:
        """Entropies [T] of the policy."""
        return self._values(self.policy.scoring, batch, "entropy")

    def teach(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """The groups with the teacher's logprobs in place of any that came with them; those of truncated completions
        too, because they are recorded.
        """
        assert self.teacher is not None
        batch = build_batch([rollout for group in groups for rollout in group.rollouts], mask_truncated=False)
        is_server = not isinstance(self.teacher, Scoring)
        rows = iter(self._values(self.teacher, batch, at_once=is_server).split(batch.sequence_lengths))
        taught = []
        for group in groups:
            rollouts = (replace(rollout, teacher_logprobs=tuple(next(rows).tolist())) for rollout in group.rollouts)
            taught.append(replace(group, rollouts=tuple(rollouts)))
        return taught

    def _values(self, scorer: Scorer, batch: TokenBatch, what: str = "logprobs", *, at_once: bool = False) -> Tensor:
        """Logprobs (or `what`) [T] of all sequences; each process scores a share, in microbatches or `at_once`."""
        values = torch.zeros_like(batch.old_logprobs)  # [T]
        parts = self.microbatches(range(batch.num_sequences), batch)
        if at_once:
            parts = [(own, True)] if (own := [s for sequences, counts in parts if counts for s in sequences]) else []
        scored: list[tuple[Sequence[int], Tensor]] = []  # on the device: it is not waited for between two microbatches
        for number, (sequences, counts) in enumerate(parts):
            part = getattr(scorer, what)(batch.select(sequences).to(scorer.device))
            if counts:
                scored.append((sequences, part))
            progress.report(number + 1, len(parts), "microbatches scored")
        for sequences, part in scored:
            values.numpy()[batch.positions_of(sequences)] = part.cpu().numpy()
        self.ranks.sum_([values])
        return values

    def microbatches(self, sequences: Sequence[int], batch: TokenBatch) -> list[tuple[Sequence[int], bool]]:
        """This process's microbatches of these sequences; then, as often as the sharding asks for it, one that does
        not count.
        """
        own = microbatches(
            share_of_rank(sequences, batch.sequence_lengths, rank=self.ranks.rank, world_size=self.ranks.world_size),
            batch.sequence_lengths,
            batch_size=self.config.batch_size,
            max_tokens=self.config.tokens_per_microbatch,
            padded=self.policy.scoring.layout.pads,
        )
        filler = own[-1] if own else sequences[:1]
        num_fillers = self.sharding.num_microbatches(len(own)) - len(own)
        return [*((chosen, True) for chosen in own), *[(filler, False)] * num_fillers]
