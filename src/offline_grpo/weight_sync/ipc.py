"""vLLM's weight-transfer engine over CUDA IPC: trainer and servers on one GPU, each with a copy; the servers copy from
the trainer's.
"""

from __future__ import annotations

import atexit
import base64
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from offline_grpo.engine.background import at_once
from offline_grpo.engine.engine import ServerEngine
from offline_grpo.engine.guardian import remove_cuda_driver_files
from offline_grpo.errors import ConfigError
from offline_grpo.weight_sync.snapshot import Named, Snapshot, gpu_uuid
from offline_grpo.weight_sync.strategy import SyncRequirements
from offline_grpo.weight_sync.weight_transfer import WeightTransfer


@dataclass(kw_only=True)
class Ipc(WeightTransfer):
    """vLLM unpickles the handles, so a server must listen on loopback."""

    name = "ipc"

    @property
    def requires(self) -> SyncRequirements:
        """See `WeightSync.requires`."""
        env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OFFLINE_GRPO_NEEDS_RAY": "1"}
        return replace(super().requires, gpu=True, placement="same", env=env)

    def attach(self, engine: ServerEngine, snapshot: Snapshot) -> None:
        """See `WeightSync.attach`.

        Raises:
            ConfigError: the policy is on no GPU, or on another one than the server.
        """
        policy = snapshot.policy
        described = engine.control.describe()
        ours = gpu_uuid(policy.device)
        if ours is None or described["gpu_uuid"] != ours:
            raise ConfigError(
                f"weight_sync=ipc: the policy is on {policy.device} ({ours or 'no GPU'}), the server on "
                f"{described['device']} "
                f"({described['gpu_uuid'] or 'no GPU'}); both must be on one GPU: use nccl for two, reload for CPUs"
            )
        atexit.register(remove_cuda_driver_files)
        engine.control.post("/init_weight_transfer_engine", {"init_info": {}})

    def send(self, engines: Sequence[ServerEngine], bucket: Sequence[Named], update_info: dict[str, Any]) -> None:
        """See `WeightTransfer.send`. Handles of the policy's own tensors; a server has copied them when it answers."""
        uuid = gpu_uuid(bucket[0][1].device)
        tensors = [tensor.detach().contiguous() for _, tensor in bucket]
        # A handle is counted down by the one process that opens it, so each server gets handles of its own.
        handles = {engine: [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors] for engine in engines}
        torch.cuda.synchronize()

        def update(engine: ServerEngine) -> None:
            pickled = base64.b64encode(pickle.dumps(handles[engine])).decode()
            engine.control.post(
                "/update_weights", {"update_info": {**update_info, "ipc_handles_pickled": pickled}}, timeout_s=600
            )

        at_once(update, engines)
