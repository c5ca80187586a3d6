"""What is moved when a run goes on from an earlier checkpoint, and what a kill in between leaves."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from offline_grpo.checkpoint.files import latest_checkpoint, list_checkpoints
from offline_grpo.errors import GrpoError
from offline_grpo.report.history import load_history
from offline_grpo.run.run_dir import RunDir
from offline_grpo.run.set_aside import describe, set_aside


def make_run(path: Path) -> RunDir:
    """Twelve iterations, saved and evaluated after 4, 8 and 12; the last checkpoint is the best."""
    files = [
        "report.png",
        "report.html",
        "wandb_run_id",
        "run.log",
        "failed_batch_iter_009.pt",
        "metrics/eval_init.json",
        "samples/eval_init.jsonl",
    ]
    for i in range(12):
        files += [f"metrics/train_iter_{i:03d}.json", f"samples/iter_{i:03d}.jsonl"]
        files += [f"metrics/eval_iter_{i:03d}.json", f"checkpoints/iter_{i:03d}/config.json"] if i % 4 == 3 else []
    for name in files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")
    (path / "checkpoints" / "best").symlink_to("iter_011")
    return RunDir(path)


def point(iteration: int, best: int | None = None, **changes: tuple[object, object]):
    """What `set_aside` reads of a resume point."""
    watches = {} if best is None else {"keep_best": SimpleNamespace(best_iteration=best)}
    return SimpleNamespace(
        num_done=iteration + 1, changes=changes, state=SimpleNamespace(iteration=iteration, milestones=watches)
    )


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def test_what_comes_after_an_earlier_checkpoint_moves_and_is_whole(tmp_path):
    run = make_run(tmp_path)
    before = files(tmp_path)
    aside = set_aside(run, point(7, best=3), 2)
    assert aside == tmp_path / "set_aside" / "start_002"
    assert describe(aside, point(7)) == f"set aside in {aside}: what an earlier start wrote after iteration 8"
    assert files(aside) == {
        *("checkpoints/iter_011/config.json", "metrics/eval_iter_011.json", "failed_batch_iter_009.pt"),
        *("report.png", "report.html", "wandb_run_id"),
        *(f"metrics/train_iter_{i:03d}.json" for i in range(8, 12)),
        *(f"samples/iter_{i:03d}.jsonl" for i in range(8, 12)),
        *("checkpoints/best",),
    }
    kept = files(tmp_path) - {f"set_aside/start_002/{name}" for name in files(aside)}
    assert kept == before - files(aside) | {"checkpoints/best"}
    assert (tmp_path / "checkpoints" / "best").readlink() == Path("iter_003")
    assert (aside / "checkpoints" / "best" / "config.json").exists()
    assert latest_checkpoint(run.checkpoints) == run.checkpoints / "iter_007"
    assert list(load_history(tmp_path).train) == list(range(8))
    assert set_aside(run, point(7, best=3), 3) is None
    assert set_aside(run, point(3), 2) == tmp_path / "set_aside" / "start_003", "a name is used once"


def test_a_best_checkpoint_that_is_gone_has_no_link(tmp_path):
    set_aside(make_run(tmp_path), point(7, best=5), 2)
    assert not os.path.lexists(tmp_path / "checkpoints" / "best")


def test_records_after_the_newest_checkpoint_stay_unless_something_has_changed(tmp_path):
    run = make_run(tmp_path)
    run.checkpoints.joinpath("iter_011").rename(tmp_path / "elsewhere")
    run.checkpoints.joinpath("best").unlink()
    before = files(tmp_path)
    assert set_aside(run, point(7), 2) is None
    assert files(tmp_path) == before
    aside = set_aside(run, point(7, lr=(1, 2)), 2)
    assert len(files(aside)) == 4 + 4 + 1 + 4
    assert list(load_history(tmp_path).train) == list(range(8))


def test_after_a_start_that_changed_something_the_records_may_be_its_own(tmp_path):
    run = make_run(tmp_path)
    run.checkpoints.joinpath("iter_011").rename(tmp_path / "elsewhere")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config_first.yaml").touch()
    assert set_aside(run, point(7), 3) is not None


def test_a_run_that_begins_anew_in_a_used_folder_moves_all(tmp_path):
    run = make_run(tmp_path)
    aside = set_aside(run, None, 2)
    assert describe(aside, None) == f"set aside in {aside}: an earlier run in this folder"
    assert files(tmp_path) == {"run.log"} | {f"set_aside/start_002/{name}" for name in files(aside)}
    assert set_aside(run, None, 3) is None


def test_killed_after_any_move_the_rest_is_a_run_that_goes_on(tmp_path, monkeypatch):
    """A history without gaps at every moment, and the next start moves what is left."""
    real = Path.rename
    for count in itertools.count():
        run = make_run(tmp_path / str(count))
        moves = iter(range(count))

        def rename(path: Path, target: Path, moves=moves) -> Path:
            if next(moves, None) is None:
                raise KeyboardInterrupt
            return real(path, target)

        monkeypatch.setattr(Path, "rename", rename)
        try:
            set_aside(run, point(3), 2)
            break
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.undo()
        saved = [int(path.name[5:]) for path in list_checkpoints(run.checkpoints)]
        recorded = list(load_history(run.path).train)
        assert saved == [3, 7, 11][: len(saved)]
        assert saved[-1] == 3 or recorded == list(range(12)), "records only after all checkpoints"
        assert recorded == list(range(len(recorded)))
        set_aside(run, point(saved[-1], lr=(1, 2)), 3)
        assert list(load_history(run.path).train) == list(range(saved[-1] + 1))
        assert len([name for name in files(run.path) if not name.endswith("best")]) == 4 + 1 + 2 + 12 * 2 + 3 * 2
    assert count == 2 + 8 + 8 + 2 + 1 + 3 + 1


def test_what_cannot_be_moved_is_told(tmp_path):
    run = make_run(tmp_path)
    (tmp_path / "set_aside").touch()
    with pytest.raises(
        GrpoError, match=r"/checkpoints/iter_011: cannot be moved to .*/set_aside/start_002/.* \(.*\); free some space"
    ):
        set_aside(run, point(7), 2)
    assert latest_checkpoint(run.checkpoints) == run.checkpoints / "iter_011"


def test_files_of_others_in_the_same_folder_stay(tmp_path):
    """`hydra.run.dir=.`, in a project with such names."""
    run, theirs = make_run(tmp_path), ["my_init.py", "scripts/init.sh", "data/train_init.json", "data/iter_005/a.txt"]
    for name in theirs:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    aside = set_aside(run, None, 1)
    assert files(tmp_path) >= set(theirs)
    assert not files(aside) & set(theirs)
    assert not list(run.contents())
