"""Folders in shared memory: those in use stay, whatever they are named, and the next run deletes the others."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offline_grpo.disk import remove_left_behind
from offline_grpo.engine import spawn
from offline_grpo.engine.spawn import PREFIX, Scratch

HOLDER = """
import time
from offline_grpo.engine.spawn import Scratch
kept = Scratch()
(kept.path / "weights").write_bytes(b"x")
print(kept.path, flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared memory of these tests."""
    monkeypatch.setattr(spawn, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def holder(memory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another run, which has a folder there."""
    code = "import pathlib\nfrom offline_grpo.engine import spawn\n"
    code += f"spawn.SHARED_MEMORY = pathlib.Path({str(memory)!r})\n{HOLDER}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def folder_of(holder: subprocess.Popen[str]) -> Path:
    assert holder.stdout is not None
    return Path(holder.stdout.readline().strip())


def test_what_a_killed_run_left_goes_with_the_next(holder: subprocess.Popen[str]) -> None:
    path = folder_of(holder)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (path / "weights").exists()
    own = Scratch()
    assert not path.exists()
    own.remove()


def test_what_is_in_use_stays(holder: subprocess.Popen[str], memory: Path) -> None:
    """Whatever process id its name has: that of a run in a container is nobody's here."""
    path = folder_of(holder)
    elsewhere = path.rename(memory / "offline-grpo-99999999-abc")
    own = Scratch()
    another = Scratch()
    assert (elsewhere / "weights").exists()
    assert own.path.exists()
    remove_left_behind(memory, PREFIX)
    assert {elsewhere, own.path, another.path} == set(memory.iterdir())
    own.remove()
    another.remove()
