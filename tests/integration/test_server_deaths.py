"""Whole runs beside a vLLM server that is killed, and runs that are killed beside one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from engines import kill_engine, preloaded_python, processes_naming, save_model, stall, writers
from runs import assert_same, at, five, metrics_of, own_server, printed, run, start_in_child, wait_until

ITERATIONS = 3
"""Those that the victim finishes."""
DEATHS = (("generate", 1), ("sync", 2))
"""Phase and iteration at whose beginning its engine is killed: before it samples, and before a push."""
STALLS = (("generate", 0), ("sync", 1))
"""At whose beginning its server stands still for longer than it keeps idle connections: before it samples, and before
it is paused, told its version and proven."""
STALL_S = 7.0

pytestmark = pytest.mark.slow  # four starts of a server


@dataclass(frozen=True)
class Victim:
    """A run under `shared_vllm` that stands still in its fourth iteration: its updates are in the server's memory, and
    the server waits for the push. Before, its engine was killed."""

    process: BaseProcess
    folder: Path
    model: Path
    leftovers: frozenset[str]
    """What others had left in shared memory before."""

    @property
    def base_url(self) -> str:
        """Of its last server."""
        command = (self.folder / f"server_{len(DEATHS)}.log").read_text().splitlines()[0]
        [port] = re.findall(r"--port[ =](\d+)", command)
        return f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("deaths")
    model, leftovers = save_model(folder / "model"), frozenset(ownerless())
    mishaps = {
        **{moment: partial(kill_engine, folder / "run") for moment in DEATHS},
        **{moment: partial(stall, folder / "run", STALL_S) for moment in STALLS},
        ("sync", ITERATIONS): partial(signal.raise_signal, signal.SIGSTOP),
    }
    server = (*own_server(preloaded_python(folder)), "weight_sync=shared_vllm", "engine.api_key=ours")
    process = start_in_child(folder / "run", *five(model), *server, mishaps=mishaps)
    try:
        assert process.pid is not None
        wait_until(lambda: is_stopped(process, folder / "run"), 900)
        yield Victim(process, folder / "run", model, leftovers)
    finally:
        process.kill()
        process.join()


def test_a_server_that_dies_is_started_again(victim: Victim, tmp_path: Path) -> None:
    """The run goes on to the same result as one that nothing happened to, and counts the deaths. One that only stood
    still is waited for.
    """
    disturbed = metrics_of(victim.folder)
    assert disturbed.keys() == {"eval_init.json", *(f"train_iter_{i:03d}.json" for i in range(ITERATIONS))}
    recoveries = [disturbed[f"train_iter_{i:03d}.json"]["sync/num_recoveries"] for i in range(ITERATIONS)]
    assert recoveries == [sum(death <= i for _, death in DEATHS) for i in range(ITERATIONS)]
    assert all(disturbed[f"train_iter_{i:03d}.json"]["alignment/diff_abs_mean"] < 1e-4 for i in range(ITERATIONS))
    assert (victim.folder / "run.log").read_text().count("Serving the weights again") == len(DEATHS)
    undisturbed = run(
        tmp_path / "undisturbed", victim.model, *at(victim.base_url), "generation.api_key=ours", "weight_sync=reload"
    )
    assert_same(disturbed, {name: undisturbed[name] for name in disturbed})
    assert len({undisturbed[f"train_iter_{i:03d}.json"]["reward_mean"] for i in range(ITERATIONS)}) > 1


def test_a_killed_trainer_leaves_nothing(victim: Victim) -> None:
    """SIGKILL in the middle of a push: no process and no shared memory outlives it."""
    servers = processes_naming(str(victim.model))
    assert servers
    assert writers(victim.folder / f"server_{len(DEATHS)}.log")
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"offline-grpo-{victim.process.pid}-")]
    victim.process.kill()
    victim.process.join()
    assert_nothing_left(victim.folder, victim.model, victim.leftovers)


def is_stopped(process: BaseProcess, folder: Path) -> bool:
    assert process.is_alive(), printed(folder)
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def assert_nothing_left(folder: Path, model: Path, leftovers: frozenset[str]) -> None:
    """`folder` is the run's."""

    def is_so() -> bool:
        servers = (
            *processes_naming(str(model)),
            *(process for log in folder.glob("server_*.log") for process in writers(log)),
        )
        return set(ownerless()) <= leftovers and not servers

    wait_until(is_so, 60)


def ownerless() -> list[str]:
    """Folders in shared memory whose run has ended: their names carry its pid."""
    ours = [name for name in os.listdir("/dev/shm") if name.startswith("offline-grpo-")]
    return [name for name in ours if not psutil.pid_exists(int(name.split("-")[2]))]
