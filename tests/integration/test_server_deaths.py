"""Whole runs beside a vLLM server that is killed, and runs that are killed beside one."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from engines import kill_engine, preloaded_python, processes_naming, save_model, stall, writers
from runs import assert_same, at, five, metrics_of, own_server, printed, run, start_in_child, wait_until

ITERATIONS, ALL = 3, ("train.iterations=4", "eval.interval=4")
"""Those that the victim finishes, and those that it would."""
DEATHS = (("generate", 1), ("sync", 2))
"""Phase and iteration at whose beginning its engine is killed: before it samples, and before a push."""
STALLS = (("generate", 0), ("sync", 1))
"""At whose beginning its server stands still for longer than it keeps idle connections: before it samples, and before
it is paused, told its version and proven."""
STALL_S, KEEP_ALIVE_S = 2.5, 1


@pytest.mark.slow  # three starts of a server
def test_a_run_goes_on_whatever_its_server_does_and_leaves_nothing_when_it_is_killed(tmp_path: Path) -> None:
    """Under `shared_vllm` its engine dies twice, and its server stands still twice. The run goes on to the result of
    one that nothing happened to, and counts the deaths; it waits for one that only stood still. In its fourth iteration
    it stops in the middle of a push: its updates are in the server's memory. SIGKILL then leaves no process and no
    shared memory.
    """
    folder, leftovers = tmp_path / "run", set(ownerless())
    model = save_model(tmp_path / "model")
    mishaps = {
        **{moment: partial(kill_engine, folder) for moment in DEATHS},
        **{moment: partial(stall, folder, STALL_S) for moment in STALLS},
        ("sync", ITERATIONS): partial(signal.raise_signal, signal.SIGSTOP),
    }
    server = (*own_server(preloaded_python(tmp_path)), "weight_sync=shared_vllm", "engine.api_key=ours")
    server += (f'+engine.env.VLLM_HTTP_TIMEOUT_KEEP_ALIVE="{KEEP_ALIVE_S}"',)
    process = start_in_child(folder, *five(model), *ALL, *server, mishaps=mishaps)
    try:
        wait_until(lambda: is_stopped(process, folder), 900)
        disturbed = metrics_of(folder)
        trained = [disturbed[f"train_iter_{i:03d}.json"] for i in range(ITERATIONS)]
        assert len(disturbed) == 1 + ITERATIONS  # the first evaluation
        recoveries = [sum(death <= i for _, death in DEATHS) for i in range(ITERATIONS)]
        assert [metrics["sync/num_recoveries"] for metrics in trained] == recoveries
        assert all(metrics["alignment/diff_abs_mean"] < 1e-4 for metrics in trained)
        assert (folder / "run.log").read_text().count("Serving the weights again") == len(DEATHS)

        # beside its last server, which serves whoever asks
        last = folder / f"server_{len(DEATHS)}.log"
        [port] = re.findall(r"--port[ =](\d+)", last.read_text().splitlines()[0])
        beside = (*at(f"http://127.0.0.1:{port}"), "generation.api_key=ours", "weight_sync=reload")
        undisturbed = run(tmp_path / "undisturbed", model, *ALL, *beside)
        assert_same(disturbed, {name: undisturbed[name] for name in disturbed})
        assert len({undisturbed[f"train_iter_{i:03d}.json"]["reward_mean"] for i in range(ITERATIONS)}) > 1

        assert processes_naming(str(model))
        assert writers(last)
        assert [name for name in os.listdir("/dev/shm") if name.startswith(f"offline-grpo-{process.pid}-")]
    finally:
        process.kill()
        process.join()
    logs = [*folder.glob("server_*.log")]
    wait_until(lambda: not processes_naming(str(model)) and not any(map(writers, logs)), 60)
    wait_until(lambda: set(ownerless()) <= leftovers, 60)


def is_stopped(process: BaseProcess, folder: Path) -> bool:
    assert process.is_alive(), printed(folder)
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def ownerless() -> list[str]:
    """Folders in shared memory whose run has ended: their names carry its pid."""
    ours = [name for name in os.listdir("/dev/shm") if name.startswith("offline-grpo-")]
    return [name for name in ours if not psutil.pid_exists(int(name.split("-")[2]))]
