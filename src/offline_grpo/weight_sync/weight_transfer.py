"""Whole weights from GPU to GPU, without a file: over CUDA IPC by vLLM's own weight-transfer engine, and over NCCL.

Names and shapes are those of the checkpoint; the server fuses and splits them as when it loads one.
"""

from __future__ import annotations

import atexit
import base64
import pickle
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import reduce_tensor

from offline_grpo.engine.http import Refused, address_towards, choose_port, is_loopback
from offline_grpo.engine.inside_vllm.offline_grpo_weights import empty_bucket, meet
from offline_grpo.engine.spawn import remove_cuda_driver_files
from offline_grpo.engine.streaming import at_once, in_background, started
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import ConfigError, require
from offline_grpo.model.layers import text_parameters
from offline_grpo.model.policy import buckets
from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.snapshot import Snapshot, gpu_uuid, weights_tag
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
    """

    bucket_mib: int

    fix: ClassVar[str]  # where trainer and server are not on GPUs that suit

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.bucket_mib >= 1, "weight_sync.bucket_mib", self.bucket_mib, "must be at least 1")

    def attach(self, engine: VllmEngine, snapshot: Snapshot) -> None:
        """Raises ConfigError if the policy and the server are not on GPUs that weights can travel between so."""
        device, theirs = snapshot.policy.device, engine.describe()["gpu_uuid"]
        ours = gpu_uuid(device)
        if ours is None or theirs is None or (ours == theirs) != (self.needs.placement == "same"):
            where = f"the policy is on {device} (GPU {ours}), the server on GPU {theirs}"
            raise ConfigError(f"weight_sync={self.name}: {where}; {self.fix}")

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[StagedWeights]:
        policy, named = snapshot.policy, list(text_parameters(snapshot.policy.causal_lm).values())
        num_bytes = sum(p.numel() * (policy.dtype if policy.is_sharded else p.dtype).itemsize for p in named)
        yield StagedWeights(version=version, num_tensors=len(named), num_bytes=num_bytes, snapshot=snapshot)


@dataclass(kw_only=True)
class Ipc(WeightTransfer):
    """Trainer and servers on one GPU, each with a copy; the servers copy from the trainer's. vLLM unpickles the
    handles, so a server must listen on loopback.
    """

    name = "ipc"
    fix = "both must be on one GPU: use nccl for two, reload for CPUs"
    needs = SyncRequirements(
        engine=VllmEngine,
        gpu=True,
        placement="same",
        env={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OFFLINE_GRPO_NEEDS_RAY": "1"},
    )

    def attach(self, engine: VllmEngine, snapshot: Snapshot) -> None:
        super().attach(engine, snapshot)
        atexit.register(remove_cuda_driver_files)
        engine.post("/init_weight_transfer_engine", {"init_info": {}})

    def deliver(self, engines: Sequence[VllmEngine], staged: StagedWeights) -> float:
        """All engines get a bucket before the next one is read, because the policy's weights are read once.

        They are paused for the whole update: parameters have no storage between start and finish. After an error they
        stay paused.
        """
        # The steps of one server; all servers take each together.
        began = time.perf_counter()

        def begin(engine: VllmEngine) -> None:
            engine.pause(self.pause_mode)
            engine.post("/start_weight_update")

        def finish(engine: VllmEngine) -> None:
            engine.post("/finish_weight_update", {}, timeout_s=UPDATE_S)
            engine.set_tag(weights_tag(staged.version))
            engine.resume()

        at_once(begin, engines)
        for bucket in staged.snapshot.text_buckets(self.bucket_mib * 2**20):
            names, dtype_names, shapes = zip(*(described(name, tensor) for name, tensor in bucket), strict=True)
            update_info = {"names": [*names], "dtype_names": [*dtype_names], "shapes": [*shapes]}
            self.send(engines, [tensor.detach().contiguous() for _, tensor in bucket], update_info)
        at_once(finish, engines)
        return time.perf_counter() - began

    def send(self, engines: Sequence[VllmEngine], tensors: Sequence[Any], update_info: dict[str, Any]) -> None:
        """One update: tell the servers what comes (`update_info` holds names, dtype_names and shapes), with handles of
        the policy's own tensors. A server has copied them when it answers.
        """
        uuid = gpu_uuid(tensors[0].device)
        # A handle is counted down by the one process that opens it, so each server gets handles of its own.
        handles = {engine: [{uuid: reduce_tensor(tensor)[1]} for tensor in tensors] for engine in engines}
        torch.cuda.synchronize()

        def update(engine: VllmEngine) -> None:
            pickled = base64.b64encode(pickle.dumps(handles[engine])).decode()
            info = {**update_info, "ipc_handles_pickled": pickled}
            with names_known():
                engine.post("/update_weights", {"update_info": info}, timeout_s=UPDATE_S)

        at_once(update, engines)


@dataclass(kw_only=True)
class Nccl(WeightTransfer):
    """Trainer and servers on different GPUs: one broadcast to all workers of all servers.

    The first push to a server goes through vLLM's own loader. If its proof finds all weights there bit for bit, where
    `inside_vllm/offline_grpo_weights.py` says, later ones are written there.
    """

    master_address: str | None

    name = "nccl"
    fix = "NCCL needs two GPUs: give the server its own by placement.engine_devices, or use ipc or shared_vllm on one"
    needs = SyncRequirements(engine=VllmEngine, gpu=True, placement="other")

    _group: Any = field(default=None, init=False)
    _in_place: set[VllmEngine] = field(default_factory=set, init=False)

    def attach(self, engine: VllmEngine, snapshot: Snapshot) -> None:
        """The next push forms the group anew."""
        super().attach(engine, snapshot)
        self._in_place.discard(engine)
        self._leave()

    def deliver(self, engines: Sequence[VllmEngine], staged: StagedWeights) -> float:
        """While a bucket is on its way, the next one is read. After an error the servers stay paused."""
        snapshot, policy, tag = staged.snapshot, staged.snapshot.policy, weights_tag(staged.version)
        device, max_bytes = policy.device, self.bucket_mib * 2**20

        # The group: our process, then the workers of one server after the other. Rank 0 is ours, and listens at an
        # address that the servers reach.
        if self._group is None:
            sizes = [engine.get("/get_world_size").json()["world_size"] for engine in engines]
            found = [address_towards(engine.base_url) for engine in engines]
            address = self.master_address or next((one for one in found if not is_loopback(one)), found[0])
            port = choose_port(address, None, key="weight_sync.master_address")
            meeting = in_background(lambda: meet(address, port, 0, 1 + sum(sizes), device))

            def join(place: int) -> None:
                words = {"address": address, "port": port, "first_rank": 1 + sum(sizes[:place])}
                engines[place].call_workers("grpo_join", timeout_s=300, world_size=1 + sum(sizes), **words)

            _together([*started(join, range(len(engines))), meeting])
            self._group = meeting.result()
        group = self._group

        # While the servers pause, the first bucket is read, and name, dtype and shape of each tensor in each are noted.
        began = time.perf_counter()
        pausing = started(lambda engine: engine.pause(self.pause_mode), engines)
        reading = snapshot.text_buckets(max_bytes)
        first = next(reading)
        named = (
            (name, torch.empty(p.shape, dtype=policy.dtype if policy.is_sharded else p.dtype, device="meta"))
            for name, p in text_parameters(policy.causal_lm).items()
        )
        plan = [[described(name, tensor) for name, tensor in bucket] for bucket in buckets(named, max_bytes)]
        for paused in wait(pausing).done:
            paused.result()

        # The servers receive while this process sends; the next bucket is read while one is on its way.
        def receive(engine: VllmEngine) -> None:
            in_place = engine in self._in_place
            with names_known():
                engine.call_workers("grpo_receive", buckets=plan, in_place=in_place, tag=tag, timeout_s=UPDATE_S)
            engine.resume()

        receiving = started(receive, engines)
        before: Any = None
        try:
            for shapes, bucket in zip(plan, chain([first], reading), strict=True):
                flat, tensors = empty_bucket(shapes, device)
                torch._foreach_copy_(tensors, [tensor for _, tensor in bucket])  # pyright: ignore[reportPrivateImportUsage]
                work = group.broadcast(flat, 0)
                if before is not None:
                    before.wait()
                before = work
            before.wait()
            _together(receiving)
        except Exception:
            self._leave()  # ends broadcasts that a dead server keeps waiting
            raise
        return time.perf_counter() - began

    def verify(self, engines: Sequence[VllmEngine], snapshot: Snapshot, version: int) -> list[Proof]:
        """What has proven where the weights are stays proven until the server starts anew."""
        proofs = super().verify(engines, snapshot, version)
        num_all = len(text_parameters(snapshot.policy.causal_lm))
        self._in_place |= {e for e, proof in zip(engines, proofs, strict=True) if proof.num_equal == num_all}
        return proofs

    def detach(self, engine: VllmEngine) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None


@contextmanager
def names_known() -> Iterator[None]:
    """Tensors have transformers' names, by which vLLM's loaders of some mixtures of experts do not know them."""
    try:
        yield
    except Refused as error:
        fix = "if vLLM does not know a tensor by this name, use weight_sync=reload, whose files have the checkpoint's"
        raise Refused(f"{error}; {fix}") from error


def described(name: str, tensor: torch.Tensor) -> tuple[str, str, list[int]]:
    """Name, dtype and shape, as servers are told them."""
    return name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _together(outcomes: Sequence[Future[Any]]) -> None:
    """Wait for all. Raises the first error at once: the others wait for the one that failed."""
    for outcome in wait(outcomes, return_when=FIRST_EXCEPTION).done:
        outcome.result()
