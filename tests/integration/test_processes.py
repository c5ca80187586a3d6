"""Two processes on the CPU against one, and the commands that start them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from group_work import one_fails
from runs import (
    SMALL,
    Kill,
    alone_and_together,
    in_group,
    metrics_of,
    printed,
    run_command,
    run_in_children,
    weights_of,
)

ROOT = Path(__file__).parents[2]


def test_an_error_of_one_process_is_raised_on_all(tmp_path: Path) -> None:
    """Nobody waits for the others' results; a death, which can be recovered from, comes first."""
    assert in_group(2, one_fails, str(tmp_path)) == [0, 0]
    expected = [[0, 1, 10, 11], [0, 10, 1, 11], "EngineError('late')", "EngineDied('gone')", "EngineError('first')"]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [repr(expected)] * 2


def test_two_processes_follow_the_trajectory_of_one(cache: str, tmp_path: Path) -> None:
    """They keep their state in the host's memory, which on CPUs changes nothing else."""
    overrides = [*SMALL, cache, "data.problems_per_iteration=5", "train.updates_per_iteration=3", "train.epochs=2"]
    alone, together = alone_and_together(tmp_path, *overrides, together=("train.optimizer.offload=true",))
    assert printed(together).count("run folder:") == 1
    assert metrics_of(alone)["train_iter_003.json"]["grad_norm"] > 0
    assert weights_of(together).keys() == weights_of(alone).keys()
    first, same = (
        parquet.read_table(run / "rollouts" / "iter_000.parquet") for run in (alone, together)
    )  # of all processes, once
    assert first.num_rows == 20
    assert first.drop(["logprobs"]) == same.drop(["logprobs"])  # batches of other sizes round otherwise
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"alone", "alone.txt", "together", "together.txt"}


def test_a_process_without_a_sequence_takes_part_all_the_same(cache: str, tmp_path: Path) -> None:
    """Two sequences for three."""
    run = (*SMALL, cache, "train.iterations=1", "train.updates_per_iteration=1", "eval.enabled=false")
    few = ("data.problems_per_iteration=1", "data.rollouts_per_problem=2")
    assert run_in_children(3, tmp_path / "run", *run, *few) == [0] * 3, printed(tmp_path / "run")


def test_the_signal_of_one_process_is_that_of_all(cache: str, tmp_path: Path) -> None:
    """A launcher hands on the exit code of the first that ends, and a Ctrl-C may come to one of them late."""
    run = tmp_path / "run"
    first_alone = Kill("offline_grpo.logger:JsonLogger.log", 2, number=signal.SIGINT)
    assert run_in_children(2, run, *SMALL, cache, kill=first_alone) == [130, 130], printed(run)
    assert printed(run).count("stopped by SIGINT; go on with") == 1


def test_a_process_does_not_wait_for_one_that_has_died(cache: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    second = Kill("offline_grpo.train.update:Updater.run", 2, rank=1)
    assert run_in_children(2, run, *SMALL, cache, kill=second) == [1, -signal.SIGKILL], printed(run)
    assert "error: another process of the run has ended, so this one ends too" in printed(run)


@pytest.mark.slow
def test_the_readmes_command_starts_two_processes(tmp_path: Path) -> None:
    """Through accelerate and torchrun."""
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", "2"]
    command = [*accelerate, str(ROOT / "run_grpo.py"), "train.lr=1e-5", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n  lr: 1.0e-05\n") == 2
    assert list(tmp_path.iterdir()) == []


def test_launchers_say_in_one_line_what_is_wrong_with_the_configuration(tmp_path: Path) -> None:
    says, common = "error: train.lrr: no such key; did you mean train.lr?", [str(ROOT / "run_grpo.py"), "train.lrr=1"]
    for launcher in (["accelerate", "launch", "--num_processes", "2"], ["torchrun", "--nproc_per_node", "2"]):
        done = run_command(tmp_path, Path(sys.executable).with_name(launcher[0]), *launcher[1:], *common)
        assert done.returncode == 1
        assert done.stderr.splitlines().count(says) == 1, done.stderr
        assert "hydra" not in done.stderr
        if launcher[0] == "accelerate":  # which starts one process, and that the two
            assert "ChildFailedError" not in done.stderr
        else:
            assert done.stderr.splitlines()[-2].endswith(f"traceback : {says}")


def test_what_the_first_process_alone_can_refuse_ends_all(tmp_path: Path) -> None:
    """Here no launcher ends the other one, which would wait for the first for hours."""
    run = tmp_path / "run"
    assert run_in_children(2, run, *SMALL, "resume=nowhere") == [2, 2]
    [line] = [line for line in printed(run).splitlines() if line.startswith("error: ")]
    assert line.startswith("error: resume=nowhere: ")
