"""Launchers and the Optuna sweeper of the extra `sweeps`, which the test group has too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import yaml
from engines import forking_python, preloaded_python, save_model, writers
from runs import (
    drawn,
    five,
    metrics_of,
    own_server,
    run_command,
    run_in_child,
    start_command,
    wait_until,
)

from offline_grpo.history import sweeps

ROOT = Path(__file__).parents[2]
TWO_CORES = ("hydra.launcher.address=local", "+hydra.launcher.ray_init.num_cpus=2")


def multirun(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A sweep of small runs, and its folder."""
    sweep = folder / "sweep"
    return run_command(folder, ROOT / "run_grpo.py", "--multirun", *words, f"hydra.sweep.dir={sweep}"), sweep


def endless(folder: Path, *words: str) -> BaseProcess:
    """A sweep, started, that trains until it is stopped, in the folder `sweep`."""
    words = ("--multirun", "experiment=smoke", *words, "hydra.sweep.dir=sweep")
    words = (*words, "checkpoint.save_interval=1000", "train.iterations=100000", "eval.enabled=false")
    return start_command(folder, ROOT / "run_grpo.py", *words, outputs=folder)


def printed(folder: Path) -> str:
    """By an endless sweep."""
    return (folder / "out").read_text() + (folder / "err").read_text()


def runs(sweep: Path) -> set[str]:
    """The jobs that have trained to the end."""
    return {path.parent.parent.name for path in sweep.glob("*/metrics/train_iter_000.json")}


def are_saved(sweep: Path) -> bool:
    """Whether both jobs that train have saved their last iteration."""
    last = [f"iter_{len(list((sweep / number / 'metrics').glob('train_iter_*.json'))) - 1:03d}" for number in "12"]
    return [path.name for number in "12" for path in (sweep / number / "checkpoints").glob("iter_*")] == last


@pytest.mark.slow
def test_submitit_runs_all_jobs_and_the_exit_code_is_that_of_the_worst(tmp_path: Path) -> None:
    done, sweep = multirun(tmp_path, "hydra/launcher=submitit_local", "experiment=smoke", "train.lr=1e-3,-1")
    assert done.returncode == 2, done.stderr
    assert runs(sweep) == {"0"}
    assert not (sweep / sweeps.FAILED).exists()
    assert "1 configuration, 1 run" in done.stdout


@pytest.mark.slow
def test_a_signal_stops_the_runs_on_a_cluster_where_nothing_is_lost(tmp_path: Path) -> None:
    """Of three jobs: the first is refused, which the sweep has on record, and none of the others for that."""
    words = ("train.lr=-1,1e-3,1e-4", "hydra/launcher=ray", *TWO_CORES, "hydra.launcher.num_cpus=0.5")
    python = f"+hydra.launcher.ray_init.runtime_env.py_executable={preloaded_python(tmp_path)}"
    sweep = endless(tmp_path, *words, python)
    failed = tmp_path / "sweep" / sweeps.FAILED / "0"
    try:
        wait_until(lambda: runs(tmp_path / "sweep") == {"1", "2"}, told=lambda: printed(tmp_path))
        wait_until(lambda: failed.exists() and failed.read_text() == "2", told=lambda: printed(tmp_path))
        assert list(failed.parent.iterdir()) == [failed]
        sweep.terminate()
        sweep.join(120)
    finally:
        sweep.kill()
    assert sweep.exitcode == 128 + signal.SIGTERM, printed(tmp_path)
    # the jobs' last lines may come too late
    line = r"^stopped by SIGTERM; continue the sweep with: .*run_grpo.py resume=sweep$"
    assert re.search(line, printed(tmp_path), re.MULTILINE), printed(tmp_path)
    assert "Traceback" not in printed(tmp_path)
    assert are_saved(tmp_path / "sweep")


@pytest.fixture
def side_by_side(tmp_path: Path) -> Iterator[BaseProcess]:
    """A sweep with joblib, two jobs at a time, of which the first was refused and the next two train without end."""
    words = ("train.lr=-1,1e-3,1e-4,1e-5", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "num_threads=1")
    process = endless(tmp_path, *words)
    try:
        wait_until(lambda: runs(tmp_path / "sweep") == {"1", "2"}, told=lambda: printed(tmp_path))
        yield process
    finally:
        process.terminate()
        process.join()


