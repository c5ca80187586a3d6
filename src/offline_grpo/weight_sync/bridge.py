"""`vllm_bridge_config.json`: which memory of a vLLM worker holds which parameter.

It names the worker's process, by pid and start time, so a file that outlived its server is refused. What it describes
is compared with the policy, shape, dtype and bits, before anything is trained (`shared_vllm.check_coverage`).
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offline_grpo.disk import write_whole
from offline_grpo.errors import EngineError, reason_of

FORMAT = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Bridge:
    """Everything that attaching needs to know.

    Args:
        storages: pieces of memory: an open file of the worker (CPU), or a CUDA IPC handle with its offset and
            reference counter.
        tensors: of the server, views of `storages`. Offset and strides count elements.
        param_mappings: parameters of the checkpoint: `rows` rows of the server's tensor `tensor`, from `row` on.
    """

    run_id: str
    pid: int
    start_time: int
    model: str
    device: str
    gpu_uuid: str | None
    storages: Records
    tensors: Records
    param_mappings: Records

    @classmethod
    def from_worker(
        cls, run_id: str, model: str, described: Mapping[str, Any], exported: Mapping[str, Any], layout: Records
    ) -> Bridge:
        """From the answers of the worker extension."""
        return cls(
            run_id=run_id,
            pid=described["pid"],
            start_time=start_time_of(described["pid"]) or 0,
            model=model,
            device=described["device"],
            gpu_uuid=described["gpu_uuid"],
            storages=exported["storages"],
            tensors=exported["tensors"],
            param_mappings=layout,
        )

    def write(self, path: Path) -> None:
        """Save, for tools that attach later and for people who want to look. The file appears complete."""
        write_whole(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1), is_private=True)

    @classmethod
    def read(cls, path: Path) -> Bridge:
        """Load what `write` saved.

        Raises:
            EngineError: no such file, not in this format, or of a server that has ended since.
        """
        try:
            record = json.loads(path.read_text())
            if record.pop("format") != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            bridge = cls(**record)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(
                f"weight_sync.bridge_config={path}: no bridge file ({reason_of(error)}); it is in the run folder of a "
                "weight_sync=shared_vllm run"
            ) from error
        if start_time_of(bridge.pid) != bridge.start_time:
            raise EngineError(
                f"{path}: is stale: the server that wrote it (pid {bridge.pid}, run {bridge.run_id}) has ended"
            )
        return bridge

    def open(self, device: torch.device) -> dict[str, Tensor]:
        """The server's memory as tensors of ours: checkpoint name -> view. Nothing is copied.

        Raises:
            EngineError: the memory cannot be opened from here.
        """
        try:
            storages = [self._open_storage(handle, device) for handle in self.storages]
        except (RuntimeError, OSError) as error:
            raise EngineError(
                f"memory of the server (pid {self.pid}) cannot be opened ({reason_of(error)}): trainer and server "
                "must run on one "
                "machine, as one user, not in separate containers, and without expandable_segments in "
                "PYTORCH_CUDA_ALLOC_CONF"
            ) from error
        whole = {}
        for t in self.tensors:
            view = torch.empty(0, dtype=DTYPES[t["dtype"]], device=device)
            whole[t["name"]] = view.set_(storages[t["storage"]], t["offset"], t["shape"], t["stride"])
        return {m["name"]: _part(whole[m["tensor"]], m) for m in self.param_mappings}

    def _open_storage(self, handle: Mapping[str, Any], device: torch.device) -> Any:
        if handle["kind"] == "file":
            path, num_bytes = f"/proc/{self.pid}/fd/{handle['fd']}", handle["num_bytes"]
            if os.stat(path).st_size < num_bytes:  # torch would make it larger
                raise OSError(f"{path} has fewer than {num_bytes} bytes")
            return torch.UntypedStorage.from_file(path, shared=True, nbytes=num_bytes)
        return torch.UntypedStorage._new_shared_cuda(
            device.index or 0,
            base64.b64decode(handle["handle"]),
            handle["num_bytes"],
            handle["offset_bytes"],
            base64.b64decode(handle["counter_handle"]),
            handle["counter_offset"],
            base64.b64decode(handle["event_handle"]),
            handle["event_sync_required"],
        )


def start_time_of(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None if there is no such process. With the pid it
    is unique.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def _part(tensor: Tensor, mapping: Mapping[str, Any]) -> Tensor:
    return tensor.narrow(0, mapping["row"], mapping["rows"]) if tensor.dim() else tensor  # a scalar has no rows
