"""`placement.trainer=ray`: the processes of one run in a Ray cluster, of two things on this machine that Ray takes for
machines.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from children import SMALL, assert_alike, printed, run_command, run_in_child
from engines import processes_naming
from ray_machines import machines
from waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "run_grpo.py"
LONG = "train.iterations=1000"
STEADY = (LONG, "train.schedule=constant", "eval.enabled=false")
"""Of any length, the first iterations are the same."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with machines(2) as found:
        yield found


def start(cluster: Any, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """The command as a user types it, with two processes."""
    on_ray = ("placement=ray", f"placement.address={cluster.address}", "placement.trainer=ray")
    words = [
        *SMALL,
        *on_ray,
        "placement.num_trainers=2",
        f"cache_dir={folder.parent}/cache",
        f"hydra.run.dir={folder}",
        *overrides,
    ]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, SCRIPT, *words], cwd=folder.parent, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes
    )


def wait_for_iterations(folder: Path) -> None:
    wait_until(lambda: len(list((folder / "metrics").glob("train_*"))) >= 2)


@pytest.mark.slow
def test_they_train_as_one_does_also_when_a_ctrl_c_stops_them_and_the_printed_line_goes_on(
    cluster: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = start(cluster, folder, *STEADY)
    wait_for_iterations(folder)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, out + err
    assert [line for line in out.splitlines() if line.startswith("run folder:")] == [f"run folder: {folder}"]
    assert err.startswith("Ctrl-C: stopping after the training processes have saved;")
    [line] = [line for line in out.splitlines() if "go on with: " in line]
    assert line.endswith(f"run_grpo.py resume={folder.relative_to(tmp_path)}")
    assert not processes_naming(str(tmp_path))
    num_done = len(list((folder / "metrics").glob("train_*")))
    again = subprocess.run(
        [sys.executable, SCRIPT, f"resume={folder}", f"train.iterations={num_done + 1}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"going on after iteration {num_done} of {num_done + 1}" in again.stdout
    assert not processes_naming(str(tmp_path))
    alone, words = tmp_path / "alone", (*SMALL, *STEADY, f"train.iterations={num_done + 1}")
    assert run_in_child(alone, *words, f"cache_dir={tmp_path}/cache") == 0, printed(alone)
    assert_alike(folder, alone)


@pytest.mark.slow
def test_whatever_dies_nothing_is_left_running(cluster: Any, tmp_path: Path) -> None:
    """A training process, the command itself, and a machine with one of the processes."""
    folder = tmp_path / "process"
    run = start(cluster, folder, LONG)
    wait_for_iterations(folder)
    processes = [psutil.Process(pid) for pid in processes_naming(f"cache_dir={tmp_path}/cache")]
    [other] = [process for process in processes if process.environ().get("RANK") == "1"]
    began = time.monotonic()
    other.kill()
    out, err = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "another process of the run has ended" in out + err
    assert time.monotonic() - began < 30
    assert not processes_naming(str(tmp_path))

    folder = tmp_path / "command"
    run = start(cluster, folder, LONG)
    wait_for_iterations(folder)
    run.kill()
    run.wait()
    wait_until(lambda: not processes_naming(str(tmp_path)), seconds=30)

    folder = tmp_path / "machine"
    run = start(cluster, folder, LONG)
    wait_for_iterations(folder)
    cluster.remove_node(cluster.machines.pop(), allow_graceful=False)
    out, err = run.communicate(timeout=60)
    cluster.machines.append(cluster.add_node(num_cpus=1))
    assert run.returncode == 1
    assert err.splitlines()[-1].startswith("error: the machine of training process ")
    wait_until(lambda: not processes_naming(str(tmp_path)), seconds=30)


REFUSED = {
    "placement=ray placement.trainer=ray placement.address=local": "placement.address=local: would end with this",
    "placement=ray placement.trainer=ray --multirun seed=1,2": "placement.trainer=ray: starts the processes of one run",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_do_is_refused(words: str, tmp_path: Path) -> None:
    done = run_command(tmp_path, SCRIPT, *words.split())
    assert done.returncode == 2
    assert REFUSED[words] in done.stderr
