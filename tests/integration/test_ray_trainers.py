"""`placement.trainer=ray`: the processes of one run in a Ray cluster, of two things on this machine that Ray takes for
machines.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import preloaded_python, processes_naming
from runs import SMALL, assert_alike, printed, run_command, run_in_child, start_command, wait_until

SCRIPT = Path(__file__).parents[2] / "run_grpo.py"
STEADY = ("train.iterations=1000", "train.schedule=constant", "eval.enabled=false")
"""Of any length, the first iterations are the same."""


@dataclass(frozen=True)
class Command:
    process: BaseProcess
    outputs: Path

    def end(self) -> tuple[int | None, str, str]:
        """Its exit code and what it printed to its end, which comes by itself."""
        self.process.join(60)
        out, err = ((self.outputs / name).read_text() for name in ("out", "err"))
        return self.process.exitcode, out, err


def trained(folder: Path) -> set[tuple[str, int]]:
    """The iterations, and when they were."""
    try:
        return {(path.name, path.stat().st_mtime_ns) for path in folder.glob("metrics/train_*")}
    except FileNotFoundError:  # a run that is resumed takes those off that its checkpoint does not know
        return set()


@contextmanager
def started(folder: Path, name: str, *words: str) -> Iterator[Command]:
    """The command as a user types it, once it has trained for two iterations; nothing of it is left at the end."""
    before, outputs = trained(folder), folder.parent / name
    outputs.mkdir()
    python = preloaded_python(outputs)
    command = Command(start_command(folder.parent, SCRIPT, *words, outputs=outputs, python=python), outputs)
    try:
        wait_until(lambda: len(trained(folder) - before) >= 2, told=lambda: (outputs / "err").read_text())
        below = processes_naming(str(folder.parent))  # one that dies has no name any more, and its lock still
        yield command
    finally:
        command.process.kill()
        command.process.join()
    wait_until(lambda: not processes_naming(str(folder.parent)) and not any(map(psutil.pid_exists, below)), seconds=30)


@pytest.mark.slow
def test_they_train_as_one_does_whatever_dies_and_nothing_is_left_running(
    cluster: Any, cache: str, tmp_path: Path
) -> None:
    """The command itself, a machine with one of the processes, and a Ctrl-C: each start resumes."""
    folder = tmp_path / "run"
    on_ray = ("placement=ray", f"placement.address={cluster.address}", "placement.trainer=ray")
    own = (*SMALL, *STEADY, *on_ray, "placement.num_trainers=2", cache, f"hydra.run.dir={folder}")

    with started(folder, "command", *own) as command:
        command.process.kill()

    with started(folder, "machine", f"resume={folder}") as command:
        cluster.remove_node(cluster.machines.pop(), allow_graceful=False)
        code, out, err = command.end()
        assert code == 1, out + err
        assert err.splitlines()[-1].startswith("error: the machine of training process ")
    cluster.machines.append(cluster.add_node(num_cpus=1))

    with started(folder, "ctrl_c", f"resume={folder}") as command:
        assert command.process.pid is not None
        os.kill(command.process.pid, signal.SIGINT)
        code, out, err = command.end()
        assert code == 130, out + err
    assert [line for line in out.splitlines() if line.startswith("run folder:")] == [f"run folder: {folder}"]
    assert "going on after iteration " in out
    assert err.startswith("Ctrl-C: stopping after the training processes have saved;")
    [line] = [line for line in out.splitlines() if "go on with: " in line]
    assert line.endswith(f"run_grpo.py resume={folder.relative_to(tmp_path)}")

    alone, words = tmp_path / "alone", (*SMALL, *STEADY, f"train.iterations={len(trained(folder))}")
    assert run_in_child(alone, *words, cache) == 0, printed(alone)
    assert_alike(folder, alone)


REFUSED = {
    "placement=ray placement.trainer=ray placement.address=local": "placement.address=local: would end with this",
    "placement=ray placement.trainer=ray --multirun seed=1,2": "placement.trainer=ray: starts the processes of one run",
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.slow
def test_what_it_cannot_do_is_refused(words: str, tmp_path: Path) -> None:
    done = run_command(tmp_path, SCRIPT, *words.split())
    assert done.returncode == 2
    assert REFUSED[words] in done.stderr
