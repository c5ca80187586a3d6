"""The table at the end of a run: results, time and output folder."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from offline_grpo.report.history import History, Series


def print_summary(history: History, console: Console) -> None:
    """Print `summary_table`, unless the run recorded no metrics."""
    if history.train or history.evals:
        console.print(summary_table(history))


def summary_table(history: History) -> Table:
    """Evaluations (before, after, best), reward (first, last), time per phase, and the folder."""
    table = Table(title=history.size, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for k in history.eval_ks():
        table.add_row(f"pass@{k}", _evaluations(history, f"pass@{k}"))
    reward = history.series("train", "reward_mean")
    if len(reward):
        table.add_row("reward", f"first {reward.values[0]:.3f}   last {reward.values[-1]:.3f}")
    _, seconds = history.phase_seconds()
    total_s = sum(float(values.sum()) for values in seconds.values())
    if total_s > 0:
        shares = "   ".join(f"{phase} {values.sum() / total_s:.0%}" for phase, values in seconds.items())
        table.add_row("time", f"{total_s / 60:.1f} min   {shares}")
    table.add_row("files", str(history.run_dir))
    return table


def _evaluations(history: History, key: str) -> str:
    """`before 0.20 [..]   after 0.50 [..]   best 0.52 [..] after iteration 8`, with 95 % intervals."""
    values = history.series("eval", key)
    low, high = history.series("eval", f"{key}_low"), history.series("eval", f"{key}_high")
    best = int(values.values.argmax())
    when = f"after iteration {values.steps[best]:.0f}" if values.steps[best] > 0 else "before training"
    parts = [f"best {_with_interval(values, low, high, best)} {when}"]
    if values.steps[-1] > 0:
        parts.insert(0, f"after {_with_interval(values, low, high, len(values) - 1)}")
    if values.steps[0] == 0:
        parts.insert(0, f"before {_with_interval(values, low, high, 0)}")
    return "   ".join(parts)


def _with_interval(values: Series, low: Series, high: Series, index: int) -> str:
    if not len(values) == len(low) == len(high):
        return f"{values.values[index]:.3f}"
    return f"{values.values[index]:.3f} \\[{low.values[index]:.3f}, {high.values[index]:.3f}]"  # \[ is not parsed as markup
