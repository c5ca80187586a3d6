"""A run folder holds one history: what was written after the checkpoint that a run goes on from is moved to
`set_aside/start_NNN/`.

NNN is the number of the start in `environment.json`. Below it the files have the places that they had. Nothing is
deleted, and reports, evaluations and `resume` do not look there. The newest checkpoint moves first and everything else
after the checkpoints, so a run that is killed in between has an older, complete history, and the next start moves the
rest.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from offline_grpo.checkpoint.files import BEST, set_link
from offline_grpo.errors import GrpoError
from offline_grpo.run.run_dir import ResumePoint, RunDir

FOLDER = "set_aside"
ITERATION = re.compile(r"(?:^|_)(?:iter_(?P<number>\d+)|init)(?=\.|$)")
"""In the names of files and folders that belong to an iteration: `iter_004`, `eval_iter_004.json`, `eval_init.json`."""
OF_THE_WHOLE = ("report.png", "report.html", "wandb_run_id")
"""What describes a history as a whole. Without its id, the new one is a run of its own in W&B."""


def set_aside(run_dir: RunDir, point: ResumePoint | None, start: int) -> Path | None:
    """Move what was written after `point`, or all if the run begins anew in a folder that was used before. Returns
    where, None for nothing.

    Records after the newest checkpoint stay if nothing has changed: the run writes them again, with the same values.

    Raises:
        GrpoError: a file cannot be moved.
    """
    run, last = run_dir.path, -2 if point is None else point.state.iteration
    later = [path for path in (*run.glob("failed_batch_*"), *run_dir.contents()) if _iteration(path) > last]
    checkpoints = [path for path in later if path.parent == run_dir.checkpoints]
    has_other_settings = point is None or bool(point.changes) or (run / ".hydra" / "config_first.yaml").exists()
    moved: list[Path] = []
    if checkpoints or has_other_settings:
        moved = sorted(later, key=lambda path: (path.parent != run_dir.checkpoints, -_iteration(path)))
    moved += [run / name for name in OF_THE_WHOLE if moved and (run / name).exists()]
    target = next(path for n in itertools.count(start) if not (path := run / FOLDER / f"start_{n:03d}").exists())
    for path in moved:
        _move(path, target / path.relative_to(run))
    best = run_dir.checkpoints / BEST
    if best.is_symlink() and not best.exists():  # also if a start was killed before this line
        _move(best, target / "checkpoints" / BEST)
        watch = None if point is None else point.state.milestones.get("keep_best")
        name = None if watch is None or watch.best_iteration is None else f"iter_{watch.best_iteration:03d}"
        if name is not None and (run_dir.checkpoints / name).exists():
            set_link(best, name)
    return target if target.exists() else None


def describe(target: Path, point: ResumePoint | None) -> str:
    """What is said about it."""
    after = (
        "an earlier run in this folder"
        if point is None
        else f"what an earlier start wrote after iteration {point.num_done}"
    )
    return f"set aside in {target}: {after}"


def _iteration(path: Path) -> int:
    """The iteration that a file belongs to; -1 is the evaluation before training, -2 none."""
    match = None if path.name.startswith(".") else ITERATION.search(path.name)
    if match is None:
        return -2
    return -1 if match["number"] is None else int(match["number"])


def _move(path: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    except OSError as error:
        raise GrpoError(
            f"{path}: cannot be moved to {target} ({error.strerror}); free some space or fix its permissions"
        ) from error
