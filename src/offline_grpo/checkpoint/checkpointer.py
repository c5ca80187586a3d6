"""Checkpoints: `checkpoints/iter_NNN/` is a standard Hugging Face folder (or a peft adapter) plus the trainer state.

    iter_004/  config.json  model.safetensors  tokenizer.json ...      loadable by from_pretrained and vLLM
               trainer/state.json                                       iteration, counters, schedule, milestones, source, configuration
               trainer/optimizer.pt  trainer/masters.safetensors        optimizer and scaler; fp32 master weights of a 16-bit model
               trainer/served.safetensors                               weights that the engine serves, if older than the model
               trainer/manifest.json                                    size and hash of every other file

A checkpoint is written under a hidden name and renamed once it is complete and on disk, so a folder named iter_NNN is always complete.
With `checkpoint.keep_best`, `checkpoints/best` is a link to the best one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offline_grpo.checkpoint import state as trainer_state
from offline_grpo.checkpoint.files import BEST, latest_checkpoint, list_checkpoints, set_link
from offline_grpo.checkpoint.manifest import write_manifest
from offline_grpo.checkpoint.state import TrainerState, read_state
from offline_grpo.errors import CheckpointError, reason_of
from offline_grpo.interfaces import RolloutSource
from offline_grpo.model.policy import Policy
from offline_grpo.model.saving import save_policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.train.milestones import Milestones
from offline_grpo.train.push_schedule import PushSchedule
from offline_grpo.train.update import Updater


@dataclass(frozen=True)
class PendingCheckpoint:
    """A complete checkpoint under its hidden name; `commit` renames it. Only rank 0 does the work."""

    hidden: Path
    final: Path
    best: Path | None
    keep_last_k: int | None
    is_main: bool

    def commit(self) -> None:
        """Rename the checkpoint, then delete all but the best one and the newest `keep_last_k`. Later ones are of another history."""
        if not self.is_main:
            return
        if self.best is not None:  # before the rename: a run that is killed in between repeats the iteration, and sets the link again
            set_link(self.final.with_name(BEST), self.best.name)
        replaced = self.hidden.with_name(f".writing_{self.final.name}_replaced")
        if self.final.exists():  # moved in one step: deleting it takes long enough to be killed in
            os.rename(self.final, replaced)
        os.replace(self.hidden, self.final)
        _sync_folder(self.final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        found = list_checkpoints(self.final.parent)
        for old in found[: found.index(self.final) + 1][: -self.keep_last_k] if self.keep_last_k is not None else []:
            if old != self.best:
                shutil.rmtree(old)


@dataclass(frozen=True)
class Restored:
    """Values from a checkpoint that `restore` does not load itself: the iteration, the state of the rollout source, and whether the
    evaluation after the iteration was interrupted."""

    iteration: int
    source: Mapping[str, Any]
    owes_evaluation: bool


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Writes a run's checkpoints into `folder`, and restores updater, master weights and schedule from them.

    Args:
        config: the resolved configuration, saved in each checkpoint.
    """

    folder: Path
    policy: Policy
    updater: Updater
    schedule: PushSchedule
    source: RolloutSource
    milestones: Milestones
    ranks: Ranks
    config: Mapping[str, Any]
    keep_last_k: int | None

    def write(self, iteration: int, *, owes_evaluation: bool = False) -> PendingCheckpoint:
        """Save the state after `iteration`, without the final rename. Called on every process; rank 0 writes.

        Args:
            owes_evaluation: see `interfaces.Checkpointer.write`.

        Raises:
            CheckpointError: on every process, if the folder cannot be written (full disk, permissions). Earlier checkpoints stay intact.
        """
        hidden = self.folder / f".writing_iter_{iteration:03d}"
        tensors = self._trainer_tensors()
        self.updater.sharding.lead(lambda: self._write(hidden, iteration, owes_evaluation, tensors), tensors)
        best = self.milestones.best_iteration
        return PendingCheckpoint(
            hidden,
            final=self._path(iteration),
            best=None if best is None else self._path(best),
            keep_last_k=self.keep_last_k,
            is_main=self.ranks.is_main,
        )

    def _path(self, iteration: int) -> Path:
        return self.folder / f"iter_{iteration:03d}"

    def _trainer_tensors(self) -> dict[str, Any]:
        """What is saved beside the model: file name -> tensors. Of spread ones, every process has its parts."""
        _, served = self.schedule.state_dict(self.updater.counters.version)
        return {"masters": self.policy.masters.state_dict(), "served": dict(served), "optimizer": self.updater.state_dict()}

    def _write(self, hidden: Path, iteration: int, owes_evaluation: bool, tensors: dict[str, Any]) -> None:
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            (hidden / "trainer").mkdir(parents=True)
            self._write_into(hidden, iteration, owes_evaluation, tensors)
            for path in sorted(hidden.rglob("*")):
                _sync_file(path)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors report a full disk as their own errors
            shutil.rmtree(hidden, ignore_errors=True)
            last = latest_checkpoint(self.folder)
            remains = f"the last checkpoint is intact: {last}" if last else "there is no earlier checkpoint"
            raise CheckpointError(
                f"checkpoint of iteration {iteration} could not be written to {self.folder}: {reason_of(error)}; {remains}. "
                "Free some space or fix the folder's permissions, then continue with resume=auto"
            ) from error

    def _write_into(self, folder: Path, iteration: int, owes_evaluation: bool, tensors: dict[str, Any]) -> None:
        sharding, trainer = self.updater.sharding, folder / "trainer"
        save_policy(self.policy, sharding.full_weights(self.policy), folder)
        whole = sharding.whole(tensors, trainer)
        for name in ("masters", "served"):
            if whole[name]:
                save_file({key: tensor.contiguous() for key, tensor in whole[name].items()}, trainer / f"{name}.safetensors")
        torch.save(whole["optimizer"], trainer / "optimizer.pt")
        record = TrainerState(
            iteration=iteration,
            owes_evaluation=owes_evaluation,
            counters=self.updater.counters,
            lr_schedule=self.updater.lr_schedule,
            schedule=self.schedule.state_dict(self.updater.counters.version)[0],
            source=dict(self.source.state_dict()),
            milestones=self.milestones.state_dict(),
            config=dict(self.config),
        )
        (folder / trainer_state.FILE).write_text(record.to_json())
        write_manifest(folder)

    def restore(self, checkpoint: Path) -> Restored:
        """Load optimizer, master weights, counters and the schedule (the model itself was loaded from the same folder).

        Raises:
            CheckpointError: the folder is not a checkpoint of this pipeline, or it is damaged.
        """
        record = read_state(checkpoint)
        trainer = checkpoint / "trainer"
        try:
            is_copied = self.policy.is_sharded or self.policy.masters.host is not None  # so the file need not be in memory as well
            state = torch.load(trainer / "optimizer.pt", map_location="cpu", weights_only=True, mmap=is_copied)
            self.updater.load_state_dict(state, record.counters)
            self.policy.masters.load_state_dict(self._tensors(trainer / "masters.safetensors", self.policy.masters.state_dict()))
            served = trainer / "served.safetensors"
            trained = self.policy.trained_parameters() if served.exists() else {}
            self.schedule.load_state_dict(record.schedule, self._tensors(served, trained))
            self.milestones.load_state_dict(record.milestones)
        except Exception as error:  # whatever damaged files raise, in torch's unpickler, safetensors or an optimizer
            raise CheckpointError(f"resume={checkpoint}: its trainer state does not fit this configuration ({reason_of(error)})") from error
        best = self.milestones.best_iteration
        if best is not None and not self._path(best).exists():  # an older checkpoint is gone on from, when a later one was the best
            self.milestones.forget_best()
        return Restored(record.iteration, record.source, record.owes_evaluation)

    def _tensors(self, path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `_read`. This process's parts, where `like` is spread."""
        return {name: self.updater.sharding.like(like[name], tensor) for name, tensor in _read(path, like).items()}


def _read(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the file holds, which must have the names and shapes of `like`; without any there is no file."""
    found = load_file(path) if like or path.exists() else {}
    for name in sorted(found.keys() ^ like.keys()):
        raise ValueError(f"{path.name}: {name} is {'missing' if name in like else 'unknown'}")
    for name, tensor in found.items():
        if tensor.shape != like[name].shape:
            raise ValueError(f"{path.name}: {name} is {list(tensor.shape)} and should be {list(like[name].shape)}")
    return found


def _sync_file(path: Path) -> None:
    if path.is_dir():
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
