"""One iteration's optimizer updates: batch in, changed weights and metrics out.

    score once (old, reference) -> for each epoch, for each update: microbatches forward and backward -> sum over
    processes -> step

Every loss and metric is a sum of shares divided by the totals of the whole optimizer batch, so neither the number of
microbatches nor the number of processes changes the gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offline_grpo import progress
from offline_grpo.errors import NonFiniteError
from offline_grpo.interfaces import Advantage, Loss, Scorer, Sharding
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import Scoring, prepare_for_gradients
from offline_grpo.placement.ranks import Ranks
from offline_grpo.seeding import derive_seed
from offline_grpo.settings import TrainConfig
from offline_grpo.train.alignment import MISMATCH_NATS, Alignment, warn_of_mismatch
from offline_grpo.train.batch import build_batch, microbatches, share_of_rank, split_updates, totals_of
from offline_grpo.train.schedule import LrSchedule, UpdateCounters
from offline_grpo.types import BatchTotals, Rollout, RolloutGroup, TokenBatch, TokenStats

MEANS = {"exp_avg", "exp_avg_sq", "state1", "state2"}
"""What optimizers call the state that they keep for every weight."""


@dataclass
class Updater:
    """Applies updates to a policy. `counters`, the optimizer and the scaler are the state that a checkpoint saves."""

    policy: Policy
    reference: Scorer | None
    loss: Loss
    advantage: Advantage
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # type: ignore[name-defined]
    config: TrainConfig
    ranks: Ranks
    sharding: Sharding
    max_new_tokens: int
    lr_schedule: LrSchedule
    seed: int
    failure_dir: Path
    reward_penalty: Callable[[TokenBatch], Tensor] | None = None  # [S], see `loss.base.reward_penalty`
    teacher: Scorer | None = None
    counters: UpdateCounters = field(default_factory=UpdateCounters)

    _warns_above: float = field(default=MISMATCH_NATS, init=False)

    def __post_init__(self) -> None:
        self._peak_lrs: list[float | None] = [group["lr"] for group in self.optimizer.param_groups]

    def run(self, batch: TokenBatch, *, iteration: int) -> dict[str, float]:
        """Every update of an iteration on a scored `batch` (CPU tensors, the same on every process) that has a token to
        train on. Returns metrics averaged over updates.
        """
        _seed_dropout(derive_seed(self.seed, "dropout", iteration, self.ranks.rank))
        split = self.updates_of(batch.num_sequences)
        one_pass = [(sequences, totals_of(batch, sequences, max_new_tokens=self.max_new_tokens)) for sequences in split]
        updates = self.config.epochs * [pair for pair in one_pass if pair[1].num_completion_tokens > 0]
        alignment = Alignment()
        results = []
        for number, (sequences, totals) in enumerate(updates):
            progress.report(number, len(updates), "updates")
            self._set_lr()
            shares = self._gradients(batch, sequences, totals, alignment)
            results.append(self._step(shares))
            self._count(results[-1] is not None, batch, sequences, iteration)
        applied = [metrics for metrics in results if metrics is not None]
        names = applied[0] if applied else ()
        means = {name: sum(metrics[name] for metrics in applied) / len(applied) for name in names}
        means |= alignment.metrics(self.ranks)
        if self.ranks.is_main:
            self._warns_above = warn_of_mismatch(means, self._warns_above)
        means |= {"num_updates": float(len(applied)), "num_updates_refused": float(len(results) - len(applied))}
        lr = self.optimizer.param_groups[0]["lr"]
        return means if lr is None else means | {"lr": lr}

    def updates_of(self, num_sequences: int) -> list[range]:
        """The sequences of each update of one pass over a batch of this many."""
        config, per_update = self.config, None
        if config.grad_accum_steps is not None:
            assert config.batch_size is not None
            per_update = config.batch_size * config.grad_accum_steps
        num_updates = config.updates_per_iteration
        return split_updates(num_sequences, num_updates=num_updates, sequences_per_update=per_update)

    def needs_old_logprobs(self, batch: TokenBatch) -> bool:
        """Whether a scoring pass is due: for a ratio to the old policy, which that of a single update is itself."""
        has_several_updates = len(self.updates_of(batch.num_sequences)) * self.config.epochs > 1
        is_needed = self.reward_penalty is not None or "old" in self.advantage.needs
        return is_needed or (has_several_updates and self.loss.ratio_reference == "old")

    def score(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the logprobs of the policy before its first update, and of the reference, where the iteration
        needs them. Reference logprobs that came with the rollouts take the place of a pass.
        """
        old = self._score_all(self.policy.scoring, batch) if self.needs_old_logprobs(batch) else None
        ref = None
        if self.reference is not None and batch.ref_logprobs is None:
            ref = self._score_all(self.reference, batch)
        return batch.with_logprobs(old=old, ref=ref)

    def with_top_entropy(self, batch: TokenBatch) -> TokenBatch:
        """See `TokenBatch.with_top_entropy`; by the entropies of the policy before its first update on the batch."""
        if self.config.top_entropy_frac == 1:
            return batch
        entropy = self._score_all(self.policy.scoring, batch, "entropy")
        return batch.with_top_entropy(entropy, self.config.top_entropy_frac)

    def taught(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """The groups with the teacher's logprobs, in place of any that came with them; as they are without a teacher.
        Those of truncated completions too: they are recorded.
        """
        if self.teacher is None:
            return groups
        batch = build_batch([rollout for group in groups for rollout in group.rollouts], mask_truncated=False)
        is_server = not isinstance(self.teacher, Scoring)
        rows = iter(self._score_all(self.teacher, batch, at_once=is_server).split(batch.sequence_lengths))

        def told(rollout: Rollout) -> Rollout:
            return replace(rollout, teacher_logprobs=tuple(next(rows).tolist()))

        return [replace(group, rollouts=tuple(map(told, group.rollouts))) for group in groups]

    def _score_all(
        self, scoring: Scorer, batch: TokenBatch, what: str = "logprobs", *, at_once: bool = False
    ) -> Tensor:
        """Logprobs (or `what`) [T] of all sequences; each process scores a share, in microbatches or `at_once`."""
        values = torch.zeros_like(batch.old_logprobs)  # [T]
        passes = list(self._passes(range(batch.num_sequences), batch))
        if at_once:
            passes = [(own, True)] if (own := [s for sequences, counts in passes if counts for s in sequences]) else []
        scored: list[tuple[Sequence[int], Tensor]] = []  # on the device: it is not waited for between two microbatches
        for number, (sequences, counts) in enumerate(passes):
            part = getattr(scoring, what)(batch.select(sequences).to(scoring.device))
            if counts:
                scored.append((sequences, part))
            progress.report(number + 1, len(passes), "microbatches scored")
        for sequences, part in scored:
            values.numpy()[batch.positions_of(sequences)] = part.cpu().numpy()
        self.ranks.sum_([values])
        return values

    def _gradients(
        self, batch: TokenBatch, sequences: Sequence[int], totals: BatchTotals, alignment: Alignment
    ) -> dict[str, Tensor]:
        """Fill in the gradients of one update on these sequences. Returns this process's shares of the metrics."""
        self.optimizer.zero_grad(set_to_none=True)
        shares: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.policy.device))
        needs_old_logprobs = self.needs_old_logprobs(batch)
        prepare_for_gradients(self.policy.model)
        passes = list(self._passes(sequences, batch))
        for number, (chosen, counts) in enumerate(passes):
            progress.report(number, len(passes), "microbatches")
            part = batch.select(chosen).to(self.policy.device)
            stats: TokenStats = self.policy.scoring(part, entropy_requires_grad=self.loss.entropy_coef != 0)
            if not needs_old_logprobs:
                part = part.with_logprobs(old=stats.logprobs.detach())
            output = self.loss(stats, part, totals)
            with self.policy.scoring.attention(part):
                self.scaler.scale(output.loss if counts else output.loss * 0.0).backward()
            self.policy.masters.accumulate()
            if counts:
                alignment.add(part, stats.logprobs)
                for name, share in output.metrics.items():
                    shares[name] = shares[name] + share
        return shares

    def _step(self, shares: dict[str, Tensor]) -> dict[str, float] | None:
        """One optimizer step. Returns the update's metrics, summed over processes, with the L2 norm of the gradient
        before clipping; None if loss or gradient was not finite and the step was refused.
        """
        names = sorted(self.ranks.broadcast(list(shares)))
        sums = torch.stack([shares[name] for name in names])
        self.ranks.sum_([sums])
        parameters = list(self.policy.masters.parameters.values())
        self.sharding.reduce_gradients(parameters)
        self.scaler.unscale_(self.optimizer)
        metrics = dict(zip(names, sums.tolist(), strict=True))
        metrics["grad_norm"] = self.sharding.clip_gradients(parameters, self.config.grad_clip)
        is_finite = all(map(math.isfinite, metrics.values()))
        if is_finite:
            self.scaler.step(self.optimizer)
            self.policy.masters.publish()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics if is_finite else None

    def _count(self, is_finite: bool, batch: TokenBatch, sequences: Sequence[int], iteration: int) -> None:
        self.counters.num_updates += 1
        self.counters.num_refused_in_a_row = 0 if is_finite else self.counters.num_refused_in_a_row + 1
        self.counters.num_refused += not is_finite
        if self.counters.num_refused_in_a_row < self.config.max_bad_updates:
            return
        path = self.failure_dir / f"failed_batch_iter_{iteration:03d}.pt"
        if self.ranks.is_main:
            part = batch.select(sequences)
            torch.save({name: getattr(part, name) for name in part.__dataclass_fields__}, path)
        raise NonFiniteError(
            f"{self.counters.num_refused_in_a_row} updates in a row had a non-finite loss or gradient and were refused "
            f"(train.max_bad_updates={self.config.max_bad_updates}); the last batch is in {path}. "
            "The weights are those of the last good update: lower train.lr, or look at the batch's logprobs and "
            "advantages"
        )

    def _passes(self, sequences: Sequence[int], batch: TokenBatch) -> Iterator[tuple[Sequence[int], bool]]:
        """This process's microbatches, then the passes that do not count, as many as the sharding asks for."""
        own = microbatches(
            share_of_rank(sequences, batch.sequence_lengths, rank=self.ranks.rank, world_size=self.ranks.world_size),
            batch.sequence_lengths,
            batch_size=self.config.batch_size,
            max_tokens=self.config.tokens_per_microbatch,
            padded=self.policy.scoring.layout.pads,
        )
        yield from ((chosen, True) for chosen in own)
        filler = own[-1] if own else sequences[:1]
        yield from ((filler, False) for _ in range(self.sharding.num_microbatches(len(own)) - len(own)))

    def _set_lr(self) -> None:
        scale = self.lr_schedule(self.counters.num_updates)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
            if peak is not None:  # None: an optimizer that sets its own (Adafactor's relative_step)
                group["lr"] = peak * scale

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and scaler, for the checkpoint, which has the counters too."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any], counters: UpdateCounters) -> None:
        """Restore `state_dict()` and the counters. The optimizer's settings stay those of the configuration.

        Raises:
            ValueError: a running mean has another shape than its parameter, which fused kernels would not notice.
        """
        groups = self.optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        for number, means in state["optimizer"]["state"].items():
            for name in MEANS & means.keys():
                means[name] = self.sharding.like(parameters[number], means[name])
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, means in self.optimizer.state.items():
            for name in MEANS & means.keys():
                if means[name].shape != parameter.shape:
                    raise ValueError(f"{name} is {list(means[name].shape)}, for a parameter of {list(parameter.shape)}")
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        self.scaler.load_state_dict(state["scaler"])
        self.counters = replace(counters)


def _seed_dropout(seed: int) -> None:
    """`torch.manual_seed` without what it does for GPUs that are not there: 2 ms, a tenth of a small update."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
