"""What a run reads that its configuration only names: the rows of its data, the code of its rewards. Each start records
their hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from offline_grpo.errors import GrpoError
from offline_grpo.report.run_files import read_part
from offline_grpo.run.task_data import TaskData
from offline_grpo.task.mixture import Mixture
from offline_grpo.task.row_task import RowTask


def hashes(data: TaskData) -> dict[str, str]:
    """What is read, as `task.path=FOLDER` or `task.reward (FILE)` -> its hash."""
    tasks = [*data.task.tasks.values()] if isinstance(data.task, Mixture) else [data.task]
    has_read = data.train is not None or len(data.held_out) > 0
    rows = {f"task.path={task.path}": task.fingerprint for task in tasks if isinstance(task, RowTask) and has_read}
    files: Iterable[Path] = getattr(data.task, "code_files", ())
    return rows | {
        f"task.reward ({file})": hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()
    }


def describe_other(run: Path, now: Mapping[str, str], changed: Iterable[str]) -> list[str]:
    """A line about each input that is another one than at the last start of a run that goes on.

    Args:
        run: its folder.
        changed: keys of the configuration that differ now. They are told, and of other settings of the task come
            other problems.
    """
    before = dict[str, str]()
    with suppress(GrpoError):  # no record, or one that was cut off: nothing to compare with
        before = read_part(run / ".hydra" / "starts.yaml", lambda starts: dict(starts[-1].get("inputs", {})))
    if any(key.startswith("task.") for key in changed):
        return []
    return [
        f"{name}: its content has changed since this run was started last, and the run goes on with the new one; put the old one back, or "
        "start another run by leaving resume out"
        for name, digest in now.items()
        if before.get(name, digest) != digest
    ]
