"""One copy of the weights: the trainer's parameters are views of the vLLM server's own tensors, by CUDA IPC (shared memory on CPUs).

    attach   server exports handles and layout -> views -> same shape, dtype and bits as the policy? -> p.data = view
    update   optimizer steps on fp32 masters -> pause -> masters rounded into the views -> fence -> flush the prefix cache -> resume

Nothing is sent. CUDA graphs and compiled code hold addresses, not values, so they see every update.
"""

from __future__ import annotations

import atexit
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offline_grpo.engine.guardian import remove_cuda_driver_files
from offline_grpo.engine.server import this_run
from offline_grpo.errors import ConfigError, EngineDied
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.bridge import Bridge
from offline_grpo.weight_sync.server_sync import Moved, PausingSync

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SharedVllm(PausingSync):
    """See the module. The policy must be loaded on the CPU; `connect` takes it to the server's device without a second copy there.

    Args:
        bridge_config: the `vllm_bridge_config.json` of a server that was found; null asks the server itself, and writes the file into the
            run folder.
    """

    bridge_config: str | None

    shares_weights = True
    gpu_rule = "same"

    _paused_at: float | None = field(default=None, init=False)
    _addresses: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interval != 1:
            raise ConfigError(f"weight_sync.interval={self.interval}: shared weights are always the newest; set it to 1")

    def attach(self, policy: Policy) -> None:
        """Splice the server's memory into the policy.

        Raises:
            ConfigError: a server whose weights cannot be shared, or do not cover the policy; says what to use instead or what is missing.
            EngineError: its memory cannot be opened.
        """
        views = self._open_views(policy)
        parameters = dict(policy.causal_lm.named_parameters())
        is_first = not self._addresses
        check_coverage(parameters, views, compare=is_first)
        trained = {} if is_first else policy.masters.parameters
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name in trained:  # before the policy is pointed at it: whatever interrupts this, the policy stays what it was
                    views[name].copy_(trained[name])
                parameter.data = views[name]
        self._addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        if is_first:
            policy.become_shared(before_publish=self._pause_to_write)

    def deliver(self, policy: Policy, version: int) -> Moved:
        """The optimizer's updates are in place already, or come now; make sure that the server uses them and nothing older."""
        moved = [name for name, p in policy.causal_lm.named_parameters() if p.data_ptr() != self._addresses[name]]
        assert not moved, f"parameters have left the server's memory: {moved[:3]}"
        self._pause()
        if policy.compute_device.type == "cuda":
            torch.cuda.synchronize(
                policy.compute_device
            )  # the fence: our writes are queued, and the server must not go on before they are done
        self.control.reset_prefix_cache()
        self.control.set_version(version)
        self.control.resume()
        assert self._paused_at is not None
        paused_seconds = time.perf_counter() - self._paused_at
        self._paused_at = None
        return Moved(num_tensors=len(self._addresses), num_bytes=0, paused_seconds=paused_seconds)

    def recover(self, policy: Policy, *, version: int) -> None:
        """See `ServerSync.recover`. Trained weights come back from the masters, frozen ones from the files that the server loads."""
        self._paused_at = None
        super().recover(policy, version=version)

    def _pause(self) -> None:
        """Before the first write of an iteration, so that no token is computed from half of an update."""
        if self._paused_at is None:
            started = time.perf_counter()
            self.control.pause(self.pause_mode)
            self._paused_at = started

    def _pause_to_write(self) -> None:
        """A server that died meanwhile is the next push's concern: the masters have the update, and its memory is ours to write to."""
        try:
            self._pause()
        except EngineDied as death:
            log.warning("%s The update goes on without it.", death)

    def _open_views(self, policy: Policy) -> dict[str, Tensor]:
        described = self.control.call_worker("grpo_describe")
        for reason in described["refusals"]:
            raise ConfigError(f"weight_sync=shared_vllm: {reason}; use weight_sync=ipc on one GPU, nccl on several, or reload")
        if self.bridge_config is not None:
            bridge = Bridge.read(Path(self.bridge_config))
        else:
            exported = self.control.call_worker("grpo_export")
            bridge = Bridge.from_worker(this_run(), self.start_model(policy), described, exported, self.control.call_worker("grpo_layout"))
            bridge.write(self.server.log_dir / "vllm_bridge_config.json")
        check_device(bridge, policy.compute_device)
        if policy.compute_device.type == "cuda":
            torch.zeros(1, device=policy.compute_device)  # opening a handle before CUDA is up in this process would crash it
            atexit.register(remove_cuda_driver_files)
        started = time.perf_counter()
        views = bridge.open(policy.compute_device)
        log.info(
            "opened %d storages (%.0f MiB) of the server as %d parameters in %.2f s",
            len(bridge.storages),
            sum(storage.num_bytes for storage in bridge.storages) / 2**20,
            len(views),
            time.perf_counter() - started,
        )
        return views


def check_device(bridge: Bridge, device: torch.device) -> None:
    """Raise ConfigError unless the server's memory is on `device`, where the trainer computes."""
    if bridge.device != device.type:
        raise ConfigError(f"model.device={device}: the server's weights are on its {bridge.device}; train there, or use weight_sync=reload")
    if bridge.device == "cuda":
        ours = str(torch.cuda.get_device_properties(device).uuid)
        if bridge.gpu_uuid != ours:
            raise ConfigError(
                f"model.device={device}: that is GPU {ours}, and the server's weights are on GPU {bridge.gpu_uuid}; put both on one "
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
        f"{name}: the trainer has no such parameter" for name, v in views.items() if name not in parameters and v.data_ptr() not in covered
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ConfigError(
            f"weight_sync=shared_vllm: {len(problems)} of {len(parameters)} parameters cannot be shared: {shown}. Start the server from "
            "the policy's own weights and dtype (engine.args.dtype, train.precision), or use weight_sync=reload: it needs no equal layout"
        )


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
