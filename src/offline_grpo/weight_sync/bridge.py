"""`vllm_bridge_config.json`: which memory of a vLLM worker holds which parameter. Written whole or not at all, read
field by field.

A handle only opens memory: nothing in the file is executed, unpickled or used as a path. It names the worker's process,
by pid and start time, so a file that outlived its server is refused.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from offline_grpo.disk import read_regular, write_whole
from offline_grpo.errors import EngineError, reason_of

T = TypeVar("T")

FORMAT = 1
MAX_BYTES = 64 * 2**20
"""Of the file. A tensor takes about 500 bytes in it, and large models have some thousands."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StorageHandle:
    """A piece of memory: an open file of the worker (CPU), or a CUDA IPC handle with its offset and reference counter."""

    kind: str
    num_bytes: int
    fd: int = -1
    handle: str = ""
    offset_bytes: int = 0
    counter_handle: str = ""
    counter_offset: int = 0
    event_handle: str = ""
    event_sync_required: bool = False


@dataclass(frozen=True)
class SharedTensor:
    """A tensor of the server: a view of `storages[storage]`. Offset and strides count elements."""

    name: str
    storage: int
    offset: int
    shape: list[int]
    stride: list[int]
    dtype: str


@dataclass(frozen=True)
class ParamMapping:
    """A parameter of the checkpoint: `rows` rows of the server's tensor `tensor`, from `row` on."""

    name: str
    tensor: str
    row: int
    rows: int
    shape: list[int]


@dataclass(frozen=True)
class Bridge:
    """Everything that attaching needs to know."""

    run_id: str
    pid: int
    start_time: int
    model: str
    device: str
    gpu_uuid: str | None
    storages: list[StorageHandle]
    tensors: list[SharedTensor]
    param_mappings: list[ParamMapping]

    @classmethod
    def from_worker(
        cls, run_id: str, model: str, described: Mapping[str, Any], exported: Mapping[str, Any], layout: Any
    ) -> Bridge:
        """What the worker extension told us, checked like a file."""
        record = {
            "run_id": run_id,
            "pid": described["pid"],
            "start_time": start_time_of(described["pid"]) or 0,
            "model": model,
            "device": described["device"],
            "gpu_uuid": described["gpu_uuid"],
            **exported,
            "param_mappings": layout,
        }
        return _parse_bridge(record, "the server's answer")

    def write(self, path: Path) -> None:
        """Save, for tools that attach later and for people who want to look. The file appears complete."""
        write_whole(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1), is_private=True)

    @classmethod
    def read(cls, path: Path) -> Bridge:
        """Load what `write` saved.

        The file must be this user's or root's: whoever wrote it chooses the process whose memory is opened, and trained
        into.

        Raises:
            EngineError: no such file, somebody else's, not in this format, or of a server that has ended since.
        """
        try:
            content = read_regular(path, MAX_BYTES)
            owner = path.stat().st_uid
            record = json.loads(content)
        except (OSError, ValueError, RecursionError) as error:
            raise EngineError(
                f"{path}: no readable bridge file ({error}); it is in the run folder of a weight_sync=shared_vllm run"
            ) from error
        if owner not in (0, os.geteuid()):
            raise EngineError(
                f"{path}: belongs to user {owner}, who could lead the trainer into other memory; take your own run's"
            )
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise EngineError(f"{path}: is no bridge file of format {FORMAT}")
        bridge = _parse_bridge({key: value for key, value in record.items() if key != "format"}, str(path))
        if start_time_of(bridge.pid) != bridge.start_time:
            raise _refused(
                str(path), f"is stale: the server that wrote it (pid {bridge.pid}, run {bridge.run_id}) has ended"
            )
        return bridge

    def open(self, device: torch.device) -> dict[str, Tensor]:
        """The server's memory as tensors of ours: checkpoint name -> view. Nothing is copied.

        Raises:
            EngineError: the memory cannot be opened from here.
        """
        storages = [self._open_storage(handle, device) for handle in self.storages]
        whole = {}
        for t in self.tensors:
            view = torch.empty(0, dtype=DTYPES[t.dtype], device=device)
            whole[t.name] = view.set_(storages[t.storage], t.offset, t.shape, t.stride)
        return {m.name: _part(whole[m.tensor], m) for m in self.param_mappings}

    def _open_storage(self, handle: StorageHandle, device: torch.device) -> Any:
        try:
            if handle.kind == "file":
                return torch.UntypedStorage.from_file(
                    _memory_file(self.pid, handle), shared=True, nbytes=handle.num_bytes
                )
            return torch.UntypedStorage._new_shared_cuda(
                device.index or 0,
                base64.b64decode(handle.handle),
                handle.num_bytes,
                handle.offset_bytes,
                base64.b64decode(handle.counter_handle),
                handle.counter_offset,
                base64.b64decode(handle.event_handle),
                handle.event_sync_required,
            )
        except (RuntimeError, OSError, ValueError) as error:  # ValueError: no base64
            raise EngineError(
                f"memory of the server (pid {self.pid}) cannot be opened ({reason_of(error)}): trainer and server must run on one "
                "machine, as one user, not in separate containers, and without expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
            ) from error


