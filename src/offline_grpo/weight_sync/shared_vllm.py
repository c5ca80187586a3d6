"""One copy of the weights: the trainer's parameters are views of the vLLM server's own tensors, by CUDA IPC (shared
memory on CPUs).

    attach   server exports handles and layout -> views -> same shape, dtype and bits as the policy? -> p.data = view
    update   optimizer steps on fp32 masters -> pause -> masters rounded into the views -> fence -> flush the prefix
             cache -> resume

Nothing is sent. CUDA graphs and compiled code hold addresses, not values, so they see every update.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offline_grpo.engine.engine import ServerEngine
from offline_grpo.engine.guardian import remove_cuda_driver_files
from offline_grpo.errors import ConfigError, EngineDied
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.bridge import Bridge
from offline_grpo.weight_sync.snapshot import Snapshot, gpu_uuid, this_run, weights_tag
from offline_grpo.weight_sync.strategy import PausingSync, Staged, SyncRequirements, foreign_write

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SharedVllm(PausingSync):
    """See the module. The policy must be loaded on the CPU; `attach` takes it to the server's device without a second
    copy there.

    Args:
        bridge_config: the `vllm_bridge_config.json` of an external server; null asks the server itself, and writes
            the file into the run folder.
    """

    bridge_config: str | None

    name = "shared_vllm"

    _engine: ServerEngine | None = field(default=None, init=False)
    _paused_at: float | None = field(default=None, init=False)
    _addresses: dict[str, int] = field(default_factory=dict, init=False)
    _version: int | None = field(default=None, init=False)  # of the last push to this start of the server

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interval != 1:
            raise ConfigError(
                f"weight_sync.interval={self.interval}: shared weights are always the newest; set it to 1"
            )

    @property
    def requires(self) -> SyncRequirements:
        """See `WeightSync.requires`. The policy can be the memory of one server."""
        return replace(super().requires, in_flight=(), one_engine=True, placement="same", shares_weights=True)

    def attach(self, engine: ServerEngine, snapshot: Snapshot) -> None:
        """See `WeightSync.attach`. Splices the server's memory, which must hold the policy's own bits, into the policy.

        Raises:
            ConfigError: a server whose weights cannot be shared, or do not cover the policy; says what to use instead
            or what is missing. EngineError: its memory cannot be opened.
        """
        policy, self._engine = snapshot.policy, engine
        views = self._open_views(engine, snapshot)
        check_coverage(dict(policy.causal_lm.named_parameters()), views, compare=True)
        self._splice(policy, views)
        policy.become_shared(before_publish=self._pause_to_write)

    def reattach(self, engine: ServerEngine, snapshot: Snapshot) -> None:
        """See `WeightSync.reattach`. Trained weights come back from the masters, frozen ones from the files that the
        server loads.
        """
        policy, self._engine, self._paused_at, self._version = snapshot.policy, engine, None, None
        views = self._open_views(engine, snapshot)
        check_coverage(dict(policy.causal_lm.named_parameters()), views, compare=False)
        with torch.no_grad():
            for name, master in policy.masters.values.items():
                views[name].copy_(
                    master
                )  # before the policy is pointed at it: whatever interrupts this, the policy stays what it was
        self._splice(policy, views)

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[Staged]:
        """See `WeightSync.staged`. The optimizer's updates are in place already."""
        parameters = dict(snapshot.policy.causal_lm.named_parameters())
        moved = [name for name, p in parameters.items() if p.data_ptr() != self._addresses[name]]
        assert not moved, f"parameters have left the server's memory: {moved[:3]}"
        self._pause()
        if self._version is not None:
            self.check_served(snapshot.host, self._version)
        if others := snapshot.policy.masters.differing():
            raise foreign_write(
                snapshot.host.server.base_url, f"wrote to {len(others)} tensors of the policy, {others[0]}"
            )
        if snapshot.policy.compute_device.type == "cuda":
            torch.cuda.synchronize(
                snapshot.policy.compute_device
            )  # the fence: our writes are queued, and must be done before the server goes on
        yield Staged(version=version, num_tensors=len(parameters), num_bytes=0)

    def deliver(self, engines: Sequence[ServerEngine], staged: Staged) -> float:
        """See `WeightSync.deliver`. Makes sure that the server uses the updates and nothing older."""
        [engine] = engines
        engine.control.reset_prefix_cache()
        engine.control.set_tag(weights_tag(staged.version))
        self._version = staged.version
        engine.control.resume()
        assert self._paused_at is not None
        paused_seconds = time.perf_counter() - self._paused_at
        self._paused_at = None
        return paused_seconds

    def _splice(self, policy: Policy, views: dict[str, Tensor]) -> None:
        for name, parameter in policy.causal_lm.named_parameters():
            parameter.data = views[name]
            self._addresses[name] = parameter.data_ptr()

    def _pause(self) -> None:
        """Before the first write of an iteration, so that no token is computed from half of an update."""
        assert self._engine is not None
        if self._paused_at is None:
            started = time.perf_counter()
            self._engine.control.pause(self.pause_mode)
            self._paused_at = started

    def _pause_to_write(self) -> None:
        """A server that died meanwhile is the next push's concern: the masters have the update, and its memory is ours
        to write to.
        """
        try:
            self._pause()
        except EngineDied as death:
            log.warning("%s The update goes on without it.", death)

    def _open_views(self, engine: ServerEngine, snapshot: Snapshot) -> dict[str, Tensor]:
        home = snapshot.policy.compute_device
        described = engine.control.describe()
        for reason in described["refusals"]:
            raise ConfigError(
                f"weight_sync=shared_vllm: {reason}; use weight_sync=ipc on one GPU, nccl on several, or reload"
            )
        if self.bridge_config is not None:
            bridge = Bridge.read(Path(self.bridge_config))
        else:
            exported, layout = (
                engine.control.call_worker("grpo_export"),
                engine.control.call_worker("grpo_layout"),
            )
            bridge = Bridge.from_worker(this_run(), self.start_model(snapshot), described, exported, layout)
            bridge.write(engine.server.log_dir / "vllm_bridge_config.json")
        check_device(bridge, home)
        if home.type == "cuda":
            torch.zeros(1, device=home)  # opening a handle before CUDA is up in this process would crash it
            atexit.register(remove_cuda_driver_files)
        started = time.perf_counter()
        views = bridge.open(home)
        log.info(
            "opened %d storages (%.0f MiB) of the server as %d parameters in %.2f s",
            len(bridge.storages),
            sum(storage["num_bytes"] for storage in bridge.storages) / 2**20,
            len(views),
            time.perf_counter() - started,
        )
        return views


