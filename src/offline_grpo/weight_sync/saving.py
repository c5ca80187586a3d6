"""Weights as a folder that servers load."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError

from offline_grpo.errors import EngineError, reason_of
from offline_grpo.model.saving import save_adapter, save_policy
from offline_grpo.weight_sync.snapshot import Snapshot


def save_weights(snapshot: Snapshot, folder: Path) -> int:
    """Write the model with its tokenizer, or its adapter alone. Returns the size in bytes.

    Raises:
        EngineError: no room, or no permission; nothing is left behind.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        save = save_policy if snapshot.policy.lora_rank is None else save_adapter
        save(snapshot.policy, snapshot.weights(), folder)
        return sum(path.stat().st_size for path in folder.iterdir())
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise EngineError(
            f"the weights cannot be saved to {folder} ({reason_of(error)}); make room there: /dev/shm is as large as the container's "
            "--shm-size, and weight_sync.location=disk (reload; eval.location for a server of evaluations) does without it"
        ) from error
