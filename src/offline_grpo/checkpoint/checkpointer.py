"""Checkpoints: `checkpoints/iter_NNN/` is a standard Hugging Face folder (or a peft adapter) plus the trainer state.

    iter_004/  config.json  model.safetensors  tokenizer.json ...      loadable by from_pretrained and vLLM
               trainer/state.json                                       iteration, counters, schedule, milestones,
                                                                        source, configuration
               trainer/optimizer.pt  trainer/masters.safetensors        optimizer and scaler; fp32 master weights of a
                                                                        16-bit model
               trainer/served.safetensors                               weights that the engine serves, if older than
                                                                        the model
               trainer/parts.pt  trainer/part_00000.safetensors ...     in place of these three, see parts.py
               trainer/manifest.json                                    size and hash of every other file

A checkpoint is written under a hidden name and renamed once it is complete and on disk, so a folder named iter_NNN is
always complete. With `checkpoint.keep_best`, `checkpoints/best` is a link to the best one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offline_grpo.checkpoint import state as trainer_state
from offline_grpo.checkpoint.files import (
    BEST,
    latest_checkpoint,
    list_checkpoints,
    make_empty,
    set_link,
    sync_file,
    sync_folder,
)
from offline_grpo.checkpoint.manifest import write_manifest
from offline_grpo.checkpoint.state import TrainerState, read_state
from offline_grpo.errors import CheckpointError, reason_of
from offline_grpo.interfaces import Source
from offline_grpo.model.policy import Policy
from offline_grpo.model.saving import save_policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.train.milestones import Milestones
from offline_grpo.train.push_schedule import PushSchedule
from offline_grpo.train.update import Updater

T = TypeVar("T")

PARTS = "parts.pt"
"""In place of the other tensors' files, see parts.py."""
LITTLE_BYTES = 2**20
"""With less free than this, what torch and safetensors say of a file that they could not write means a full disk."""


