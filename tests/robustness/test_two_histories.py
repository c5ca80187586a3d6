"""A run that is resumed from one of its earlier checkpoints is a new run in a new folder."""

import shutil
import signal
from functools import partial

import pytest
from runs import SMALL, metrics_of, printed, run_in_child, weights_of

from offline_grpo.checkpoint.files import list_checkpoints


def content(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_an_older_checkpoint_starts_a_new_folder_and_the_old_one_is_untouched(cache, tmp_path):
    run, alone, new, fresh = (tmp_path / name for name in ("run", "alone", "new", "fresh"))
    words = (cache, *SMALL, "checkpoint.save_interval=1", "samples.per_iteration=all")
    changed = (*words, "train.lr=3e-3", "checkpoint.keep_last_k=1", "checkpoint.keep_best=pass@1")
    assert run_in_child(run, *words) == 0, printed(run)
    before = content(run)
    shutil.copytree(run, alone)
    for iteration in (2, 3):  # as if it had been killed after two iterations
        shutil.rmtree(alone / "checkpoints" / f"iter_00{iteration}")
        for path in (path for kind in ("metrics", "samples", "rollouts") for path in alone.glob(f"{kind}/*")):
            if f"_00{iteration}" in path.name:
                path.unlink()
    assert run_in_child(fresh, *changed, f"resume={alone}") == 0, printed(fresh)

    kill = {("train", 3): partial(signal.raise_signal, signal.SIGKILL)}
    code = run_in_child(new, *changed, f"resume={run}/checkpoints/iter_001", mishaps=kill)
    assert code == -signal.SIGKILL, printed(new)
    assert [path.name for path in list_checkpoints(new / "checkpoints")] == ["iter_002"]
    assert run_in_child(fresh, *changed, f"resume={new}") == 0, printed(fresh)
    assert metrics_of(new) == metrics_of(alone)
    for kind in ("samples", "rollouts"):
        for path in (new / kind).iterdir():
            assert path.read_bytes() == (alone / kind / path.name).read_bytes()
    weights = weights_of(new)
    assert weights == {name: weights_of(alone)[name] for name in weights}
    assert weights["iter_003"] != weights_of(run)["iter_003"]
    assert content(run) == before
