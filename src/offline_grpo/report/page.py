"""Writes `report.html`: a page about one run, or about many, that needs no other file and no network.

Whatever comes from a run reaches the page as JSON, and `assets/page.js` puts it in place as plain text. So nothing in a
run can act.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from offline_grpo.disk import utf8, write_whole
from offline_grpo.report.configurations import Configuration, configurations, short_overrides
from offline_grpo.report.findings import LEAST_ITERATIONS, find, shared
from offline_grpo.report.history import History, count
from offline_grpo.report.page_data import WRONG_FILE, PageRun, all_curves, all_parts, finite, load_runs, paired
from offline_grpo.report.page_samples import samples_of, solved, solved_by_configuration, solved_over_time
from offline_grpo.report.run_files import about
from offline_grpo.report.summary import duration, with_interval
from offline_grpo.report.sweep import ALIKE, CONFIGURATION_COLUMNS, RUN_COLUMNS, configuration_rows, result_cells

SHARE, NATS, DIFFERENCE, RATE = "share of completions", "nats per token", "nats, mean size", "tokens per second"
CHARTS = {
    "learning": {
        "train/reward_mean": ("Training reward", "reward"),
        "train/success_rate": ("Right answers in training", SHARE),
        "train/num_groups_trained": ("Groups with signal", "groups"),
        "train/completion_tokens_mean": ("Completion length", "tokens"),
        "train/truncated_frac": ("Cut off at the token limit", SHARE),
        "train/entropy": ("Entropy of the policy", NATS),
        "train/kl_divergence": ("KL divergence from the reference", NATS),
        "train/clip_frac": ("Clipped tokens", "share of tokens"),
        "train/scoring/num_failed": ("Scores that failed", "completions"),
        "train/grad_norm": ("Gradient norm before clipping", "L2 norm"),
    },
    "speed": {
        "train/perf/generate_tokens_per_s": ("Sampling", RATE),
        "train/perf/train_tokens_per_s": ("Training", RATE),
        "train/time/rollouts_wait_s": ("Waiting for samples", "seconds"),
        "train/time/scoring_wait_s": ("Waiting for scores", "seconds"),
    },
    "engine": {
        "train/alignment/diff_abs_mean": ("Logprobs, trainer minus engine", DIFFERENCE),
        "train/mismatch/ess_frac": ("Effective sample size", "share of tokens"),
        "train/time/sync_s": ("Time of a weight sync", "seconds"),
        "train/sync/num_bytes": ("Copied by a weight sync", "bytes"),
        "train/sync/probe_diff_abs_mean": ("Probe after a sync, trainer minus engine", DIFFERENCE),
    },
}
"""Section -> metric -> title and unit."""
MAX_COLUMNS = 24  # of settings
MAX_TASKS = 12  # of a mixture, with a curve and a line of results each
MAX_NAMED = 12  # runs that a finding lists


def save_page(paths: Sequence[Path], out: Path) -> Path:
    """Write the page about runs, and about the runs of sweeps, to `out` and return that.

    Raises:
        ConfigError: a path has no run.
    """
    damaged: list[str] = []
    runs = load_runs(paths, damaged)
    title = "/".join(paths[0].resolve().parts[-2:]) if len(paths) == 1 else f"{len(paths)} folders"
    write_whole(out, page(content(runs, title, damaged)))
    return out


def page(data: dict[str, Any]) -> str:
    """The page as HTML."""
    assets = files("offline_grpo.report") / "assets"
    return Template((assets / "page.html").read_text()).substitute(
        title=html.escape(utf8(data["title"])),
        css=(assets / "page.css").read_text(),
        js="".join((assets / name).read_text() for name in ("charts.js", "names.js", "page.js")),
        plotly=_plotly(),
        data=json.dumps(_without_nan(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


@cache
def _plotly() -> str:
    """The library that draws, 4.8 MB, packed to 1.9 MB."""
    code = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(code, 6, mtime=0)).decode()


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity; null takes their place."""
    if isinstance(value, dict):
        return {str(key): _without_nan(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def content(runs: Mapping[str, PageRun], title: str, damaged: list[str]) -> dict[str, Any]:
    """All that the page says."""
    found = configurations([run.result for run in runs.values()])
    names = [", ".join(f"{key}={value}" for key, value in short.items()) or ALIKE for short in short_overrides(found)]
    groups = list(zip(names, found, strict=True))
    ks = sorted({k for run in runs.values() for k in run.history.eval_ks()})
    held_out = {f"eval/pass@{k}": (f"Held-out pass@{k}", "share of problems") for k in sorted({*ks[:1], *ks[-1:]})}
    tasks = sorted({task for run in runs.values() for task in run.history.held_out_tasks()})[:MAX_TASKS]
    held_out |= {f"eval/task/{task}/pass@1": (f"Held-out pass@1 of {task}", "share of problems") for task in tasks}
    known = {name: solved(run.history, damaged) for name, run in runs.items()} if len(groups) > 1 else {}
    results, verdict = _of_many(groups) if len(runs) > 1 else _of_one(next(iter(runs.values())).history)
    return {
        "title": title,
        "about": _about(runs),
        "verdict": verdict,
        "num_runs": len(runs),
        "groups": [{"name": name, "num_runs": len(group.runs)} for name, group in groups],
        "results": results,
        "findings": _findings(runs),
        "not_judged": _not_judged(runs),
        "curves": all_curves(found, runs),
        "parts": all_parts(found, runs),
        "charts": CHARTS | {"learning": held_out | CHARTS["learning"]},
        "paired": paired(groups, runs, known),
        "problems": solved_by_configuration(groups, known)
        if len(runs) > 1
        else solved_over_time(next(iter(runs.values())).history.run_dir, damaged),
        "settings": _settings(runs) if len(runs) > 1 else None,
        "samples": samples_of({name: run.history.run_dir for name, run in runs.items()}, damaged),
        "damaged": damaged,  # by all of the above
    }


def _findings(runs: Mapping[str, PageRun]) -> list[dict[str, str]]:
    """Each once, with the runs that it holds for where there are several."""
    found = []
    for each, names in shared({name: find(run.history) for name, run in runs.items()}):
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        where = f"{len(names)} of {len(runs)} runs ({', '.join(names[:MAX_NAMED])}{more})"
        if len(names) == 1:
            where = f"run {names[0]}" if len(runs) > 1 else ""
        elif len(names) == len(runs):
            where = f"all {len(runs)} runs"
        metric = f"{'eval' if '@' in each.metric else 'train'}/{each.metric}"
        found.append({"where": where, "text": each.observation, "advice": each.advice, "metric": metric})
    return found


def _not_judged(runs: Mapping[str, PageRun]) -> str:
    """A sentence about runs that are too short for findings; empty where there is none."""
    short = sum(len(run.history.train) < LEAST_ITERATIONS for run in runs.values())
    if not short:
        return ""
    which = "The run has" if len(runs) == 1 else f"{short} of {len(runs)} runs {'has' if short == 1 else 'have'}"
    return f"{which} fewer than {LEAST_ITERATIONS} iterations, in which noise looks like a trend, so nothing is pointed out."


def _about(runs: Mapping[str, PageRun]) -> str:
    took = duration(60 * sum(run.result.minutes or 0.0 for run in runs.values()))
    if len(runs) > 1:
        return f"{count(len(runs), 'run')}, {took} in all"
    [run] = runs.values()
    try:
        what = about(run.history.run_dir)
    except WRONG_FILE:  # said already
        what = ""
    return ", ".join(filter(None, [what, run.history.size, took, "" if run.result.is_done else run.result.status]))


def _of_many(groups: Sequence[tuple[str, Configuration]]) -> tuple[dict[str, Any], str]:
    """Table and verdict of several runs."""
    cells = configuration_rows([group for _, group in groups])
    rows = [[name, *row[1:]] for (name, _), row in zip(groups, cells, strict=True)]
    scores = [
        (group.pass_at_1, row) for (_, group), row in zip(groups, rows, strict=True) if group.pass_at_1 is not None
    ]
    measured = [row for _, row in sorted(scores, key=lambda each: -each[0])]
    if not measured:
        verdict = "No run has evaluated held-out problems."
    else:
        ends = [
            f"the highest is {measured[0][2]}, of {measured[0][0]}",
            f"the lowest {measured[-1][2]}, of {measured[-1][0]}",
        ]
        verdict = f"pass@1 on held-out problems at the end: {', '.join(ends[: len(measured)])}."
    return {"columns": CONFIGURATION_COLUMNS, "rows": rows}, verdict


def _of_one(history: History) -> tuple[dict[str, Any], str]:
    """Table and verdict of a run."""
    keys = [("eval", f"pass@{k}", f"pass@{k} on held-out problems") for k in history.eval_ks()]
    keys += [("eval", f"task/{task}/pass@1", f"pass@1 of {task}") for task in history.held_out_tasks()[:MAX_TASKS]]
    keys += [("train", "reward_mean", "Training reward"), ("train", "success_rate", "Right answers in training")]
    rows, verdict = [], "There are no results yet."
    for phase, key, label in reversed(keys):
        values, low, high = (finite(history.series(phase, f"{key}{end}")) for end in ("", "_low", "_high"))
        if len(values):
            best, (first, last) = (
                int(values.values.argmax()),
                (with_interval(values, low, high, index) for index in (0, -1)),
            )
            rows.insert(
                0, [label, first, last, f"{values.values[best]:.3f}", f"{values.steps[best] + (phase == 'train'):.0f}"]
            )
            at_start, at_end = f"{values.values[0]:.3f}", f"{values.values[-1]:.3f}"
            verdict = f"{label} went from {first} to {last}."
            if len(values) == 1:
                verdict = f"{label}: {last}, measured once."
            elif at_start == at_end:
                verdict = f"{label} stayed at {last}."
            elif phase == "eval" and len(low) == len(high) == len(values):
                rose, fell = low.values[-1] > high.values[0], high.values[-1] < low.values[0]
                verdict = verdict.replace("went", "rose" if rose else "fell" if fell else "went")
                verdict += "" if rose or fell else " The intervals overlap, so this may be chance."
    return {"columns": ["", "first [95%]", "last [95%]", "highest", "in iteration"], "rows": rows}, verdict


def _settings(runs: Mapping[str, PageRun]) -> dict[str, Any]:
    """A row for each run, and a column for each setting that differs."""
    keys = dict.fromkeys(key for run in runs.values() for key in run.settings)
    differ = [key for key in keys if len({run.settings.get(key) for run in runs.values()}) > 1]
    shown = differ[:MAX_COLUMNS]
    rows = [
        [name, *(run.settings.get(key, "") for key in shown), *result_cells(run.result)] for name, run in runs.items()
    ]
    return {"columns": ["run", *shown, *RUN_COLUMNS], "rows": rows, "left_out": differ[MAX_COLUMNS:]}
