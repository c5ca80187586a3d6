"""Launchers and the Optuna sweeper of the extra `sweeps`, which the test group has too."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from waiting import wait_until

from offline_grpo.run import sweeps

ROOT = Path(__file__).parents[2]
TWO_CORES = ("hydra.launcher.address=local", "+hydra.launcher.ray_init.num_cpus=2")


def multirun(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A sweep of small runs, and its folder."""
    command = [sys.executable, str(ROOT / "run_grpo.py"), "--multirun", *words, f"hydra.sweep.dir={folder / 'sweep'}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done, folder / "sweep"


def endless(seeds: str) -> list[str]:
    """The command of a sweep that trains until it is stopped, in the folder `sweep`."""
    words = ("experiment=smoke", "checkpoint.save_interval=1000", "train.iterations=100000", "eval.enabled=false")
    return [sys.executable, str(ROOT / "run_grpo.py"), "--multirun", *words, f"seed={seeds}", "hydra.sweep.dir=sweep"]


def runs(sweep: Path) -> set[str]:
    """The jobs that have trained to the end."""
    return {path.parent.parent.name for path in sweep.glob("*/metrics/train_iter_000.json")}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_a_launcher_runs_all_jobs_and_the_exit_code_is_that_of_the_worst(tmp_path: Path, launcher: str) -> None:
    cluster = TWO_CORES if launcher == "ray" else ()
    done, sweep = multirun(tmp_path, f"hydra/launcher={launcher}", *cluster, "experiment=smoke", "train.lr=1e-3,-1")
    assert done.returncode == 2, done.stderr
    assert runs(sweep) == {"0"}
    assert not (sweep / sweeps.FAILED).exists()
    assert "1 configuration, 1 run" in done.stdout
    if launcher == "joblib":
        assert re.search(r"^\[0\] run folder: ", done.stdout, re.MULTILINE)
        assert re.search(r"^\[1\] error in job 1 of the sweep: train.lr=-1.0: ", done.stderr, re.MULTILINE)
        assert not re.search(r"^run folder: ", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_signal_stops_the_runs_on_a_cluster_where_nothing_is_lost(tmp_path: Path) -> None:
    command = [*endless("0,1"), "hydra/launcher=ray", *TWO_CORES]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as sweep:
        wait_until(lambda: runs(tmp_path / "sweep") == {"0", "1"})
        sweep.terminate()
        try:
            printed = sweep.communicate(timeout=120)[0]
        finally:
            sweep.kill()
    assert sweep.returncode == 128 + signal.SIGTERM, printed
    # the jobs' last lines may come too late
    line = r"^stopped by SIGTERM; continue the sweep with: .*run_grpo.py resume=sweep$"
    assert re.search(line, printed, re.MULTILINE), printed
    assert "Traceback" not in printed
    assert are_saved(tmp_path / "sweep")


@pytest.fixture
def side_by_side(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep with joblib of which two jobs of four train, without end."""
    command = [*endless("0,1,2,3"), "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "num_threads=1"]
    with (tmp_path / "printed").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # a shell's `&` makes the tests ignore it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    with process:
        try:
            wait_until(lambda: runs(tmp_path / "sweep") == {"0", "1"})
            yield process
        finally:
            process.terminate()


def are_saved(sweep: Path) -> bool:
    """Whether both jobs have saved their last iteration."""
    last = [f"iter_{len(list((sweep / number / 'metrics').glob('train_iter_*.json'))) - 1:03d}" for number in "01"]
    return [path.name for number in "01" for path in (sweep / number / "checkpoints").glob("iter_*")] == last


@pytest.mark.slow
def test_a_ctrl_c_lets_jobs_side_by_side_save(side_by_side: subprocess.Popen[str], tmp_path: Path) -> None:
    """Which a terminal sends to all."""
    os.killpg(side_by_side.pid, signal.SIGINT)
    assert side_by_side.wait(timeout=120) == 130
    printed = (tmp_path / "printed").read_text()
    line = r"^stopped by SIGINT; continue the sweep with: uv run run_grpo.py resume=sweep$"
    assert re.search(line, printed, re.MULTILINE)
    assert "Traceback" not in printed
    assert "before the run began" not in printed
    assert are_saved(tmp_path / "sweep")
    assert not [name for name in ("2", "3", sweeps.FAILED) if (tmp_path / "sweep" / name).exists()]


@pytest.mark.slow
def test_jobs_side_by_side_save_and_end_when_their_sweep_is_killed(
    side_by_side: subprocess.Popen[str], tmp_path: Path
) -> None:
    workers = psutil.Process(side_by_side.pid).children()
    side_by_side.kill()
    assert not psutil.wait_procs(workers, timeout=120)[1]
    assert are_saved(tmp_path / "sweep")
    assert "Traceback" not in (tmp_path / "printed").read_text()


@pytest.mark.slow
def test_a_cluster_for_a_sweep_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done, sweep = multirun(tmp_path, "hydra/launcher=ray", "hydra.launcher.address=127.0.0.1:1", "seed=0,1")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: hydra.launcher.address=127.0.0.1:1")
    assert "no Ray cluster (" in done.stderr
    assert not sweep.exists()


@pytest.mark.slow
def test_optuna_searches_for_the_best_pass_at_1(tmp_path: Path) -> None:
    done, sweep = multirun(tmp_path, "experiment=[smoke,search]", "hydra.sweeper.n_trials=1")
    assert done.returncode == 0, done.stderr
    assert runs(sweep) == {"0"}
    best = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    assert best["best_params"].keys() == {"train.lr", "data.rollouts_per_problem"}
    assert "1 configuration, 1 run" in done.stdout
    command = [sys.executable, str(ROOT / "run_grpo.py"), f"resume={sweep}", "hydra.sweeper.n_trials=2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "run 0 of the sweep is finished" in done.stdout
    assert "2 configurations, 2 runs" in done.stdout
