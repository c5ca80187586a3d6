"""What an expert would point out in a run's metrics: each finding with the numbers it rests on, and what to try.

The thresholds are those of docs/read_your_run.md. First and last are means over a fifth of the iterations, because
single ones are noisy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offline_grpo.report.history import History

LEAST_ITERATIONS = 10
"""In fewer, noise looks like a trend."""
_NUMBER = re.compile(r"(?<![\w@.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
"""Of an observation; not the 1 of `pass@1`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to look at. `observation` has the numbers; `metric` is the one whose curve shows it."""

    observation: str
    advice: str
    metric: str


@dataclass(frozen=True, slots=True)
class Trend:
    """A metric in the first and in the last fifth of a run; NaN where it was not recorded, of which no comparison is
    true.
    """

    first: float
    last: float

    def __str__(self) -> str:
        return f"from {self.first:.3g} to {self.last:.3g}"


def find(history: History) -> list[Finding]:
    """All findings, the most serious first."""
    checks = _CHECKS if len(history.train) >= LEAST_ITERATIONS else {check: _CHECKS[check] for check in _OF_ANY_LENGTH}
    return [Finding(*pair, metric) for check, metric in checks.items() for pair in check(history)]


def shared(found: Mapping[str, Sequence[Finding]]) -> list[tuple[Finding, list[str]]]:
    """The findings of several runs, each said once, with the runs that it holds for; its numbers become ranges over
    these runs.
    """
    alike: dict[tuple[str, str, str], dict[str, str]] = {}
    for run, findings in found.items():
        for each in findings:
            alike.setdefault((each.metric, each.advice, _NUMBER.sub("#", each.observation)), {})[run] = each.observation
    order = list(_CHECKS.values())
    said = [
        (Finding(_over(list(runs.values())), advice, metric), list(runs)) for (metric, advice, _), runs in alike.items()
    ]
    return sorted(said, key=lambda pair: order.index(pair[0].metric))


def _over(observations: Sequence[str]) -> str:
    """Observations that differ in their numbers alone, as one: `12% of ...` and `30% of ...` are `12\u201330% of ...`."""
    ranges = []
    for numbers in zip(*map(_NUMBER.findall, observations), strict=True):
        low, high = min(numbers, key=float), max(numbers, key=float)
        ranges.append(low if float(low) == float(high) else f"{low}\u2013{high}")
    left = iter(ranges)
    return _NUMBER.sub(lambda _: next(left), observations[0])


def trend(history: History, key: str, name: str = "train") -> Trend:
    """How a metric of training (or "eval") went. Of evaluations, the first and the last one."""
    values = history.series(name, key).values
    if not len(values):
        return Trend(math.nan, math.nan)
    count = 1 if name == "eval" else math.ceil(len(values) / 5)
    return Trend(float(np.mean(values[:count])), float(np.mean(values[-count:])))


Pairs = Iterator[tuple[str, str]]


def _failures(history: History) -> Pairs:
    for key, what, advice in (
        (
            "scoring/num_failed",
            "rewards are 0 because the code that scores failed",
            "the first failure of each kind is in run.log",
        ),
        (
            "num_updates_refused",
            "updates were skipped, whose loss or gradient was not finite",
            "a lower train.lr, train.precision=bf16",
        ),
    ):
        if (total := history.series("train", key).values.sum()) > 0:
            yield f"{total:.0f} {what}", advice


def _servers(history: History) -> Pairs:
    for keys, what, advice in (
        (
            ("sync/num_recoveries", "engines/num_restarts"),
            "servers lost and brought back",
            "the ends of server_*.log say why they died",
        ),
    ):
        counts = (
            history.series("train", key).values for key in keys
        )  # since a process started, so each resumption begins at 0
        if (total := sum(np.diff(values, prepend=0.0).clip(0).sum() for values in counts)) > 0:
            yield f"{what}: {total:.0f}", advice


def _no_updates(history: History) -> Pairs:
    updates, trained = (history.series("train", key).values for key in ("num_updates", "num_groups_trained"))
    refused = history.series("train", "num_updates_refused").values.sum()
    is_masked = history.series("train", "num_groups_masked").values.sum() > 0  # which is another finding
    if len(updates) > 0 and updates.sum() == 0 and refused == 0 and not is_masked:
        iterations = f"{len(updates)} iteration{'s' if len(updates) > 1 else ''}"
        signal = ": the rewards of each group are all equal" if trained.sum() == 0 else ""
        yield (
            f"no update was made in {iterations}{signal}",
            "see in samples/ what the reward pays for; harder or easier problems",
        )


def _masked(history: History) -> Pairs:
    """Of a run with `train.mask_truncated`."""
    masked, trained = (history.series("train", key).values for key in ("num_groups_masked", "num_groups_trained"))
    if (total := masked.sum()) > 0.2 * (all_of := total + trained.sum()):
        numbers = f"{total:.0f} of {all_of:.0f} groups with different rewards were not trained on"
        yield (
            f"{numbers}: all of their completions were cut off",
            "a larger generation.max_new_tokens, or train.mask_truncated=false",
        )


def _mismatch(history: History) -> Pairs:
    """Whether what is trained on was drawn from the weights that are trained."""
    apart, effective = trend(history, "alignment/diff_abs_mean"), trend(history, "mismatch/ess_frac")
    age = trend(history, "async/age_mean")
    if apart.last > 0.1 or effective.last < 0.9:
        numbers = f"{apart.last:.2g} nats apart per token, effective sample size {effective.last:.0%}"
        if age.last > 0:
            yield (
                f"rollouts are {age.last:.2g} versions old at last: {numbers}",
                "a lower rollouts.max_staleness, a lower train.lr",
            )
            return
        if len(history.series("train", "rollouts/epoch")):  # a replay
            text = f"the recorded rollouts are of weights far from those that are trained: {numbers}"
            yield text, "train.loss.ratio_reference=rollout, a lower train.lr, or newer recordings"
            return
        yield (
            f"trainer and engine disagree: {numbers}",
            "docs/troubleshooting.md, Trainer and engine disagree, before anything else",
        )


def _worse(history: History) -> Pairs:
    held_out, high, low = (trend(history, f"pass@1{end}", "eval") for end in ("", "_high", "_low"))
    if high.last < low.first:
        yield (
            f"the model has got worse: held-out pass@1 {held_out}, and the intervals do not meet",
            "a lower train.lr, train.warmup_steps",
        )


def _no_signal(history: History) -> Pairs:
    groups, trained = (history.series("train", key).values for key in ("num_groups", "num_groups_trained"))
    masked = history.series("train", "num_groups_masked").values
    trained = trained + masked if len(masked) == len(trained) else trained
    success = trend(history, "success_rate")
    if len(groups) == len(trained) > 0:
        count = math.ceil(len(groups) / 5)
        share = trained[-count:].sum() / max(groups[-count:].sum(), 1)
        if share < 0.2 and success.last < 0.8:
            numbers = (
                f"{share:.0%} of the groups have different rewards, and {success.last:.0%} of the answers are right"
            )
            yield (
                f"few groups have signal at last: {numbers}",
                "a larger data.rollouts_per_problem, or problems of medium difficulty",
            )


def _truncation(history: History) -> Pairs:
    cut = trend(history, "truncated_frac")
    if cut.last > 0.1:
        share = cut.last if cut.last == 1 else min(cut.last, 0.99)  # "100%" is all of them
        masks = len(history.series("train", "num_groups_masked")) > 0
        advice = "a larger generation.max_new_tokens" + ("" if masks else ", train.mask_truncated=true")
        yield f"{share:.0%} of the completions are cut off at last", advice


def _entropy(history: History) -> Pairs:
    entropy, success = trend(history, "entropy"), trend(history, "success_rate")
    if entropy.last < 0.1 * entropy.first and entropy.last < 0.1 and success.last < 0.9:
        advice = "train/loss=dapo, a lower train.lr, a higher train.kl_coef, train.entropy_coef=1e-3"
        yield f"entropy has collapsed: {entropy} nats, with {success.last:.0%} of the answers right", advice
    if entropy.last > 2 * entropy.first and entropy.last > entropy.first + 0.5:
        yield f"entropy grows: {entropy} nats", "a lower train.lr, train.entropy_coef=0"


def _clipping(history: History) -> Pairs:
    clipped = trend(history, "clip_frac")
    if clipped.last > 0.3:
        yield (
            f"{clipped.last:.0%} of the tokens are clipped at last",
            "fewer train.epochs or train.updates_per_iteration, a lower train.lr",
        )


def _length(history: History) -> Pairs:
    length, success = trend(history, "completion_tokens_mean"), trend(history, "success_rate")
    relation = trend(history, "reward_length_correlation")
    if length.last > 1.5 * length.first and success.last < success.first + 0.05:
        numbers = f"{length} tokens, right answers from {success.first:.0%} to {success.last:.0%}"
        yield (
            f"completions get longer, and not better: {numbers}",
            "train/loss=dapo or dr_grpo, a lower generation.max_new_tokens",
        )
    if relation.last > 0.5:
        numbers = f"correlation {relation.last:.2f} within groups"
        yield (
            f"the longer of two answers gets the higher reward: {numbers}",
            "see in samples/ whether length is what the reward pays for",
        )


def _not_general(history: History) -> Pairs:
    reward, held_out = trend(history, "reward_mean"), trend(history, "pass@1", "eval")
    spread = trend(history, "reward_std")
    if reward.last > reward.first + 0.5 * spread.first and held_out.last <= held_out.first < 0.99:
        numbers = f"reward {reward}, pass@1 {held_out}"
        yield (
            f"the reward rises, and held-out pass@1 does not: {numbers}",
            "read samples/ with a high reward; use more problems",
        )


def _waiting(history: History) -> Pairs:
    """Of a source that samples in the background."""
    waits, trains = trend(history, "time/rollouts_wait_s"), trend(history, "time/train_s")
    if waits.last > trains.last:
        numbers = f"{waits.last:.2g} s an iteration, and trains for {trains.last:.2g} s"
        yield f"the trainer waits for samples: {numbers}", "more or faster engines, or generation.max_new_tokens"


def _scoring(history: History) -> Pairs:
    """Of a source that samples while the trainer waits."""
    waits, samples = trend(history, "time/scoring_wait_s"), trend(history, "time/generate_s")
    if waits.last > max(1.0, 0.3 * samples.last):
        numbers = f"{waits.last:.2g} s of the {samples.last:.2g} s that sampling takes"
        yield f"rewards take longer than the completions: {numbers}", "more scoring.workers, or a faster reward"


_CHECKS: dict[Callable[[History], Pairs], str] = {
    _failures: "scoring/num_failed",
    _servers: "sync/num_recoveries",
    _no_updates: "num_updates",
    _masked: "num_groups_masked",
    _mismatch: "alignment/diff_abs_mean",
    _worse: "pass@1",
    _no_signal: "num_groups_trained",
    _truncation: "truncated_frac",
    _entropy: "entropy",
    _clipping: "clip_frac",
    _length: "completion_tokens_mean",
    _not_general: "reward_mean",
    _waiting: "time/rollouts_wait_s",
    _scoring: "time/scoring_wait_s",
}
_OF_ANY_LENGTH = (_failures, _servers, _no_updates, _masked)