@pytest.mark.slow
def test_a_ctrl_c_lets_jobs_side_by_side_save(side_by_side: BaseProcess, tmp_path: Path) -> None:
    """Which a terminal sends to all. What jobs print has their numbers before it."""
    assert side_by_side.pid is not None
    os.killpg(side_by_side.pid, signal.SIGINT)
    side_by_side.join(120)
    assert side_by_side.exitcode == 130
    line = r"^stopped by SIGINT; continue the sweep with: uv run run_grpo.py resume=sweep$"
    for expected in (line, r"^\[0\] error in job 0 of the sweep: train.lr=-1.0: ", r"^\[1\] run folder: "):
        assert re.search(expected, printed(tmp_path), re.MULTILINE), printed(tmp_path)
    assert not re.search(r"^run folder: |Traceback|before the run began", printed(tmp_path), re.MULTILINE)
    assert are_saved(tmp_path / "sweep")
    assert not (tmp_path / "sweep" / "3").exists()


@pytest.mark.slow
def test_jobs_side_by_side_save_and_end_when_their_sweep_is_killed(side_by_side: BaseProcess, tmp_path: Path) -> None:
    workers = psutil.Process(side_by_side.pid).children()
    side_by_side.kill()
    assert not psutil.wait_procs(workers, timeout=120)[1]
    assert are_saved(tmp_path / "sweep")
    assert "Traceback" not in printed(tmp_path)


@pytest.mark.parametrize(("launcher", "n_jobs"), [("joblib", 0), ("shared_server", "two")])
def test_no_number_of_jobs_is_refused_before_a_folder_is_made(tmp_path: Path, launcher: str, n_jobs: object) -> None:
    words = f"hydra/launcher={launcher}", f"hydra.launcher.n_jobs={n_jobs}", "seed=0,1"
    done, folder = multirun(tmp_path, "experiment=smoke", *words)
    assert done.returncode == 2
    assert f"error: hydra.launcher.n_jobs={n_jobs}: must be at least 1, or -1 for" in done.stderr
    assert not folder.exists()


@pytest.mark.slow
def test_runs_that_share_a_server_are_what_they_are_alone(tmp_path: Path) -> None:
    """Bit for bit, where the server computes one sequence at a time: it rounds as requests meet in a batch. Beside that
    server, each alone has a base of its own, and together they have the server's. Of four jobs two are refused, the
    first among them, which costs the others nothing.
    """
    words = (*five(save_model(tmp_path / "model")), *own_server(preloaded_python(tmp_path)), "train.iterations=3")
    words = (*words, "+engine.args.max_num_seqs=1", "weight_sync=lora_hotswap", "model/lora=default")
    words = (*words, "data.rollouts_per_problem=2")  # one after the other
    shared = ("hydra/launcher=shared_server", "weight_sync.share_base=true")
    done, sweep = multirun(tmp_path, *words, *shared, "seed=0,1", "train.lr=-1,1e-2")
    assert done.returncode == 2, done.stderr
    assert runs(sweep) == {"2", "3"}
    for seed, number in ((0, "2"), (1, "3")):
        alone = tmp_path / f"alone_{seed}"
        assert run_in_child(alone, *words, f"seed={seed}", "train.lr=1e-2") == 0, (
            tmp_path / f"{alone}.txt"
        ).read_text()
        assert drawn(sweep / number) == drawn(alone)
        assert metrics_of(sweep / number) == metrics_of(alone)
        assert "MiB of the base are the server's memory\n" in (sweep / number / "run.log").read_text()

    # One server, which has forgotten the adapters of runs that ended, and has ended itself.
    log = sweep / "server_0.log"
    assert not [*sweep.glob("*/server_*.log")]
    assert "--max-loras 4" in log.read_text()
    calls = re.findall(r"POST /v1/(load|unload)_lora_adapter HTTP/1.1\" 200", log.read_text())
    assert calls.count("load") == calls.count("unload") == 8
    assert not writers(log)


