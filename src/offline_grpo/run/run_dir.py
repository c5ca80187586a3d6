"""The folder of a run, and the search for the run that `resume` refers to.

outputs/DATE/TIME/  .hydra/  run.log  environment.json  metrics/{train,eval}_iter_NNN.json  checkpoints/iter_NNN/  report.png
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offline_grpo.checkpoint.files import latest_state, newest_sound, verified_state
from offline_grpo.checkpoint.state import TrainerState
from offline_grpo.errors import CheckpointError, ConfigError
from offline_grpo.train.schedule import LrSchedule

IGNORED_ON_RESUME = ("resume", "logger", "samples", "num_threads", "cache_dir")
"""Top-level keys that may differ between a run and its continuation; they do not count when configurations are compared."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunDir:
    """The paths inside a run's folder."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def report(self) -> Path:
        return self.path / "report.png"

    def create(self) -> None:
        """Create the folders.

        Raises:
            ConfigError: the folder is not writable.
        """
        try:
            self.metrics.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={self.path}: cannot be written ({error.strerror}); choose a folder that you can write to"
            ) from error


@dataclass(frozen=True)
class ResumePoint:
    """The run to resume, the checkpoint to resume from, what its `trainer/state.json` says, and, once that was checked (`going_on.py`),
    what differs now and how the learning rate goes on."""

    run_dir: RunDir
    checkpoint: Path
    state: TrainerState
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # see `changed_keys`
    lr_schedule: LrSchedule | None = None

    @property
    def num_done(self) -> int:
        """Complete iterations."""
        return self.state.iteration + 1


def find_resume_point(resume: str | None, fresh: RunDir, config: Mapping[str, Any]) -> ResumePoint | None:
    """The checkpoint that `resume` refers to, or None to start a new run.

    Args:
        resume: None; the path of a run folder or of a checkpoint in one; or "auto". "auto" takes `fresh` itself if it has a checkpoint,
            otherwise the newest unfinished run with the same configuration and a checkpoint. Of a run, its newest sound checkpoint.
        fresh: the folder that Hydra created for this start.
        config: the resolved configuration.

    Raises:
        ConfigError: the path contains no checkpoint.
        CheckpointError: the checkpoint is damaged, or all of the run's are.
    """
    if resume is None:
        return None
    if resume == "auto":
        return _newest_alike(fresh, config)
    path = Path(resume).expanduser().resolve()
    is_checkpoint = os.path.lexists(path / "trainer") or path.name.startswith("iter_")
    found = (path, verified_state(path)) if is_checkpoint else newest_sound(path / "checkpoints")
    if found is None:
        raise ConfigError(f"resume={resume}: no checkpoint there; give a run folder, one of its checkpoints/iter_NNN, or auto")
    return ResumePoint(RunDir(found[0].parent.parent), *found)


def _newest_alike(fresh: RunDir, config: Mapping[str, Any]) -> ResumePoint | None:
    own = newest_sound(fresh.checkpoints)
    if own is not None:  # the user chose the folder, as in a job that the scheduler requeues
        return ResumePoint(fresh, *own)
    for run in _earlier_runs(fresh.path):
        latest = latest_state(run / "checkpoints")
        if latest is not None and changed_keys(latest.config, config):  # before all files of its checkpoints are read
            continue
        try:
            found = newest_sound(run / "checkpoints")
        except CheckpointError as error:
            log.warning("%s; skipped", error)
            continue
        if found is not None and (found[1].iteration + 1 < config["train"]["iterations"] or found[1].owes_evaluation):
            return ResumePoint(RunDir(run), *found)
    return None


def _earlier_runs(fresh: Path) -> list[Path]:
    """The other runs under the same root, newest first: siblings of outputs/DATE/TIME are DATE/TIME. The jobs of a sweep have none, because
    it goes on as a whole (`sweep_resume.py`)."""
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", fresh.parent.name):
        return []
    return sorted((path for path in fresh.parent.parent.glob("*/*") if path != fresh), reverse=True)


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (saved, now) for every value that differs, except keys that do not affect training."""
    old, new = _flat(saved), _flat(json.loads(json.dumps(config)))
    keys = [key for key in {**old, **new} if key.split(".")[0] not in IGNORED_ON_RESUME]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, Mapping) or not node:
        return {prefix: node}
    return {key: value for name, child in node.items() for key, value in _flat(child, f"{prefix}.{name}" if prefix else str(name)).items()}


def discard_fresh(folder: Path) -> None:
    """Delete the folder that Hydra created, if nothing else was written to it (a rejected configuration, a resumed run)."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".hydra", "run.log"}:
        shutil.rmtree(folder)
        for parent in (folder.parent, folder.parent.parent):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
