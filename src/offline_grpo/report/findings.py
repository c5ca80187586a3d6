"""What an expert would point out in a run's metrics, by the limits of docs/read_your_run.md, and what to try.

First and last are means over a fifth of the iterations, because single ones are noisy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offline_grpo.report.runs import SILENT, Run, count
from offline_grpo.report.samples import highest_reward

LEAST_ITERATIONS = 10
"""In fewer, noise looks like a trend."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to look at. `observation` has the numbers; `metric` is the one whose curve shows it."""

    metric: str
    observation: str
    advice: str


@dataclass(frozen=True, slots=True)
class Trend:
    """A metric in the first and in the last fifth of a run; NaN where it was not recorded: no comparison is true."""

    first: float
    last: float

    def __str__(self) -> str:
        return f"from {self.first:.3g} to {self.last:.3g}"


def find(run: Run) -> list[Finding]:
    """All findings, the most serious first; what needs a trend only in runs that are long enough."""
    found: list[Finding] = []

    def values(key: str) -> np.ndarray:
        return run.series(f"train/{key}").values

    # First what can be said of a run of any length: scores that failed.
    if (failed := values("scoring/num_failed").sum()) > 0:
        text = f"{failed:.0f} completions have no reward, because the code that scores failed or gave None"
        found.append(Finding("train/scoring/num_failed", text, "the first failure of each kind is in run.log"))
    malformed, calls = values("measured/malformed_calls").sum(), values("measured/calls").sum()
    if malformed > 0.1 * (malformed + calls):
        text = f"{malformed / (malformed + calls):.0%} of the calls of tools cannot be parsed"
        advice = "see their form in samples/; a larger generation.max_new_tokens, or another model.chat_template"
        found.append(Finding("train/measured/malformed_calls", text, advice))
    if (refused := values("num_updates_refused").sum()) > 0:
        text = f"{refused:.0f} updates were skipped, whose loss or gradient was not finite"
        found.append(Finding("train/num_updates_refused", text, "a lower train.lr, train.precision=bf16"))
    counters = (values(key) for key in ("sync/num_recoveries", "engines/num_restarts"))
    died = sum(float(np.diff(each, prepend=0.0).clip(0).sum()) for each in counters)  # each start of a run begins at 0
    if died > 0:
        text = f"servers died and were brought back: {died:.0f}"
        found.append(Finding("train/sync/num_recoveries", text, "the ends of server_*.log say why they died"))
    # A task whose own reward decides which answers are right.
    solved, threshold = run.series("eval/pass@1").values, (run.config.get("task") or {}).get("correct_threshold")
    if threshold is not None and len(solved) and solved.max() == 0 and not values("success_rate").any():
        best = highest_reward(run.folder)
        seen = "" if best is None else f": the highest reward seen is {best:.3g}"
        text = f"pass@1 is 0 because no reward reached task.correct_threshold={threshold:g}{seen}"
        advice = "see in samples/ what the reward pays for; a lower task.correct_threshold, if that is right"
        found.append(Finding("eval/pass@1", text, advice))
    # Nothing was trained: rewards are all equal, or all of a group but one were cut.
    updates = values("num_updates")
    if len(updates) > 0 and updates.sum() == 0 and refused == 0:
        why = "no completion has an advantage, as when rewards of a group are equal"
        advice = "see in samples/ what the reward pays for; other problems"
        if values("num_groups_masked").sum() > 0:
            why = "all completions with different rewards were cut off"
            advice = "a larger generation.max_new_tokens"
        text = f"no update was made in {count(len(updates), 'iteration')}: {why}"
        found.append(Finding("train/num_updates", text, advice))

    # What follows compares the end of a run with its beginning.
    if len(run.train) < LEAST_ITERATIONS:
        return found
    success, held_out = trend(run, "train/success_rate"), trend(run, "eval/pass@1")
    apart, effective = trend(run, "train/alignment/diff_abs_mean"), trend(run, "train/mismatch/ess_frac")
    if apart.last > 0.1 or effective.last < 0.9:
        text, advice = "trainer and engine disagree", "docs/troubleshooting.md, Trainer and engine disagree"
        if (age := trend(run, "train/async/age_mean").last) > 0:
            text, advice = f"rollouts are {age:.2g} versions old at last", "a lower rollouts.max_staleness or train.lr"
        elif len(run.series("train/rollouts/epoch")):  # a replay
            text = "the recorded rollouts are of weights far from those that are trained"
            advice = "train.loss.ratio_reference=rollout, a lower train.lr, or newer recordings"
        numbers = f"{apart.last:.2g} nats apart per token, effective sample size {effective.last:.0%}"
        found.append(Finding("train/alignment/diff_abs_mean", f"{text}: {numbers}", advice))

    # The best evaluation is above the last one, beyond both intervals.
    scores, low, high = (run.series(f"eval/pass@1{end}") for end in ("", "_low", "_high"))
    if len(low) and high.values[-1] < low.values.max():
        best = int(low.values.argmax())
        numbers = (
            f"{scores.values[best]:.3g} after {scores.steps[best]:.0f} iterations, {scores.values[-1]:.3g} at last"
        )
        text = f"the model has got worse: held-out pass@1 was {numbers}, and the intervals do not meet"
        found.append(Finding("eval/pass@1", text, "a lower train.lr, train.warmup_steps, checkpoint.keep_best=pass@1"))

    # Groups with equal rewards teach nothing; where most are solved, that is the aim.
    share = 1 - trend(run, SILENT).last
    if share < 1 / 3 and success.last < 0.8:
        numbers = f"{share:.0%} of the groups have different rewards, {success.last:.0%} of the answers are right"
        advice = "a larger data.rollouts_per_problem, problems of medium difficulty (data.pass_rate)"
        found.append(Finding(SILENT, f"few groups have signal at last: {numbers}", advice))

    cut = trend(run, "train/truncated_frac")
    if cut.last > 0.1:
        advice = "a larger generation.max_new_tokens, train.mask_truncated=true"
        found.append(Finding("train/truncated_frac", f"{cut.last:.0%} of the completions are cut off at last", advice))

    # Certain too early: before its answers are right.
    entropy = trend(run, "train/entropy")
    if entropy.last < 0.1 * entropy.first and entropy.last < 0.2 and success.last < 0.9:
        text = f"entropy has collapsed: {entropy} nats, with {success.last:.0%} of the answers right"
        advice = "a lower train.lr, a higher train.kl_coef, train.entropy_coef=1e-3"
        if trend(run, "train/clip_frac").last > 0.01:  # else its wider bound changes nothing
            advice = f"train/loss=dapo, {advice}"
        found.append(Finding("train/entropy", text, advice))

    # A median, because single iterations reach 60 nats.
    kl = run.series("train/kl_divergence").values
    far = float(np.median(kl[-math.ceil(len(kl) / 5) :])) if len(kl) else math.nan
    if far > 10:
        text = f"the policy is far from the reference: a KL divergence of {far:.3g} nats per token at last"
        found.append(Finding("train/kl_divergence", text, "a lower train.lr, a higher train.kl_coef"))

    # What training earns is not what held-out problems show.
    reward, spread = trend(run, "train/reward_mean"), trend(run, "train/reward_std")
    if success.last > held_out.last + 0.2 and success.last - held_out.last > success.first - held_out.first + 0.1:
        numbers = f"{success.last:.2f} of the answers in training are right, {held_out.last:.2f} on held-out problems"
        advice = "more problems, fewer iterations or train.epochs, checkpoint.keep_best=pass@1"
        found.append(Finding("train/success_rate", f"over-fitting: {numbers}", advice))
    elif reward.last > reward.first + 0.5 * spread.first and held_out.last <= held_out.first < 0.99:
        text = f"the reward rises, and held-out pass@1 does not: reward {reward}, pass@1 {held_out}"
        found.append(Finding("train/success_rate", text, "read samples/ with a high reward; use more problems"))

    # The length alone changes.
    length = trend(run, "train/completion_tokens_mean")
    if length.last > 1.5 * length.first and success.last < success.first + 0.05:
        text = f"completions get longer, and not better: {length} tokens, success rate {success}"
        advice = "train/loss=dapo or dr_grpo, a lower generation.max_new_tokens"
        found.append(Finding("train/completion_tokens_mean", text, advice))
    elif length.last < 0.5 * length.first and success.last < 0.9:
        text = f"completions get much shorter: {length} tokens, with {success.last:.0%} of the answers right"
        advice = "see in samples/ whether the steps before the answer are gone; a reward that does not pay for brevity"
        found.append(Finding("train/completion_tokens_mean", text, advice))
    return found


def shared(found: Mapping[str, Sequence[Finding]]) -> list[tuple[Finding, list[str]]]:
    """The findings of several runs, each once with the runs that it holds for, and the numbers of the first of them."""
    alike: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    for run, findings in found.items():
        for each in findings:
            alike.setdefault((each.metric, each.advice), (each, []))[1].append(run)
    return list(alike.values())


def trend(run: Run, metric: str) -> Trend:
    """How a metric went. Of evaluations, the first and the last one."""
    values = run.series(metric).values
    if not len(values):
        return Trend(math.nan, math.nan)
    fifth = 1 if metric.startswith("eval/") else math.ceil(len(values) / 5)
    return Trend(float(np.mean(values[:fifth])), float(np.mean(values[-fifth:])))
