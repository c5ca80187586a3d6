"""One iteration's optimizer updates: batch in, changed weights and metrics out.

    for each epoch, for each update: microbatches forward and backward -> sum over processes -> step

Every loss and metric is a sum of shares divided by the totals of the whole optimizer batch, so neither the number of
microbatches nor the number of processes changes the gradient.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offline_grpo import progress
from offline_grpo.errors import NonFiniteError
from offline_grpo.model.scoring import prepare_for_gradients
from offline_grpo.seeding import derive_seed
from offline_grpo.train.batch import Passes, totals_of
from offline_grpo.train.metrics import MISMATCH_NATS, Alignment
from offline_grpo.train.schedule import LrSchedule, UpdateCounters
from offline_grpo.types import BatchTotals, TokenBatch

log = logging.getLogger(__name__)

MEANS = {"exp_avg", "exp_avg_sq", "state1", "state2"}
"""What optimizers call the state that they keep for every weight."""


@dataclass
class Updater:
    """Applies updates to a policy. `counters`, the optimizer and the scaler are the state that a checkpoint saves."""

    passes: Passes
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler  # type: ignore[name-defined]
    max_new_tokens: int
    lr_schedule: LrSchedule
    seed: int
    failure_dir: Path
    counters: UpdateCounters = field(default_factory=UpdateCounters)

    _warns_above: float = field(default=MISMATCH_NATS, init=False)

    def __post_init__(self) -> None:
        self._peak_lrs: list[float | None] = [group["lr"] for group in self.optimizer.param_groups]

    def run(self, batch: TokenBatch, *, iteration: int) -> dict[str, float]:
        """Every update of an iteration on a scored `batch` (CPU tensors, the same on every process) that has a token to
        train on. Returns metrics averaged over updates.
        """
        config, ranks = self.passes.config, self.passes.ranks

        # The masks of dropout depend on seed and iteration alone, so that a resumed run draws them again.
        seed = derive_seed(self.seed, "dropout", iteration, ranks.rank)
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():  # torch.manual_seed looks for GPUs for 2 ms, a tenth of a small update
            torch.cuda.manual_seed_all(seed)

        # An update takes whole rollouts. One without a token would move the weights by the optimizer's momentum alone.
        parts = self.passes.updates_of(batch.num_rollouts)
        split = [[s for s, owner in enumerate(batch.owners) if owner in rollouts] for rollouts in parts]
        epoch = [(sequences, totals_of(batch, sequences, max_new_tokens=self.max_new_tokens)) for sequences in split]
        updates = config.epochs * [pair for pair in epoch if pair[1].num_completion_tokens > 0]
        alignment, applied = Alignment(), []
        for number, (sequences, totals) in enumerate(updates):
            progress.report(number, len(updates), "updates")
            metrics = self._update(batch, sequences, totals, alignment)
            if metrics is not None:
                applied.append(metrics)
            elif (refused := self.counters.num_refused_in_a_row) >= config.max_bad_updates:
                # The run ends, and keeps the last update's batch for whoever looks into it.
                path, part = self.failure_dir / f"failed_batch_iter_{iteration:03d}.pt", batch.select(sequences)
                if ranks.is_main:
                    torch.save({name: getattr(part, name) for name in part.__dataclass_fields__}, path)
                raise NonFiniteError(
                    f"{refused} updates in a row had a non-finite loss or gradient and were refused "
                    f"(train.max_bad_updates={config.max_bad_updates}); the last batch is in {path}. The weights are "
                    "those of the last good update: lower train.lr, or look at the batch's logprobs and advantages"
                )

        # Means over the updates that were applied. A mismatch is said again only once it has doubled.
        names = applied[0] if applied else ()
        means = {name: sum(metrics[name] for metrics in applied) / len(applied) for name in names}
        means |= alignment.metrics(ranks)
        difference = means.get("alignment/diff_abs_mean", 0.0)
        if ranks.is_main and difference > self._warns_above:
            self._warns_above = 2 * difference
            log.warning(
                "[MISMATCH] trainer and engine differ by %.3f nats per token on average (alignment/diff_abs_mean, "
                "above %g); rollouts of other weights (rollouts=async, atropos or replay, weight_sync.interval) add to "
                "it; see docs/troubleshooting.md",
                difference,
                MISMATCH_NATS,
            )
        means |= {"num_updates": float(len(applied)), "num_updates_refused": float(len(updates) - len(applied))}
        lr = self.optimizer.param_groups[0]["lr"]
        return means if lr is None else means | {"lr": lr}

    def _update(
        self, batch: TokenBatch, sequences: Sequence[int], totals: BatchTotals, alignment: Alignment
    ) -> dict[str, float] | None:
        """One update on these sequences. Returns its metrics, summed over processes, with the L2 norm of the gradient
        before clipping; None if loss or gradient was not finite and the update was refused.
        """
        passes, policy, loss, ranks = self.passes, self.passes.policy, self.passes.loss, self.passes.ranks

        # The learning rate follows the schedule; None: an optimizer that sets its own (Adafactor's relative_step).
        scale = self.lr_schedule(self.counters.num_updates)
        for group, peak in zip(self.optimizer.param_groups, self._peak_lrs, strict=True):
            if peak is not None:
                group["lr"] = peak * scale

        # Each microbatch goes forward and backward, and adds its share to the gradients and to the metrics.
        self.optimizer.zero_grad(set_to_none=True)
        shares: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=policy.device))
        has_old = passes.needs_old(batch)
        prepare_for_gradients(policy.model)
        parts = passes.microbatches(sequences, batch)
        for number, (chosen, counts) in enumerate(parts):
            progress.report(number, len(parts), "microbatches")
            part = batch.select(chosen).to(policy.device)
            stats = policy.scoring(part, entropy_requires_grad=loss.entropy_coef != 0)
            if not has_old:  # the old policy is this one
                part = part.with_logprobs(old=stats.logprobs.detach())
            output = loss(stats, part, totals)
            with policy.scoring.attention(part):
                self.scaler.scale(output.loss if counts else output.loss * 0.0).backward()
            policy.masters.accumulate()
            if counts and passes.reports:
                seen = None if part.routes is None else policy.scoring.seen_routes(part)
                alignment.add(part, stats.logprobs, seen)
                for name, share in output.metrics.items():
                    shares[name] = shares[name] + share

        # Processes add up what they have. One without a microbatch has no shares: rank 0 says which there are.
        names = sorted(ranks.broadcast(list(shares)))
        sums = torch.stack([shares[name] for name in names])
        ranks.sum_([sums])
        parameters = list(policy.masters.parameters.values())
        passes.sharding.reduce_gradients(parameters)
        self.scaler.unscale_(self.optimizer)
        metrics = dict(zip(names, sums.tolist(), strict=True))
        metrics["grad_norm"] = passes.sharding.clip_gradients(parameters, passes.config.grad_clip)

        # The step. What is not finite is refused, on every process, and the weights stay those of the last good update.
        is_finite = all(map(math.isfinite, metrics.values()))
        if is_finite:
            self.scaler.step(self.optimizer)
            policy.masters.publish()
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.counters.num_updates += 1
        self.counters.num_refused += not is_finite
        self.counters.num_refused_in_a_row = 0 if is_finite else self.counters.num_refused_in_a_row + 1
        return metrics if is_finite else None

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and scaler, for the checkpoint, which has the counters too."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any], counters: UpdateCounters) -> None:
        """Restore `state_dict()` and the counters. The optimizer's settings stay those of the configuration. Raises
        ValueError for a running mean of another shape than its parameter, which fused kernels would not notice.
        """
        # Running means as this process holds them: of a sharded parameter its own part.
        groups = self.optimizer.param_groups
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        for number, means in state["optimizer"]["state"].items():
            for name in MEANS & means.keys():
                means[name] = self.passes.sharding.like(parameters[number], means[name])

        # Then the state, its shapes checked, and the settings of this run back in place.
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, means in self.optimizer.state.items():
            for name in MEANS & means.keys():
                if means[name].shape != parameter.shape:
                    raise ValueError(f"{name} is {list(means[name].shape)}, for a parameter of {list(parameter.shape)}")
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        self.scaler.load_state_dict(state["scaler"])
        self.counters = replace(counters)
