"""Two processes on the CPU, started as the README says, against one."""

import subprocess
import sys
from pathlib import Path

import pytest
from children import SMALL, metrics_of, printed, run_in_child, weights_of

ROOT = Path(__file__).parents[2]


def test_two_processes_follow_the_trajectory_of_one(tmp_path):
    overrides = [*SMALL, f"cache_dir={tmp_path}/cache", "data.problems_per_iteration=5", "train.updates_per_iteration=3", "train.epochs=2"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert run_in_child(alone, *overrides) == 0, printed(alone)
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch", "--num_processes", "2"]
    command = [*accelerate, str(ROOT / "run_grpo.py"), *overrides, f"hydra.run.dir={together}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("run folder:") == 1
    expected, found = metrics_of(alone), metrics_of(together)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == pytest.approx(expected[name], abs=1e-6, rel=1e-5), name
    assert expected["train_iter_003.json"]["grad_norm"] > 0
    assert weights_of(together).keys() == weights_of(alone).keys()
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"cache", "alone", "alone.txt", "together"}  # the second process wrote nothing
