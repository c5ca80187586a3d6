"""Checkpoints: `checkpoints/iter_NNN/` is a standard Hugging Face folder (or a peft adapter) plus the trainer state.

    iter_004/  config.json  model.safetensors  tokenizer.json ...   loadable by from_pretrained and vLLM
               trainer/state.json              iteration, counters, schedule, milestones, source, configuration
               trainer/optimizer.pt            optimizer and scaler
               trainer/masters.safetensors     fp32 master weights of a 16-bit model
               trainer/parts.pt  trainer/part_00000.safetensors ...    in place of these two, see parts.py
               trainer/manifest.json           size and hash of every other file

A checkpoint is written under a hidden name and renamed once it is complete and on disk, so a folder named iter_NNN is
always complete. With `checkpoint.keep_best`, `checkpoints/best` is a link to the best one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from offline_grpo.checkpoint.files import BEST, STATE, TrainerState, list_checkpoints, read_state, sync, write_manifest
from offline_grpo.disk import share
from offline_grpo.interfaces import Source
from offline_grpo.model.adapters import warn_of_peft
from offline_grpo.model.policy import Policy, save_policy
from offline_grpo.placement.ranks import Ranks
from offline_grpo.train.schedule import Milestones
from offline_grpo.train.update import Updater

PARTS = "parts.pt"
"""In place of the other tensors' files, see parts.py."""


@dataclass(frozen=True, kw_only=True)
class Checkpointer:
    """Writes a run's checkpoints into `folder`, and restores updater, master weights and milestones from them. With the
    format "sharded", tensors that are spread over processes are written by all of them. The model is always whole.
    """

    folder: Path
    policy: Policy
    updater: Updater
    source: Source
    milestones: Milestones
    ranks: Ranks
    config: Mapping[str, Any]
    keep_last_k: int | None
    format: str

    def write(self, iteration: int) -> None:
        """Save the state after `iteration` under a hidden name. Called on every process; rank 0 writes."""
        # What each process holds of masters and optimizer; where they are sharded, rank 0 gathers it, unless each
        # process writes its own rows.
        hidden, sharding = self.folder / f".writing_{self._path(iteration).name}", self.updater.passes.sharding
        trainer = hidden / "trainer"
        tensors: Any = {"masters": self.policy.masters.state_dict(), "optimizer": self.updater.state_dict()}
        is_in_parts = self.format == "sharded" and self.policy.is_sharded

        def make_empty() -> None:
            shutil.rmtree(hidden, ignore_errors=True)
            trainer.mkdir(parents=True)

        def write_all() -> None:
            # The model, for everybody; then what training goes on from.
            save_policy(self.policy, sharding.full_weights(self.policy), hidden)
            whole = sharding.whole(tensors, trainer)
            if is_in_parts:
                torch.save(whole, trainer / PARTS)
            else:
                if whole["masters"]:
                    masters = {name: tensor.contiguous() for name, tensor in whole["masters"].items()}
                    save_file(masters, trainer / "masters.safetensors")
                torch.save(whole["optimizer"], trainer / "optimizer.pt")
            record = TrainerState(
                iteration=iteration,
                counters=self.updater.counters,
                lr_schedule=self.updater.lr_schedule,
                source=dict(self.source.state_dict()),
                milestones=self.milestones.state_dict(),
                config=dict(self.config),
            )
            (hidden / STATE).write_text(json.dumps(asdict(record), indent=1, sort_keys=True, allow_nan=False))
            write_manifest(hidden)
            share(hidden)

            # All of it must be on disk before the folder gets its name.
            if not list_checkpoints(self.folder):
                warn_of_peft(self.policy.model)
            for path in hidden.rglob("*"):
                sync(path)

        self.ranks.on_main(make_empty)
        if is_in_parts:
            from offline_grpo.checkpoint.parts import save_parts  # which takes a second

            tensors = save_parts(tensors, trainer, self.ranks.rank)
            self.ranks.gather([self.ranks.rank])  # all have written
        sharding.lead(write_all, tensors)

    def commit(self, iteration: int) -> None:
        """Rename what was written, then delete all but the best one and the newest `keep_last_k`. Later ones, which
        were damaged when the run resumed, do not count.
        """
        if not self.ranks.is_main:
            return

        # The link to the best one first: a run that is killed in between repeats the iteration, and sets it again.
        final, best = self._path(iteration), self.milestones.best_iteration
        if best is not None:
            link = self.folder / f".{BEST}"
            link.unlink(missing_ok=True)
            link.symlink_to(self._path(best).name)
            link.replace(self.folder / BEST)

        # The checkpoint counts from here on. One that is replaced is moved in one step: deleting it takes long enough
        # to be killed in.
        hidden = self.folder / f".writing_{final.name}"
        replaced = self.folder / f".writing_{final.name}_replaced"
        if final.exists():
            os.rename(final, replaced)
        os.replace(hidden, final)
        sync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

        # What is no longer needed goes, the best one never.
        found = list_checkpoints(self.folder)
        for old in found[: found.index(final) + 1][: -self.keep_last_k] if self.keep_last_k is not None else []:
            if best is None or old != self._path(best):
                shutil.rmtree(old)

    def _path(self, iteration: int) -> Path:
        return self.folder / f"iter_{iteration:03d}"

    def restore(self, checkpoint: Path) -> TrainerState:
        """Load optimizer, master weights, counters and milestones (the model itself was loaded from the same folder).
        Raises ValueError for a checkpoint of another model.
        """
        record, trainer, own = read_state(checkpoint), checkpoint / "trainer", self.policy.masters.state_dict()

        # Of each tensor what this process holds: read from parts, or cut out of whole ones.
        if (trainer / PARTS).exists():
            from offline_grpo.checkpoint.parts import Parts  # which takes a second

            parts, saved = Parts(trainer), torch.load(trainer / PARTS, map_location="cpu", weights_only=True)
            masters, optimizer = saved["masters"], saved["optimizer"]
            parameters = [p for group in self.updater.optimizer.param_groups for p in group["params"]]
            for number, means in optimizer["optimizer"]["state"].items():
                means.update({name: parts.like(parameters[number], value) for name, value in means.items()})
            masters = {name: parts.like(own[name], value) for name, value in masters.items()}
        else:
            like, file = self.updater.passes.sharding.like, trainer / "masters.safetensors"
            masters = load_file(file) if file.exists() else {}
            masters = {name: like(own[name], t) if name in own else t for name, t in masters.items()}
            is_copied = self.policy.is_sharded or self.policy.masters.host is not None  # so not in memory twice
            file = trainer / "optimizer.pt"
            optimizer = torch.load(file, map_location="cpu", weights_only=True, mmap=is_copied)

        # They must be those of this model, before anything is changed.
        found, needed = ({name: t.shape for name, t in values.items()} for values in (masters, own))
        if found != needed:
            names = sorted(name for name in {**found, **needed} if found.get(name) != needed.get(name))
            raise ValueError(f"{checkpoint}: has masters of another model ({', '.join(names[:3])})")
        self.updater.load_state_dict(optimizer, record.counters)
        self.policy.masters.load_state_dict(masters)
        self.milestones.load_state_dict(record.milestones)
        best = self.milestones.best_iteration
        if best is not None and not self._path(best).exists():
            self.milestones.forget_best()  # it resumes an older checkpoint than the best one, which is gone
        return record
