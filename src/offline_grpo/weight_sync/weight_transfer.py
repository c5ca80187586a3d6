"""vLLM's own weight-transfer engine: the protocol, and the strategies over CUDA IPC and over NCCL.

    init once; then pause -> start -> update (names, dtypes, shapes; the data travels beside) -> finish -> flush ->
    resume

Names and shapes are those of the checkpoint; the server fuses and splits them as when it loads one. Without packing,
the payloads of all versions are the same.
"""

from __future__ import annotations

import atexit
import base64
import pickle
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from offline_grpo.engine.background import at_once, in_background
from offline_grpo.engine.engine import Engine
from offline_grpo.engine.guardian import remove_cuda_driver_files
from offline_grpo.engine.ports import address_towards, choose_port
from offline_grpo.errors import ConfigError, require
from offline_grpo.model.layers import text_parameters
from offline_grpo.weight_sync.snapshot import Snapshot, buckets, gpu_uuid, weights_tag
from offline_grpo.weight_sync.strategy import PausingSync, Staged, SyncRequirements

UPDATE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class StagedWeights(Staged):
    """Weights that are read as they are sent, a bucket at a time."""

    snapshot: Snapshot


@dataclass(kw_only=True)
class WeightTransfer(PausingSync):
    """A `WeightSync` through /init_weight_transfer_engine, /start_weight_update, /update_weights and
    /finish_weight_update.

    Args:
        bucket_mib: parameters sent in one update, in MiB.
    """

    bucket_mib: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bucket_mib >= 1, "weight_sync.bucket_mib", self.bucket_mib, "must be at least 1")

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[StagedWeights]:
        policy, named = snapshot.policy, list(text_parameters(snapshot.policy.causal_lm).values())
        num_bytes = sum(p.numel() * (policy.dtype if policy.is_sharded else p.dtype).itemsize for p in named)
        yield StagedWeights(version=version, num_tensors=len(named), num_bytes=num_bytes, snapshot=snapshot)

    def deliver(self, engines: Sequence[Engine], staged: StagedWeights) -> float:
        """See `WeightSync.deliver`. All engines get a bucket before the next one is read, because the policy's weights
        are read once.

        They are paused for the whole update: parameters have no storage between start and finish. After an error they
        stay paused.
        """
        started = time.perf_counter()

        def begin(engine: Engine) -> None:
            engine.control.pause(self.pause_mode)
            engine.control.post("/start_weight_update")

        def finish(engine: Engine) -> None:
            engine.control.post("/finish_weight_update", {}, timeout_s=UPDATE_S)
            engine.control.reset_prefix_cache()
            engine.control.set_tag(weights_tag(staged.version))
            engine.control.resume()

        at_once(begin, engines)
        for bucket in buckets(staged.snapshot.text_weights(), self.bucket_mib * 2**20):
            update_info = {
                "names": [name for name, _ in bucket],
                "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }
            self.send(engines, [tensor.detach().contiguous() for _, tensor in bucket], update_info)
        at_once(finish, engines)
        return time.perf_counter() - started

    @abstractmethod
    def send(self, engines: Sequence[Engine], tensors: Sequence[Any], update_info: dict[str, Any]) -> None:
        """One update: tell the servers what comes (`update_info` holds names, dtype_names and shapes), and hand it over
        to all.
        """


@dataclass(kw_only=True)
class Ipc(WeightTransfer):
    """Trainer and servers on one GPU, each with a copy; the servers copy from the trainer's. vLLM unpickles the
    handles, so a server must listen on loopback.
    """

    name = "ipc"

    @property
    def requires(self) -> SyncRequirements:
        env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OFFLINE_GRPO_NEEDS_RAY": "1"}
        return replace(super().requires, gpu=True, placement="same", env=env)

    def attach(self, engine: Engine, snapshot: Snapshot) -> None:
        """See `WeightSync.attach`.

        Raises:
            ConfigError: the policy is on no GPU, or on another one than the server.
        """
        device, theirs = snapshot.policy.device, engine.control.describe()["gpu_uuid"]
        ours = gpu_uuid(device)
        if ours is None or theirs != ours:
            raise ConfigError(
                f"weight_sync=ipc: the policy is on {device} (GPU {ours}), the server on GPU {theirs}; both must be on "
                "one GPU: use nccl for two, reload for CPUs"
            )
        atexit.register(remove_cuda_driver_files)
        engine.control.post("/init_weight_transfer_engine", {"init_info": {}})

    def send(self, engines: Sequence[Engine], tensors: Sequence[Any], update_info: dict[str, Any]) -> None:
        """See `WeightTransfer.send`. Handles of the policy's own tensors; a server has copied them when it answers."""
        uuid = gpu_uuid(tensors[0].device)
        # A handle is counted down by the one process that opens it, so each server gets handles of its own.
        handles = {engine: [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors] for engine in engines}
        torch.cuda.synchronize()

        def update(engine: Engine) -> None:
            pickled = base64.b64encode(pickle.dumps(handles[engine])).decode()
            info = {**update_info, "ipc_handles_pickled": pickled}
            engine.control.post("/update_weights", {"update_info": info}, timeout_s=UPDATE_S)

        at_once(update, engines)


@dataclass(kw_only=True)
class Nccl(WeightTransfer):
    """Trainer and servers on different GPUs: the trainer is rank 0 of a group with each server's workers. Needs vLLM in
    the trainer's environment, for its communicator.

    Args:
        master_address: of the trainer's machine, as the server's workers reach it; None: from which it reaches the
            server.
    """

    master_address: str | None

    name = "nccl"

    _groups: dict[Engine, Any] = field(default_factory=dict, init=False)

    @property
    def requires(self) -> SyncRequirements:
        return replace(super().requires, gpu=True, placement="other")

    def attach(self, engine: Engine, snapshot: Snapshot) -> None:
        """See `WeightSync.attach`. Forms the group.

        Raises:
            ConfigError: no GPU, the same GPU as the server, or no vLLM here.
        """
        device, theirs = snapshot.policy.device, engine.control.describe()["gpu_uuid"]
        ours = gpu_uuid(device)
        if ours is None or theirs in (None, ours):
            raise ConfigError(
                f"weight_sync=nccl: the policy is on {device} (GPU {ours}), the server on GPU {theirs}; NCCL needs two "
                "GPUs: give the server its own by placement.engine_devices, or use ipc or shared_vllm on one"
            )
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            fix = f"needs vLLM in the trainer's environment ({error}): uv sync --extra vllm"
            raise ConfigError(f"weight_sync=nccl: {fix}") from error
        world_size = 1 + engine.control.get("/get_world_size").json()["world_size"]
        address = self.master_address or address_towards(engine.server.base_url)
        port = choose_port(address, None, key="weight_sync.master_address")
        info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        ask = partial(engine.control.post, "/init_weight_transfer_engine", {"init_info": info}, timeout_s=300)
        joined = in_background(ask)
        met = in_background(
            lambda: StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=world_size)
        )
        wait([joined, met], return_when=FIRST_COMPLETED)  # each side waits for the other: a refusal is heard here
        if joined.done():
            joined.result()
        self._groups[engine] = PyNcclCommunicator(met.result(), device=device)
        joined.result()

    def send(self, engines: Sequence[Engine], tensors: Sequence[Any], update_info: dict[str, Any]) -> None:
        """See `WeightTransfer.send`. Broadcasts in the order of the names, while the servers answer the request that
        announces them.

        Each tensor goes to all servers before the next one: their loaders, which take most of the time, work at the
        same time.
        """
        body = {"update_info": update_info}
        received = [
            in_background(partial(engine.control.post, "/update_weights", body, timeout_s=UPDATE_S))
            for engine in engines
        ]
        stream = torch.cuda.current_stream(tensors[0].device)
        for tensor in tensors:
            for engine in engines:
                self._groups[engine].broadcast(tensor, src=0, stream=stream)
        for answer in received:
            answer.result()
        torch.cuda.synchronize(tensors[0].device)
