"""Every figure of a run, defined once: `plots.py` draws it into `report.png`, `page.py` gives it to `report.html`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from offline_grpo.logger.console import short
from offline_grpo.report.history import PHASES, FloatArray, History, Series

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f6db5", "#e07b27", "#3a9a5c", "#c8433c", "#7d5ba6", "#6b7280"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)
PHASE_COLORS = dict(zip(PHASES, (BLUE, ORANGE, GREEN, PURPLE, GREY), strict=True))
SHARE, NATS, RATE = "share of completions", "nats per token", "tokens per second"
SILENT = "train/zero_signal_frac"
IN_PICTURE = 15  # of the figures
MAX_NAME = 10  # letters of a name in a legend: three of them fit beside each other
LONG_RUN = 80  # with this many points or more, a line is drawn pale under its running mean


@dataclass(frozen=True)
class Figure:
    """Curves over completed iterations."""

    section: str  # of the page: learning, speed or engine
    title: str
    unit: str  # of the y axis; one that begins with "share" is written in percent
    curves: Mapping[str, str]  # metric, such as `train/reward_mean` -> its name in the legend
    colors: Sequence[str] = COLORS
    from_zero: bool = True  # zero is on the y axis, so that noise does not look like a trend
    stacked: bool = False  # the curves are parts of a whole

    def split(self) -> list[Figure]:
        """A figure for each curve; a stacked one stays whole."""
        if self.stacked or len(self.curves) == 1:
            return [self]
        return [replace(self, title=f"{self.title}: {name}", curves={key: name}) for key, name in self.curves.items()]


def figures(histories: Sequence[History]) -> list[Figure]:
    """All figures of these runs, those of the picture first."""
    reward = Figure("learning", "Training reward", "reward", {"train/reward_mean": "mean ± std"}, from_zero=False)
    return [_held_out(histories), reward, _reward_parts(histories), *_OF_EVERY_RUN]


def _held_out(histories: Sequence[History]) -> Figure:
    """Of a mixture of tasks, pass@1 alone, with that of each task."""
    tasks = sorted({task for history in histories for task in history.tasks()})[: len(COLORS) - 1]
    ks = sorted({k for history in histories for k in history.eval_ks()})[: 1 if tasks else len(COLORS)]
    measured = "pass@k" if len(ks) != 1 else f"pass@{ks[0]}"
    title = "Held-out pass@1 of all and of each task" if tasks else f"Held-out {measured} with 95% interval"
    curves = {f"eval/pass@{k}": f"pass@{k}" for k in ks}
    curves |= {f"eval/task/{task}/pass@1": short(task, MAX_NAME) for task in tasks}
    return Figure("learning", title, "share of problems", curves, from_zero=False)


def _reward_parts(histories: Sequence[History]) -> Figure:
    """The largest ones."""
    keys = {key for history in histories for key in history.keys("train") if key.startswith("reward/")}
    size = {key: max(abs(history.series("train", key).values).max(initial=0) for history in histories) for key in keys}
    largest = sorted(keys, key=lambda key: (-size[key], key))[: len(COLORS)]
    names = {f"train/{key}": key.removeprefix("reward/") for key in largest}
    names = {
        key: name if len(name) <= MAX_NAME else short(name.rpartition("/")[2], MAX_NAME) for key, name in names.items()
    }
    return Figure("learning", "Parts of the reward", "reward", names)


def _one(section: str, title: str, unit: str, metric: str, color: str = BLUE) -> Figure:
    """A single curve."""
    return Figure(section, title, unit, {f"train/{metric}": ""}, [color])


_KL = {
    "train/kl_divergence": "policy to reference",
    "train/mismatch/kl_k3": "engine to trainer",
    "train/distill/reverse_kl": "policy to teacher",
}
_RATES = {"train/perf/generate_tokens_per_s": "generate", "train/perf/train_tokens_per_s": "train"}
_TIMES = {f"train/time/{phase}_s": phase for phase in PHASES}
_MEMORY = {
    "train/perf/gpu_memory_gb": "tensors",
    "train/perf/gpu_memory_reserved_gb": "reserved",
    "train/perf/gpu_memory_card_gb": "all processes",
}
_WAITS = {"train/time/rollouts_wait_s": "for samples", "train/time/scoring_wait_s": "for scores"}
_OF_EVERY_RUN = (
    _one("learning", "Success rate in training", SHARE, "success_rate", GREEN),
    _one("learning", "Groups without signal", "share of groups", SILENT.removeprefix("train/"), RED),
    _one("learning", "Completion length", "tokens", "completion_tokens_mean", GREEN),
    _one("learning", "Cut off at the token limit", SHARE, "truncated_frac", GREY),
    _one("learning", "Policy entropy", NATS, "entropy", PURPLE),
    Figure("learning", "KL divergence", NATS, _KL, [RED, GREY, BLUE]),
    _one("learning", "Clipped tokens", "share of tokens", "clip_frac", ORANGE),
    _one("learning", "Gradient norm", "norm before clipping", "grad_norm", RED),
    _one("learning", "Learning rate", "learning rate", "lr", GREY),
    Figure("speed", "Throughput of each phase", RATE, _RATES),
    Figure("speed", "Time per iteration", "seconds", _TIMES, [*PHASE_COLORS.values()], stacked=True),
    _one("engine", "Logprobs, trainer minus engine", "nats, mean size", "alignment/diff_abs_mean"),
    # Beyond IN_PICTURE: on the page alone.
    Figure("speed", "Memory in use on the trainer's GPU", "GB", _MEMORY),
    Figure("speed", "Waiting", "seconds", _WAITS),
    _one("learning", "Scores that failed", "completions", "scoring/num_failed"),
    _one("engine", "Effective sample size", "share of tokens", "mismatch/ess_frac"),
    _one("engine", "Time of a weight sync", "seconds", "time/sync_s"),
    _one("engine", "Copied by a weight sync", "bytes", "sync/num_bytes"),
    _one("engine", "Probe after a sync, trainer minus engine", "nats, mean size", "sync/probe_diff_abs_mean"),
)


def series_of(history: History, metric: str) -> Series:
    """`train/NAME` or `eval/NAME` over the run; `SILENT`, groups whose rewards are all equal, is computed."""
    if metric == SILENT:
        silent, groups = history.series("train", "num_groups_zero_signal"), history.series("train", "num_groups")
        if len(silent) != len(groups):
            return Series(np.empty(0), np.empty(0))
        return Series(silent.steps, silent.values / np.maximum(groups.values, 1))
    return history.series(*metric.split("/", 1))


def bounds_of(history: History, metric: str) -> tuple[FloatArray, FloatArray] | None:
    """The recorded 95% interval of a metric at its steps; of the training reward, mean ± standard deviation."""
    values = series_of(history, metric).values
    if metric == "train/reward_mean":
        std = history.series("train", "reward_std").values
        return (values - std, values + std) if len(std) == len(values) else None
    low, high = (series_of(history, f"{metric}_{end}").values for end in ("low", "high"))
    return (low, high) if len(low) == len(high) == len(values) else None


def smooth(values: FloatArray) -> FloatArray:
    """The values, or for a long run their running mean over a fortieth of the run (fewer at the ends): [R] -> [R]."""
    if len(values) < LONG_RUN:
        return values
    window = np.ones(len(values) // 40)
    return np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
