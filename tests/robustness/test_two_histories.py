"""A run that goes on from one of its earlier checkpoints and is killed goes on with the new history, not with the old
one.
"""

import shutil
import signal
from functools import partial

import pytest
from children import SMALL, metrics_of, printed, run_in_child, weights_of

from offline_grpo.checkpoint.files import list_checkpoints

KEPT = ("samples", "rollouts")


@pytest.mark.slow
def test_the_old_history_is_set_aside_and_the_new_one_is_what_it_would_be_alone(tmp_path):
    run, alone, fresh = tmp_path / "run", tmp_path / "alone", tmp_path / "fresh"
    words = (f"cache_dir={tmp_path}/cache", *SMALL, "checkpoint.save_interval=1", "samples.per_iteration=all")
    changed = (*words, "train.lr=3e-3", "checkpoint.keep_last_k=1", "checkpoint.keep_best=pass@1")
    assert run_in_child(run, *words) == 0, printed(run)
    old = weights_of(run)
    shutil.copytree(run, alone)
    for iteration in (2, 3):  # as if it had been killed after two iterations
        shutil.rmtree(alone / "checkpoints" / f"iter_00{iteration}")
        for path in [
            *alone.glob(f"metrics/*_00{iteration}.json"),
            *(path for kind in KEPT for path in (alone / kind).glob(f"*_00{iteration}.*")),
        ]:
            path.unlink()
    assert run_in_child(fresh, *changed, f"resume={alone}") == 0, printed(fresh)

    kill = {("train", 3): partial(signal.raise_signal, signal.SIGKILL)}
    assert run_in_child(run, *changed, f"resume={run}/checkpoints/iter_001", mishaps=kill) == -signal.SIGKILL, printed(
        run
    )
    aside = run / "set_aside" / "start_002"
    assert f"set aside in {aside}: what an earlier start wrote after iteration 2" in printed(run)
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["iter_002"]
    assert [path.name for path in list_checkpoints(aside / "checkpoints")] == ["iter_002", "iter_003"]
    assert not (run / "report.png").exists()

    assert run_in_child(run, *changed, f"resume={run}") == 0, printed(run)
    assert metrics_of(run) == metrics_of(alone)
    for kind in KEPT:
        assert {path.name: path.read_bytes() for path in (run / kind).iterdir()} == {
            path.name: path.read_bytes() for path in (alone / kind).iterdir()
        }
    new = weights_of(run)
    assert new == {name: weights_of(alone)[name] for name in new}
    assert new["iter_003"] != old["iter_003"]
    assert weights_of(aside) == {name: old[name] for name in ("iter_002", "iter_003")}