@dataclass(frozen=True)
class PendingCheckpoint:
    """A complete checkpoint under its hidden name; `commit` renames it. Only rank 0 does the work."""

    hidden: Path
    final: Path
    best: Path | None
    keep_last_k: int | None
    is_main: bool

    def commit(self) -> None:
        """Rename the checkpoint, then delete all but the best one and the newest `keep_last_k`. Later ones are of
        another history.
        """
        if not self.is_main:
            return
        if (
            self.best is not None
        ):  # before the rename: a run that is killed in between repeats the iteration, and sets the link again
            set_link(self.final.with_name(BEST), self.best.name)
        replaced = self.hidden.with_name(f".writing_{self.final.name}_replaced")
        if self.final.exists():  # moved in one step: deleting it takes long enough to be killed in
            os.rename(self.final, replaced)
        os.replace(self.hidden, self.final)
        sync_folder(self.final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        found = list_checkpoints(self.final.parent)
        for old in found[: found.index(self.final) + 1][: -self.keep_last_k] if self.keep_last_k is not None else []:
            if old != self.best:
                shutil.rmtree(old)


@dataclass(frozen=True)
class Restored:
    """Values from a checkpoint that `restore` does not load itself: the iteration, the state of the rollout source, and
    whether the evaluation after the iteration was interrupted."""

    iteration: int
    source: Mapping[str, Any]
    owes_evaluation: bool


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Writes a run's checkpoints into `folder`, and restores updater, master weights and schedule from them.

    Args:
        config: the resolved configuration, saved in each checkpoint.
        format: "full", or "sharded": tensors that are spread over processes are written by all of them. The model
            is whole in both.
    """

    folder: Path
    policy: Policy
    updater: Updater
    schedule: PushSchedule
    source: Source
    milestones: Milestones
    ranks: Ranks
    config: Mapping[str, Any]
    keep_last_k: int | None
    format: str

    def write(self, iteration: int, *, owes_evaluation: bool = False) -> PendingCheckpoint:
        """Save the state after `iteration`, without the final rename. Called on every process; rank 0 writes.

        Args:
            owes_evaluation: see `interfaces.Checkpointer.write`.

        Raises:
            CheckpointError: on every process, if the folder cannot be written (full disk, permissions). Earlier
            checkpoints stay intact.
        """
        hidden = self._hidden(iteration)
        self.ranks.on_main(lambda: self._told(iteration, lambda: make_empty(hidden)))
        tensors = self._trainer_tensors()
        if self._is_in_parts:
            write = partial(self._save_parts, tensors, hidden / "trainer")
            tensors = self.ranks.gather_results(lambda: self._told(iteration, write))[0]
        self.updater.sharding.lead(
            lambda: self._told(iteration, lambda: self._write(hidden, iteration, owes_evaluation, tensors)), tensors
        )
        best = self.milestones.best_iteration
        return PendingCheckpoint(
            hidden,
            final=self._path(iteration),
            best=None if best is None else self._path(best),
            keep_last_k=self.keep_last_k,
            is_main=self.ranks.is_main,
        )

    def _hidden(self, iteration: int) -> Path:
        return self.folder / f".writing_iter_{iteration:03d}"

    def _path(self, iteration: int) -> Path:
        return self.folder / f"iter_{iteration:03d}"

    def _trainer_tensors(self) -> dict[str, Any]:
        """What is saved beside the model: file name -> tensors. Of spread ones, every process has its parts."""
        _, served = self.schedule.state_dict(self.updater.counters.version)
        return {
            "masters": self.policy.masters.state_dict(),
            "served": dict(served),
            "optimizer": self.updater.state_dict(),
        }

    @property
    def _is_in_parts(self) -> bool:
        return self.format == "sharded" and self.policy.is_sharded

    def _save_parts(self, tensors: dict[str, Any], trainer: Path) -> list[dict[str, Any]]:
        from offline_grpo.checkpoint.parts import save_parts  # which takes a second

        named = save_parts(tensors, trainer, self.ranks.rank)
        return [named] if self.ranks.is_main else []

    def _write(self, hidden: Path, iteration: int, owes_evaluation: bool, tensors: dict[str, Any]) -> None:
        self._write_into(hidden, iteration, owes_evaluation, tensors)
        for path in sorted(hidden.rglob("*")):
            sync_file(path)

    def _told(self, iteration: int, action: Callable[[], T]) -> T:
        """What `action` returns; its failure as one line, with nothing left behind."""
        try:
            return action()
        except (
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:  # torch and safetensors report a full disk as their own errors
            is_full = not isinstance(error, OSError) and shutil.disk_usage(self.folder).free < LITTLE_BYTES
            reason = "No space left on device" if is_full else reason_of(error)
            shutil.rmtree(self._hidden(iteration), ignore_errors=True)
            last = latest_checkpoint(self.folder)
            remains = f"the last checkpoint is intact: {last}" if last else "there is no earlier checkpoint"
            raise CheckpointError(
                f"checkpoint of iteration {iteration} could not be written to {self.folder}: {reason}; {remains}. Free some space or fix "
                f"the folder's permissions, then {'continue with resume=auto' if last else 'start again'}"
            ) from error

    def _write_into(self, folder: Path, iteration: int, owes_evaluation: bool, tensors: dict[str, Any]) -> None:
        sharding, trainer = self.updater.sharding, folder / "trainer"
        save_policy(self.policy, sharding.full_weights(self.policy), folder)
        whole = sharding.whole(tensors, trainer)
        if self._is_in_parts:
            torch.save(whole, trainer / PARTS)
        else:
            for name in ("masters", "served"):
                if whole[name]:
                    save_file(
                        {key: tensor.contiguous() for key, tensor in whole[name].items()},
                        trainer / f"{name}.safetensors",
                    )
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
            tensors = self._read_parts(trainer) if (trainer / PARTS).exists() else self._read_whole(trainer)
            self.updater.load_state_dict(tensors["optimizer"], record.counters)
            self.policy.masters.load_state_dict(tensors["masters"])
            self.schedule.load_state_dict(record.schedule, tensors["served"])
            self.milestones.load_state_dict(record.milestones)
        except Exception as error:  # whatever damaged files raise, in torch's unpickler, safetensors or an optimizer
            raise CheckpointError(
                f"resume={checkpoint}: its trainer state does not fit this configuration ({reason_of(error)})"
            ) from error
        best = self.milestones.best_iteration
        if (
            best is not None and not self._path(best).exists()
        ):  # an older checkpoint is gone on from, when a later one was the best
            self.milestones.forget_best()
        return Restored(record.iteration, record.source, record.owes_evaluation)

    def _read_whole(self, trainer: Path) -> dict[str, Any]:
        """See `_trainer_tensors`. The optimizer's are whole."""
        is_copied = (
            self.policy.is_sharded or self.policy.masters.host is not None
        )  # so the file need not be in memory as well
        served = trainer / "served.safetensors"
        trained = self.policy.trained_parameters() if served.exists() else {}
        return {
            "optimizer": torch.load(trainer / "optimizer.pt", map_location="cpu", weights_only=True, mmap=is_copied),
            "masters": self._tensors(trainer / "masters.safetensors", self.policy.masters.state_dict()),
            "served": self._tensors(served, trained),
        }

    def _read_parts(self, trainer: Path) -> dict[str, Any]:
        """See `_trainer_tensors`. Of each, what this process holds."""
        from offline_grpo.checkpoint.parts import Parts  # which takes a second

        parts, tensors = Parts(trainer), torch.load(trainer / PARTS, map_location="cpu", weights_only=True)
        parameters = [parameter for group in self.updater.optimizer.param_groups for parameter in group["params"]]
        for number, means in tensors["optimizer"]["optimizer"]["state"].items():
            means.update({name: parts.like(parameters[number], value) for name, value in means.items()})
        for name, like in (("masters", self.policy.masters.state_dict()), ("served", self.policy.trained_parameters())):
            _check_names(tensors[name], like if tensors[name] or name == "masters" else {}, PARTS)
            tensors[name] = {key: parts.like(like[key], value) for key, value in tensors[name].items()}
        return tensors

    def _tensors(self, path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `_read`. This process's parts, where `like` is spread."""
        return {name: self.updater.sharding.like(like[name], tensor) for name, tensor in _read(path, like).items()}


def _read(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the file holds, which must have the names and shapes of `like`; without any there is no file."""
    found = load_file(path) if like or path.exists() else {}
    _check_names(found, like, path.name)
    for name, tensor in found.items():
        if tensor.shape != like[name].shape:
            raise ValueError(f"{path.name}: {name} is {list(tensor.shape)} and should be {list(like[name].shape)}")
    return found


def _check_names(found: Mapping[str, Any], like: Mapping[str, Any], file: str) -> None:
    for name in sorted(found.keys() ^ like.keys()):
        raise ValueError(f"{file}: {name} is {'missing' if name in like else 'unknown'}")