def check_device(bridge: Bridge, device: torch.device) -> None:
    """Raise ConfigError unless the server's memory is on `device`, where the trainer computes."""
    if bridge.device != device.type:
        raise ConfigError(
            f"model.device={device}: the server's weights are on its {bridge.device}; train there, or use "
            "weight_sync=reload"
        )
    if bridge.device == "cuda":
        ours = gpu_uuid(device)
        if bridge.gpu_uuid != ours:
            raise ConfigError(
                f"model.device={device}: that is GPU {ours}, and the server's weights are on GPU {bridge.gpu_uuid}; "
                "put both on one "
                "(placement.engine_devices), or use weight_sync=nccl"
            )


def check_coverage(parameters: dict[str, Any], views: dict[str, Tensor], *, compare: bool) -> None:
    """Every parameter of the policy must have a view of its shape and dtype, with its bits where `compare`.

    Equal bits are what tells plain weights from packed, permuted or derived ones without a list of models.

    Raises:
        ConfigError: lists what is missing or different.
    """
    problems = [f"{name}: the server has no such tensor" for name in parameters if name not in views]
    for name, parameter in parameters.items():
        view = views.get(name)
        if view is None:
            continue
        if view.shape != parameter.shape or view.dtype != parameter.dtype:
            problems.append(f"{name}: {_kind(parameter)} in the trainer, {_kind(view)} in the server")
        elif compare and not torch.equal(view, parameter.data.to(view.device)):
            problems.append(f"{name}: other values than the trainer's")
    covered = {view.data_ptr() for name, view in views.items() if name in parameters}
    problems += [
        f"{name}: the trainer has no such parameter"
        for name, v in views.items()
        if name not in parameters and v.data_ptr() not in covered
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ConfigError(
            f"weight_sync=shared_vllm: {len(problems)} of {len(parameters)} parameters cannot be shared: {shown}. "
            "Start the server from "
            "the policy's own weights and dtype (engine.args.dtype, train.precision), or use weight_sync=reload: it "
            "needs no equal layout"
        )


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
