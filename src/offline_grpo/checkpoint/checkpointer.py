"""Checkpoints: `checkpoints/iter_NNN/` is a plain Hugging Face folder (or a peft adapter) with the trainer's state beside it.

    iter_004/  config.json  model.safetensors  tokenizer.json ...      what from_pretrained and vLLM load
               trainer/state.json                                       iteration, counters, the configuration
               trainer/optimizer.pt  trainer/masters.safetensors        optimizer and scaler; fp32 masters where the model is 16 bit

A checkpoint is written under a hidden name and renamed when it is complete and on disk, so a folder called iter_NNN is always whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from offline_grpo.checkpoint.files import FORMAT, latest_checkpoint, list_checkpoints, read_state
from offline_grpo.errors import CheckpointError, reason_of
from offline_grpo.model.policy import Policy
from offline_grpo.train.update import Updater


@dataclass
class PendingCheckpoint:
    """A checkpoint that is complete under its hidden name; `commit` gives it its own."""

    hidden: Path
    final: Path
    keep_last_k: int

    def commit(self) -> None:
        """Rename into place, then remove checkpoints beyond the newest `keep_last_k`."""
        if self.final.exists():
            shutil.rmtree(self.final)
        os.replace(self.hidden, self.final)
        _sync_folder(self.final.parent)
        for old in list_checkpoints(self.final.parent)[: -self.keep_last_k]:
            shutil.rmtree(old)


class Checkpointer:
    """Writes a run's checkpoints into `folder`, and reads them back into policy and updater."""

    def __init__(self, folder: Path, policy: Policy, updater: Updater, *, config: Mapping[str, Any], keep_last_k: int) -> None:
        self._folder = folder
        self._policy = policy
        self._updater = updater
        self._config = config
        self._keep_last_k = keep_last_k

    def write(self, iteration: int) -> PendingCheckpoint:
        """Save the state after `iteration`, everything but the final rename.

        Raises:
            CheckpointError: the folder cannot be written (full disk, permissions). Earlier checkpoints are untouched.
        """
        hidden = self._folder / f".writing_iter_{iteration:03d}"
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            (hidden / "trainer").mkdir(parents=True)
            self._write_into(hidden, iteration)
            for path in sorted(hidden.rglob("*")):
                _sync_file(path)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors report a full disk as their own errors
            shutil.rmtree(hidden, ignore_errors=True)
            last = latest_checkpoint(self._folder)
            remains = f"the last checkpoint is whole: {last}" if last else "there is no earlier checkpoint"
            raise CheckpointError(
                f"checkpoint of iteration {iteration} could not be written to {self._folder}: {reason_of(error)}; {remains}. "
                "Free some space or fix the folder's permissions, then go on with resume=auto"
            ) from error
        return PendingCheckpoint(hidden, self._folder / f"iter_{iteration:03d}", self._keep_last_k)

    def _write_into(self, folder: Path, iteration: int) -> None:
        self._policy.save_model(folder)
        self._policy.tokenizer.save_pretrained(str(folder))
        masters = self._policy.masters.state_dict()
        if masters:
            save_file({name: tensor.contiguous() for name, tensor in masters.items()}, folder / "trainer" / "masters.safetensors")
        state = self._updater.state_dict()
        torch.save({"optimizer": state["optimizer"], "scaler": state["scaler"]}, folder / "trainer" / "optimizer.pt")
        record = {"format": FORMAT, "iteration": iteration, "counters": state["counters"], "config": self._config}
        (folder / "trainer" / "state.json").write_text(json.dumps(record, indent=1, sort_keys=True))

    def restore(self, checkpoint: Path) -> int:
        """Load optimizer, masters and counters (the model itself was loaded from the same folder). Returns the saved iteration.

        Raises:
            CheckpointError: the folder is no checkpoint of this pipeline, or damaged.
        """
        record = read_state(checkpoint)
        trainer = checkpoint / "trainer"
        try:
            state = torch.load(trainer / "optimizer.pt", map_location="cpu", weights_only=True)
            self._updater.load_state_dict({**state, "counters": record["counters"]})
            if (trainer / "masters.safetensors").exists():
                self._policy.masters.load_state_dict(load_file(trainer / "masters.safetensors"))
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"resume={checkpoint}: its trainer state does not fit this configuration ({reason})") from error
        return int(record["iteration"])


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
