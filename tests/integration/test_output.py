"""What a command does when nobody reads its output, or when it cannot be written."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from children import SMALL, start_command
from factories import compose_config

from offline_grpo.run import app
from offline_grpo.run.config import as_plain, typed

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def in_shell(folder: Path, line: str) -> tuple[int, str]:
    """Exit code and stderr of a line in which `grpo` is run_grpo.py, and `module` is python -m."""
    python, script = shlex.quote(sys.executable), shlex.quote(str(ROOT / "run_grpo.py"))
    functions = f'grpo() {{ {python} {script} "$@"; }}; module() {{ {python} -m "$@"; }}; '
    done = subprocess.run(
        ["bash", "-c", functions + line], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_a_run_saves_and_stops_when_its_reader_ends(cache: str, tmp_path: Path) -> None:
    words = (cache, *SMALL, "train.iterations=500", "eval.enabled=false", "hydra.run.dir=run")
    os.mkfifo(tmp_path / "out")
    process = start_command(tmp_path, ROOT / "run_grpo.py", *words, outputs=tmp_path)
    with (tmp_path / "out").open() as output:
        while "reward" not in output.readline():
            assert process.is_alive()
    process.join(60)
    assert process.exitcode == 143
    assert list((tmp_path / "run" / "checkpoints").glob("iter_*"))
    log = (tmp_path / "run" / "run.log").read_text()
    assert "the program that read the output has ended" in log
    assert "stopped by SIGTERM; go on with:" in log


def test_a_command_without_output_does_its_work(tmp_path: Path) -> None:
    assert in_shell(tmp_path, "grpo --cfg job >&-") == (0, "")
    assert in_shell(tmp_path, "grpo train.lr=0 2>&-") == (2, "")


@pytest.mark.slow  # eight commands in interpreters of their own
def test_commands_end_as_programs_do_whose_reader_has_ended(cache: str, tmp_path: Path) -> None:
    app.run(compose_config(cache, *SMALL, "train.iterations=1"), tmp_path / "run")
    lines = ("offline_grpo.report run", "offline_grpo.rollouts show run")
    for line in (*lines, "offline_grpo --help", "offline_grpo.check", "offline_grpo.model_info run"):
        told = "offline-grpo: loading ...\n" if "model_info" in line else ""
        assert in_shell(tmp_path, f"module {line} | true; exit ${{PIPESTATUS[0]}}") == (141, told), line
    for line in lines:
        message = "error: the output: cannot be read or written (No space left on device)\n"
        code, err = in_shell(tmp_path, f"module {line} > /dev/full")
        assert (code in (1, 120), err.startswith(message)) == (True, True), line


def test_a_run_without_clipping_saves_and_goes_on(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity is no number of JSON."""
    monkeypatch.chdir(tmp_path)
    app.run(compose_config(cache, *SMALL, "train.iterations=1", "train.grad_clip=inf"), tmp_path / "run")
    app.run(
        compose_config(cache, *SMALL, "train.iterations=1", "train.grad_clip=inf", "resume=run"), tmp_path / "again"
    )
    assert as_plain(compose_config("train.grad_clip=inf"))["train"]["grad_clip"] == "inf"
    assert typed(compose_config("train.grad_clip='inf'")).train.grad_clip == float("inf")
    assert "finished" in (tmp_path / "run" / "run.log").read_text()
