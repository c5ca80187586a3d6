"""A server that is forked from a process which has vLLM is like one that is started, as far as the tests rely on it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from engines import CPU, engine, preloaded_python

PROGRAM = """
import os, subprocess, sys, tempfile, time
child = subprocess.Popen(["sleep", "1000"])
seen = "vllm" in sys.modules, os.environ["MINE"], os.getcwd(), tempfile.gettempdir()
print(os.getpid(), child.pid, *seen, *sys.argv[1:])
"""
Start = Callable[..., tuple[subprocess.Popen[str], list[int], list[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a module that has a child, says what it sees, and goes on with `last`. Returns also the ids of both and the
    words.
    """
    started: list[subprocess.Popen[str]] = []

    def start(last: str, **env: str) -> tuple[subprocess.Popen[str], list[int], list[str]]:
        (tmp_path / "a_program.py").write_text(PROGRAM + last)
        variables = engine(CPU).environment({"MINE": "yes", "TMPDIR": str(tmp_path), **env}, None)
        variables["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
        command = [preloaded_python(tmp_path), "-m", "a_program", "first", "second"]
        process = subprocess.Popen(
            command, env=variables, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        assert process.stdout is not None
        words = process.stdout.readline().split()
        return process, [int(word) for word in words[:2] if word.isdigit()], words[2:]

    yield start
    for process in started:
        process.kill()
        process.wait()


def have_ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + 15
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(psutil.pid_exists, pids))


def test_it_has_vllm_and_all_that_its_command_was_given(start: Start, tmp_path: Path) -> None:
    process, family, words = start("sys.exit(3)")
    assert words == ["True", "yes", str(tmp_path), str(tmp_path), "first", "second"]
    assert process.wait(15) == 3
    assert have_ended(family)


@pytest.mark.parametrize(
    ("last", "number", "code"),
    [
        ("time.sleep(1000)", signal.SIGTERM, -signal.SIGTERM),
        ("os.kill(os.getpid(), 9)", None, -signal.SIGKILL),
        ("time.sleep(1000)", signal.SIGKILL, -signal.SIGKILL),  # which the program never sees
        ("raise ValueError('so it ends')", None, 1),
    ],
)
def test_both_end_in_the_same_way_and_leave_nothing(last: str, number: int | None, code: int, start: Start) -> None:
    process, family, _ = start(last)
    assert len(family) == 2
    if number is not None:
        process.send_signal(number)
    assert process.wait(15) == code
    assert have_ended(family)
    assert process.stdout is not None
    assert ("ValueError: so it ends" in process.stdout.read()) is (code == 1)


def test_a_variable_that_vllm_has_read_already_is_refused(start: Start) -> None:
    process, family, words = start("", VLLM_SERVER_DEV_MODE="0")
    assert process.wait(15) == 1
    assert not family
    assert words[-2:] == ["{'VLLM_SERVER_DEV_MODE':", "'0'}"]