@pytest.mark.slow
def test_a_shared_server_ends_after_the_runs_of_a_sweep_that_is_killed(tmp_path: Path) -> None:
    words = (*five(save_model(tmp_path / "model")), *own_server(forking_python(tmp_path)), "weight_sync=lora_hotswap")
    words = (*words, "model/lora=default", "checkpoint.enabled=true", "hydra/launcher=shared_server")
    sweep, log = (
        endless(tmp_path, *words, "seed=1,2", "hydra.sweep.subdir=${seed}"),
        tmp_path / "sweep" / "server_0.log",
    )
    try:
        wait_until(lambda: runs(tmp_path / "sweep") == {"1", "2"}, told=lambda: printed(tmp_path))
        assert writers(log)
    finally:
        sweep.kill()
    wait_until(lambda: not writers(log), 120)
    assert are_saved(tmp_path / "sweep")
    assert "Traceback" not in printed(tmp_path)


@pytest.mark.slow
def test_runs_at_a_shared_server_go_on_after_a_kill_and_a_ctrl_c(tmp_path: Path) -> None:
    """One run is killed, which costs itself only; then a Ctrl-C ends the other. The sweep is resumed, with another
    server, and each run goes on from its last checkpoint; then that server dies.
    """
    words = (*five(save_model(tmp_path / "model")), *own_server(preloaded_python(tmp_path)), "weight_sync=lora_hotswap")
    words = (*words, "model/lora=default", "hydra/launcher=shared_server", "hydra.launcher.n_jobs=2", "seed=1,2")
    words = (*words, "hydra.sweep.subdir=${seed}", "checkpoint.enabled=true", "checkpoint.save_interval=1")
    words = ("--multirun", *words, "train.iterations=40", "eval.enabled=false", "hydra.sweep.dir=sweep")
    place, log = tmp_path / "sweep", tmp_path / "sweep" / "server_0.log"

    def wait_for(number: int, iterations: int) -> None:
        path = place / str(number) / "metrics" / f"train_iter_{iterations - 1:03d}.json"
        wait_until(path.exists, told=lambda: printed(tmp_path))

    def goes_on(number: int) -> list[int]:
        text = (place / str(number) / "run.log").read_text()
        return [*map(int, re.findall(r"going on after iteration (\d+) of 40", text))]

    sweep = start_command(tmp_path, ROOT / "run_grpo.py", *words, outputs=tmp_path)
    assert sweep.pid is not None
    try:
        wait_for(1, 2)
        wait_for(2, 1)
        for worker in psutil.Process(sweep.pid).children():
            if any(file.path.startswith(f"{place / '1'}/") for file in worker.open_files()):
                worker.kill()
        line = "error in job 0 of the sweep: the run was killed (signal 9)"
        wait_until(lambda: line in printed(tmp_path), told=lambda: printed(tmp_path))
        os.killpg(sweep.pid, signal.SIGINT)
        sweep.join(120)
        assert sweep.exitcode == 130, printed(tmp_path)
        assert "Traceback" not in printed(tmp_path)
        assert "[1] stopped by SIGINT; resume its sweep, which has the server\n" in printed(tmp_path)
        assert "resume=sweep/" not in printed(tmp_path)
        assert not writers(log)

        # The first goes on after what it had saved; the server is another one, and dies.
        sweep = start_command(tmp_path, ROOT / "run_grpo.py", "resume=sweep", outputs=tmp_path)
        wait_until(lambda: goes_on(1) and goes_on(2), told=lambda: printed(tmp_path))
        assert goes_on(1)[0] >= 1
        wait_for(1, goes_on(1)[0] + 2)
        for process in writers(log):
            process.kill()
        sweep.join(200)
        assert sweep.exitcode == 1, printed(tmp_path)
        assert "Traceback" not in printed(tmp_path)
        assert "\nerror: the server has ended (signal 9)" in printed(tmp_path)
        assert not writers(log)
    finally:
        sweep.kill()


@pytest.mark.slow
def test_optuna_searches_for_the_best_pass_at_1(tmp_path: Path) -> None:
    done, sweep = multirun(tmp_path, "experiment=[smoke,search]", "hydra.sweeper.n_trials=1")
    assert done.returncode == 0, done.stderr
    assert runs(sweep) == {"0"}
    best = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    assert best["best_params"].keys() == {"train.lr", "data.rollouts_per_problem"}
    assert "1 configuration, 1 run" in done.stdout
    done = run_command(tmp_path, ROOT / "run_grpo.py", f"resume={sweep}", "hydra.sweeper.n_trials=2")
    assert done.returncode == 0, done.stderr
    assert "run 0 of the sweep is finished" in done.stdout
    assert "2 configurations, 2 runs" in done.stdout
