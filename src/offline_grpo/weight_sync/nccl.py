"""vLLM's weight-transfer engine over NCCL: trainer and server on different GPUs, weights broadcast from one to the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from offline_grpo.engine.background import in_background
from offline_grpo.engine.engine import ServerEngine
from offline_grpo.engine.ports import address_towards, choose_port
from offline_grpo.errors import ConfigError
from offline_grpo.weight_sync.snapshot import Named, Snapshot, gpu_uuid
from offline_grpo.weight_sync.strategy import SyncRequirements
from offline_grpo.weight_sync.weight_transfer import WeightTransfer


@dataclass(kw_only=True)
class Nccl(WeightTransfer):
    """The trainer is rank 0 of a group with each server's workers. Needs vLLM in the trainer's environment, for its
    communicator.

    Args:
        master_address: of the trainer's machine, as the server's workers reach it; None: from which it reaches the
            server.
    """

    master_address: str | None

    name = "nccl"

    _groups: dict[ServerEngine, Any] = field(default_factory=dict, init=False)

    @property
    def requires(self) -> SyncRequirements:
        """See `WeightSync.requires`."""
        return replace(super().requires, gpu=True, placement="other")

    def attach(self, engine: ServerEngine, snapshot: Snapshot) -> None:
        """See `WeightSync.attach`. Forms the group.

        Raises:
            ConfigError: no GPU, the same GPU as the server, or no vLLM here.
        """
        policy = snapshot.policy
        described = engine.control.describe()
        ours = gpu_uuid(policy.device)
        if ours is None or described["gpu_uuid"] in (None, ours):
            raise ConfigError(
                f"weight_sync=nccl: the policy is on {policy.device} ({ours or 'no GPU'}), the server on GPU "
                f"{described['gpu_uuid']}; NCCL "
                "needs two GPUs: give the server its own by placement.engine_devices, or use ipc or shared_vllm on one"
            )
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            raise ConfigError(
                f"weight_sync=nccl: needs vLLM in the trainer's environment ({error}): uv sync --extra vllm"
            ) from error
        world_size = 1 + engine.control.get("/get_world_size").json()["world_size"]
        address = self.master_address or address_towards(engine.server.base_url)
        port = choose_port(address, None, key="weight_sync.master_address")
        init_info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        joined = in_background(
            lambda: engine.control.post("/init_weight_transfer_engine", {"init_info": init_info}, timeout_s=300)
        )
        met = in_background(
            lambda: StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=world_size)
        )
        wait(
            [joined, met], return_when=FIRST_COMPLETED
        )  # each side waits for the other: a server that refuses says so here
        if joined.done():
            joined.result()
        self._groups[engine] = PyNcclCommunicator(met.result(), device=policy.device)
        joined.result()

    def send(self, engines: Sequence[ServerEngine], bucket: Sequence[Named], update_info: dict[str, Any]) -> None:
        """See `WeightTransfer.send`. Broadcasts in the order of the names, while the servers answer the request that
        announces them.

        Each tensor goes to all servers before the next one: their loaders, which take most of the time, work at the
        same time.
        """
        received = [in_background(partial(self._announce, engine, update_info)) for engine in engines]
        for _, tensor in bucket:
            whole, stream = tensor.detach().contiguous(), torch.cuda.current_stream(tensor.device)
            for engine in engines:
                self._groups[engine].broadcast(whole, src=0, stream=stream)
        for answer in received:
            answer.result()
        torch.cuda.synchronize(bucket[0][1].device)

    def _announce(self, engine: ServerEngine, update_info: dict[str, Any]) -> None:
        engine.control.post("/update_weights", {"update_info": update_info}, timeout_s=600)
