"""Two processes on the CPU, started as the README says, against one."""

import subprocess
import sys
from pathlib import Path

import pytest
from children import SMALL, metrics_of, printed, run_in_child, weights_of

ROOT = Path(__file__).parents[2]


ONE_FAILS = """
import sys

from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.placement.ranks import Ranks

ranks = Ranks(use_cpu=True)

def work(*errors):
    if errors[ranks.rank] is not None:
        raise errors[ranks.rank]
    return [ranks.rank * 10, ranks.rank * 10 + 1]

heard = [ranks.gather_results(lambda: work(None, None)), ranks.gather_interleaved(lambda: work(None, None))]
for errors in ((None, EngineError("late")), (EngineError("early"), EngineDied("gone")), (EngineError("first"), EngineError("second"))):
    try:
        heard.append(ranks.gather_results(lambda: work(*errors)))
    except EngineError as error:
        heard.append(repr(error))
open(f"{sys.argv[1]}/{ranks.rank}", "w").write(repr(heard))
"""


def test_an_error_of_one_process_is_raised_on_all(tmp_path):
    """Nobody waits for the others' results; a death, which can be recovered from, comes first."""
    (tmp_path / "one_fails.py").write_text(ONE_FAILS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launch, str(tmp_path / "one_fails.py"), str(tmp_path)], check=True, timeout=120)
    expected = [[0, 1, 10, 11], [0, 10, 1, 11], "EngineError('late')", "EngineDied('gone')", "EngineError('first')"]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [repr(expected)] * 2


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
