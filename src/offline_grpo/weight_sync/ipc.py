"""vLLM's weight-transfer engine over CUDA IPC: trainer and server on one GPU, each with a copy; the server copies from the trainer's."""

from __future__ import annotations

import atexit
import base64
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from offline_grpo.engine.guardian import remove_cuda_driver_files
from offline_grpo.errors import ConfigError
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.weight_transfer import Named, WeightTransfer


@dataclass(kw_only=True)
class Ipc(WeightTransfer):
    """vLLM takes handles pickled, and only if told so by an environment variable: hence never from another address than this machine."""

    needs_gpu = True
    gpu_rule = "same"
    variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OFFLINE_GRPO_NEEDS_RAY": "1"}  # noqa: RUF012

    def attach(self, policy: Policy) -> None:
        """See `ServerSync.attach`.

        Raises:
            ConfigError: the policy is on no GPU, or on another one than the server.
        """
        described = self.control.call_worker("grpo_describe")
        ours = gpu_uuid(policy.device)
        if ours is None or described["gpu_uuid"] != ours:
            raise ConfigError(
                f"weight_sync=ipc: the policy is on {policy.device} ({ours or 'no GPU'}), the server on {described['device']} "
                f"({described['gpu_uuid'] or 'no GPU'}); both must be on one GPU: use nccl for two, reload for CPUs"
            )
        atexit.register(remove_cuda_driver_files)
        self.control.post("/init_weight_transfer_engine", {"init_info": {}})

    def send(self, bucket: Sequence[Named], update_info: dict[str, Any]) -> None:
        """Handles of the policy's own tensors: nothing is staged. The server has copied when it answers."""
        uuid = gpu_uuid(bucket[0][1].device)
        handles = [{uuid: reduce_tensor(tensor.detach().contiguous())[1]} for _, tensor in bucket]
        update_info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        torch.cuda.synchronize()
        self.control.post("/update_weights", {"update_info": update_info}, timeout_s=600)


def gpu_uuid(device: torch.device) -> str | None:
    """The physical GPU behind a device, None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
