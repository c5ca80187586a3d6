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

from offline_grpo.report.figures import SILENT
from offline_grpo.report.history import History
from offline_grpo.report.run_files import read_yaml
from offline_grpo.report.samples import highest_reward

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
    merged = [
        (Finding(_over(list(by.values())), advice, metric), list(by)) for (metric, advice, _), by in alike.items()
    ]
    return sorted(merged, key=lambda pair: order.index(pair[0].metric))


def _over(observations: Sequence[str]) -> str:
    """Observations that differ in their numbers alone, as one, with ranges: `12\u201330% of ...`."""
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


def _total(history: History, *keys: str) -> float:
    """What counters counted over all starts: each start begins at 0."""
    values = (history.series("train", key).values for key in keys)
    return sum(float(np.diff(each, prepend=0.0).clip(0).sum()) for each in values)


def _failed_scores(history: History) -> Pairs:
    if (total := history.series("train", "scoring/num_failed").values.sum()) > 0:
        advice = "the first failure of each kind is in run.log"
        yield f"{total:.0f} rewards are 0 because the code that scores failed", advice


def _refused_updates(history: History) -> Pairs:
    if (total := history.series("train", "num_updates_refused").values.sum()) > 0:
        advice = "a lower train.lr, train.precision=bf16"
        yield f"{total:.0f} updates were skipped, whose loss or gradient was not finite", advice


def _dead_servers(history: History) -> Pairs:
    if (total := _total(history, "sync/num_recoveries", "engines/num_restarts")) > 0:
        yield f"servers died and were brought back: {total:.0f}", "the ends of server_*.log say why they died"


def _no_update(history: History) -> Pairs:
    updates, trained = (history.series("train", key).values for key in ("num_updates", "num_groups_trained"))
    refused = history.series("train", "num_updates_refused").values.sum()
    if len(updates) > 0 and updates.sum() == 0 and refused == 0:
        iterations = f"{len(updates)} iteration{'s' if len(updates) > 1 else ''}"
        masked = history.series("train", "num_groups_masked").values.sum() > 0
        equal = ": the rewards of each group are all equal" if trained.sum() == 0 and not masked else ""
        cut = ": all completions with different rewards were cut off" if masked else ""
        advice = "see in samples/ what the reward pays for; harder or easier problems"
        yield (
            f"no update was made in {iterations}{cut or equal}",
            "a larger generation.max_new_tokens" if cut else advice,
        )


def _mismatch(history: History) -> Pairs:
    """Whether what is trained on was drawn from the weights that are trained."""
    apart, effective = trend(history, "alignment/diff_abs_mean"), trend(history, "mismatch/ess_frac")
    if not (apart.last > 0.1 or effective.last < 0.9):
        return
    numbers = f"{apart.last:.2g} nats apart per token, effective sample size {effective.last:.0%}"
    age = trend(history, "async/age_mean")
    if age.last > 0:
        yield (
            f"rollouts are {age.last:.2g} versions old at last: {numbers}",
            "a lower rollouts.max_staleness or train.lr",
        )
    elif len(history.series("train", "rollouts/epoch")):  # a replay
        text = f"the recorded rollouts are of weights far from those that are trained: {numbers}"
        yield text, "train.loss.ratio_reference=rollout, a lower train.lr, or newer recordings"
    else:
        advice = "docs/troubleshooting.md, Trainer and engine disagree, before anything else"
        yield f"trainer and engine disagree: {numbers}", advice


def _worse(history: History) -> Pairs:
    held_out, high, low = (trend(history, f"pass@1{end}", "eval") for end in ("", "_high", "_low"))
    if high.last < low.first:
        numbers = f"held-out pass@1 {held_out}, and the intervals do not meet"
        yield f"the model has got worse: {numbers}", "a lower train.lr, train.warmup_steps"


def _never_right(history: History) -> Pairs:
    """Of a task whose own reward decides what is right."""
    config = history.run_dir / ".hydra" / "config.yaml"
    least = (read_yaml(config).get("task") or {}).get("correct_threshold") if config.is_file() else None
    solved = history.series("eval", "pass@1").values
    if least is None or not len(solved) or solved.max() > 0 or history.series("train", "success_rate").values.any():
        return
    best = highest_reward(history)
    seen = "" if best is None else f": highest reward seen {best:.3g}"
    advice = "see in samples/ what the reward pays for; a lower task.correct_threshold, if that is right"
    yield f"pass@1 is 0 because no reward reached task.correct_threshold={least:g}{seen}", advice


def _no_signal(history: History) -> Pairs:
    groups, trained = (history.series("train", key).values for key in ("num_groups", "num_groups_trained"))
    masked = history.series("train", "num_groups_masked").values
    trained = trained + masked if len(masked) == len(trained) else trained
    success = trend(history, "success_rate")
    if len(groups) == len(trained) > 0:
        count = math.ceil(len(groups) / 5)
        share = trained[-count:].sum() / max(groups[-count:].sum(), 1)
        if share < 0.2 and success.last < 0.8:
            numbers = f"{share:.0%} of the groups have different rewards, {success.last:.0%} of the answers are right"
            advice = "a larger data.rollouts_per_problem, or problems of medium difficulty"
            yield f"few groups have signal at last: {numbers}", advice


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


def _over_fitting(history: History) -> Pairs:
    """Training success far above that on held-out problems, further than before training; or only the former rises."""
    success, held_out = trend(history, "success_rate"), trend(history, "pass@1", "eval")
    if success.last > held_out.last + 0.2 and success.last - held_out.last > success.first - held_out.first + 0.1:
        numbers = f"{success.last:.2f} of the answers in training are right, {held_out.last:.2f} on held-out problems"
        yield f"over-fitting: {numbers}", "more problems, fewer iterations or train.epochs, checkpoint.keep_best=pass@1"
        return
    reward, spread = trend(history, "reward_mean"), trend(history, "reward_std")
    if reward.last > reward.first + 0.5 * spread.first and held_out.last <= held_out.first < 0.99:
        numbers = f"reward {reward}, pass@1 {held_out}"
        advice = "read samples/ with a high reward; use more problems"
        yield f"the reward rises, and held-out pass@1 does not: {numbers}", advice


def _length(history: History) -> Pairs:
    length, success = trend(history, "completion_tokens_mean"), trend(history, "success_rate")
    if length.last > 1.5 * length.first and success.last < success.first + 0.05:
        numbers = f"{length} tokens, right answers from {success.first:.0%} to {success.last:.0%}"
        advice = "train/loss=dapo or dr_grpo, a lower generation.max_new_tokens"
        yield f"completions get longer, and not better: {numbers}", advice


_CHECKS: dict[Callable[[History], Pairs], str] = {
    _failed_scores: "train/scoring/num_failed",
    _refused_updates: "train/num_updates_refused",
    _dead_servers: "train/sync/num_recoveries",
    _no_update: "train/num_updates",
    _mismatch: "train/alignment/diff_abs_mean",
    _worse: "eval/pass@1",
    _never_right: "eval/pass@1",
    _no_signal: SILENT,
    _truncation: "train/truncated_frac",
    _entropy: "train/entropy",
    _over_fitting: "train/success_rate",
    _length: "train/completion_tokens_mean",
}
"""Check -> the metric whose curve shows what it finds."""
_OF_ANY_LENGTH = (_failed_scores, _refused_updates, _dead_servers, _no_update, _never_right)