def start_time_of(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None if there is no such process. With the pid it
    is unique.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _memory_file(pid: int, handle: StorageHandle) -> str:
    """Anonymous memory alone, and no more of it than there is: torch would write into any other file, and extend one
    that is too short.
    """
    path = f"/proc/{pid}/fd/{handle.fd}"
    if not os.readlink(path).startswith("/memfd:") or os.stat(path).st_size < handle.num_bytes:
        raise OSError(f"{path} is no memory of {handle.num_bytes} bytes")
    return path


def _parse_bridge(record: Mapping[str, Any], source: str) -> Bridge:
    if not isinstance(record, dict):
        raise _refused(source, "is no bridge record")
    values = dict(record)
    for key, cls in (("storages", StorageHandle), ("tensors", SharedTensor), ("param_mappings", ParamMapping)):
        if not isinstance(values.get(key), list):
            raise _refused(source, f"{key} must be a list")
        values[key] = [_parse(cls, item, f"{source}: {key}[{index}]") for index, item in enumerate(values[key])]
    bridge = _parse(Bridge, values, source)
    for handle in bridge.storages:
        if handle.kind not in ("file", "cuda"):
            raise _refused(source, f"storages of kind {handle.kind[:60]!r} are unknown")
    names = {tensor.name: tensor for tensor in bridge.tensors}
    for tensor in bridge.tensors:
        _check_tensor(tensor, bridge, source)
    for mapping in bridge.param_mappings:
        tensor = names.get(mapping.tensor)
        if (
            tensor is None
            or mapping.row < 0
            or mapping.rows < 1
            or mapping.row + mapping.rows > (tensor.shape or [1])[0]
        ):
            raise _refused(source, f"{mapping.name} is not inside {mapping.tensor}")
    return bridge


def _refused(source: str, reason: str) -> EngineError:
    """One line, however long and of whatever characters the names and values are."""
    return EngineError(f"{source}: {' '.join(reason.split())[:400]}")


def _part(tensor: Tensor, mapping: ParamMapping) -> Tensor:
    return tensor.narrow(0, mapping.row, mapping.rows) if tensor.dim() else tensor  # a scalar has no rows


def _check_tensor(tensor: SharedTensor, bridge: Bridge, source: str) -> None:
    dtype = DTYPES.get(tensor.dtype)
    numbers = [*tensor.shape, *tensor.stride, tensor.offset]
    is_good = (
        dtype is not None and 0 <= tensor.storage < len(bridge.storages) and len(tensor.shape) == len(tensor.stride)
    )
    limit = max(bridge.storages[tensor.storage].num_bytes, 1) if is_good else 0
    if not (is_good and all(type(number) is int and 0 <= number <= limit for number in numbers)):
        raise _refused(source, f"{tensor.name} is no tensor that can be shared ({tensor})")
    assert dtype is not None
    # a dimension's elements must not lie within those of the next smaller one: writing to one would change others
    needed = 1
    for stride, size in sorted(zip(tensor.stride, tensor.shape, strict=True)):
        if size > 1 and stride < needed:
            raise _refused(source, f"{tensor.name} has elements that share memory ({tensor})")
        needed = max(needed, stride * size)
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride, strict=True))
    if (last + 1) * dtype.itemsize > bridge.storages[tensor.storage].num_bytes:
        raise _refused(source, f"{tensor.name} reaches beyond its memory")


def _is_count(value: int) -> bool:
    """True and False are no numbers here, and C++ takes no more than 64 bits."""
    return not isinstance(value, bool) and abs(value) < 2**63


def _parse(cls: type[T], item: Any, source: str) -> T:
    """A dataclass from a record whose fields have exactly its names and types. Extra fields are ignored."""
    if not isinstance(item, dict):
        raise _refused(source, "must be a record")
    types = {"str": str, "int": int, "bool": bool, "str | None": (str, type(None))}
    values = {}
    for name, field in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        if name not in item:
            continue
        expected = types.get(field.type, list)
        if not isinstance(item[name], expected) or (expected is int and not _is_count(item[name])):
            raise _refused(source, f"{name} must be {field.type}, and is {str(item[name])[:60]!r}")
        values[name] = item[name]
    try:
        return cls(**values)
    except TypeError as error:
        raise _refused(source, str(error)) from error
