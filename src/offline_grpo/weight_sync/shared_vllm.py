"""One copy of the weights: the trainer's parameters are views of the vLLM server's own tensors, by CUDA IPC (shared
memory on CPUs).

    attach   server exports handles and layout -> views -> same shape, dtype and bits as the policy? -> p.data = view
    update   optimizer steps on fp32 masters -> pause, which flushes or hides the prefix cache -> masters rounded into
             the views -> fence -> resume

Nothing is sent. CUDA graphs and compiled code hold addresses, not values, so they see every update.
"""

from __future__ import annotations

import atexit
import base64
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offline_grpo.disk import write_whole
from offline_grpo.engine.inside_vllm.offline_grpo_weights import plain_name
from offline_grpo.engine.spawn import remove_cuda_driver_files
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import ConfigError, EngineDied, EngineError, reason_of, require
from offline_grpo.model.layers import is_composite, text_parameters
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.snapshot import Snapshot, gpu_uuid, this_run, weights_tag
from offline_grpo.weight_sync.strategy import PausingSync, Staged, SyncRequirements, foreign_write

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Records = list[dict[str, Any]]


@dataclass(kw_only=True)
class SharedVllm(PausingSync):
    """See the module. The policy must be loaded on the CPU; `attach` takes it to the server's device without a second
    copy there.
    """

    bridge_config: str | None

    name = "shared_vllm"
    # the policy can be the memory of one server
    needs = SyncRequirements(engine=VllmEngine, one_engine=True, placement="same", shares_weights=True)

    _engine: VllmEngine | None = field(default=None, init=False)
    _paused_at: float | None = field(default=None, init=False)
    _addresses: dict[str, int] = field(default_factory=dict, init=False)
    _version: int | None = field(default=None, init=False)  # of the last push to this start of the server

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "shared weights are always the newest; set it to 1"
        require(self.interval == 1, "weight_sync.interval", self.interval, fix)

    def attach(self, engine: VllmEngine, snapshot: Snapshot) -> None:
        """Make the policy's parameters views of the server's memory. Raises ConfigError for a server whose weights
        cannot be shared, or do not cover the policy; EngineError if its memory cannot be opened.
        """
        # 1. The server's memory as tensors: of the policy's shapes and dtypes and, before training, with its bits.
        policy, is_first = snapshot.policy, not self._addresses
        self._engine, self._paused_at, self._version = engine, None, None
        fix = "use weight_sync=ipc on one GPU, nccl on several, or reload"
        views = open_views(engine, policy, "weight_sync=shared_vllm", fix, self.bridge_config)
        parameters = text_parameters(policy.causal_lm)
        if is_composite(policy.causal_lm.config):
            views = {name: views[name] for name in parameters if name in views}
        check_coverage(parameters, views, compare=is_first)

        # 2. A server that was started anew has read the frozen weights from files, and gets the trained ones from the
        #    masters. Whatever interrupts this finds the policy as it was.
        if not is_first:
            with torch.no_grad():
                for name, master in policy.masters.values.items():
                    views[name].copy_(master)

        # 3. From now on the parameters are views; towers, which text does not use, are the policy's own.
        for name, parameter in policy.causal_lm.named_parameters():
            parameter.data = views[name] if name in views else parameter.data.to(policy.compute_device)
            self._addresses[name] = parameter.data_ptr()
        if is_first:
            policy.become_shared(before_publish=self._pause_to_write)

    @contextmanager
    def staged(self, snapshot: Snapshot, version: int) -> Iterator[Staged]:
        """Nothing is copied: the optimizer has written its updates into the server's memory already."""
        policy, parameters = snapshot.policy, dict(snapshot.policy.causal_lm.named_parameters())
        moved = [name for name, p in parameters.items() if p.data_ptr() != self._addresses[name]]
        assert not moved, f"parameters have left the server's memory: {moved[:3]}"
        self._pause()
        if self._version is not None:
            self.check_served(snapshot.host, self._version)
        if others := policy.masters.differing():
            found = f"wrote to {len(others)} tensors of the policy, {others[0]}"
            raise foreign_write(snapshot.host.base_url, found)
        if policy.compute_device.type == "cuda":  # the fence: our writes must be done before the server continues
            torch.cuda.synchronize(policy.compute_device)
        yield Staged(version=version, num_tensors=len(parameters), num_bytes=0)

    def deliver(self, engines: Sequence[VllmEngine], staged: Staged) -> float:
        """Note the version and let the server go on; the pause has flushed or hidden its prefix cache."""
        [engine] = engines
        engine.set_tag(weights_tag(staged.version))
        self._version = staged.version
        engine.resume()
        assert self._paused_at is not None
        paused_seconds, self._paused_at = time.perf_counter() - self._paused_at, None
        return paused_seconds

    def _pause(self) -> None:
        """Before the first write of an iteration, so that no token is computed from half of an update."""
        assert self._engine is not None
        if self._paused_at is None:
            started = time.perf_counter()
            self._engine.pause(self.pause_mode)
            self._paused_at = started

    def _pause_to_write(self) -> None:
        """Pause before the optimizer's update is written. A dead server stops no update, because the masters have it
        and the server's memory stays open to us; the next push raises EngineDied.
        """
        try:
            self._pause()
        except EngineDied as death:
            log.warning("%s The update continues without it.", death)


def share_base(engine: VllmEngine, policy: Policy) -> None:
    """Make a policy's frozen parameters views of the server's memory, where shape, dtype and bits are equal. Several
    policies may do so at a time, because nobody writes to it. All other parameters, adapters included, move to the
    policy's device. Raises ConfigError for a server whose weights cannot be shared, EngineError if its memory cannot be
    opened.
    """
    lack, keep, own, num_bytes = engine.lacks("full"), "leave it at false", list[str](), 0
    require(lack is None, "weight_sync.share_base", "true", f"that server {lack}; {keep}")
    views = open_views(engine, policy, "weight_sync.share_base=true", keep, None)
    for name, parameter in policy.causal_lm.named_parameters():
        view, copy = views.get(plain_name(name), torch.empty(0)), parameter.data.to(policy.compute_device)
        is_frozen, is_like = not parameter.requires_grad, (view.shape, view.dtype) == (copy.shape, copy.dtype)
        is_shared = is_frozen and is_like and torch.equal(view, copy)
        parameter.data = view if is_shared else copy
        num_bytes += copy.nbytes * is_shared
        own += [name] * (is_frozen and not is_shared)
    policy.become_shared()
    others = f"; {len(own)} tensors are the trainer's own: {', '.join(own[:3])}" if own else ""
    log.info("%.1f MiB of the base are the server's memory%s", num_bytes / 2**20, others)


def open_views(
    engine: VllmEngine, policy: Policy, setting: str, fix: str, bridge_config: str | None
) -> dict[str, Tensor]:
    """The server's memory as tensors of ours, by the names in the checkpoint. Raises as `share_base`; `setting` and
    `fix` are for messages.
    """
    # Why this server's memory cannot be shared at all.
    home, described = policy.compute_device, engine.describe()
    for reason in described["refusals"]:
        raise ConfigError(f"{setting}: {reason}; {fix}")

    # Which memory holds which parameter: as a file says, or as the server does, and then a file for others.
    if bridge_config is not None:
        bridge = Bridge.read(Path(bridge_config))
    else:
        bridge = Bridge(
            run_id=this_run(),
            model=str(policy.causal_lm.name_or_path),
            pid=described["pid"],
            start_time=start_time_of(described["pid"]) or 0,
            device=described["device"],
            gpu_uuid=described["gpu_uuid"],
            **engine.call_workers("grpo_export")[0],
            param_mappings=engine.call_workers("grpo_layout")[0],
        )
        bridge.write(engine.log_dir / "vllm_bridge_config.json")
    if (bridge.device, bridge.gpu_uuid) != (home.type, gpu_uuid(home)):
        raise ConfigError(
            f"model.device={home}: is on {gpu_uuid(home) or 'no GPU'}, and the server's weights are on "
            f"{bridge.gpu_uuid or 'no GPU'}; put both on one (placement.engine_devices), or {fix}"
        )

    # Its memory becomes tensors of ours.
    if home.type == "cuda":
        torch.zeros(1, device=home)  # opening a handle before CUDA is up in this process would crash it
        atexit.register(remove_cuda_driver_files)
    started = time.perf_counter()
    views = bridge.open(home)
    num_mib = sum(storage["num_bytes"] for storage in bridge.storages) / 2**20
    seconds = time.perf_counter() - started
    log.info("opened %.0f MiB of the server as %d parameters in %.2f s", num_mib, len(views), seconds)
    return views


@dataclass(frozen=True)
class Bridge:
    """`vllm_bridge_config.json`: which memory of a vLLM worker holds which parameter.

    It names the worker's process, by pid and start time, so a file that outlived its server is refused. What it
    describes is compared with the policy, shape, dtype and bits, before anything is trained (`check_coverage`).

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
    format: int = 1

    def write(self, path: Path) -> None:
        """Save, for tools that attach later and for people who want to look. The file appears complete."""
        write_whole(path, json.dumps(asdict(self), indent=1), is_private=True)  # it says how to write to the weights

    @classmethod
    def read(cls, path: Path) -> Bridge:
        """Load what `write` saved. Raises ConfigError where there is no file, or its server has ended."""
        key, fix = "weight_sync.bridge_config", "no such file; it is in the run folder of a weight_sync=shared_vllm run"
        require(path.exists(), key, path, fix)
        bridge = cls(**json.loads(path.read_text()))
        fix = f"is stale: the server that wrote it (pid {bridge.pid}, run {bridge.run_id}) has ended"
        require(start_time_of(bridge.pid) == bridge.start_time, key, path, fix)
        return bridge

    def open(self, device: torch.device) -> dict[str, Tensor]:
        """The server's memory as tensors of ours: checkpoint name -> view. Nothing is copied."""
        try:
            storages = []
            for handle in self.storages:
                if handle["kind"] == "file":
                    path = f"/proc/{self.pid}/fd/{handle['fd']}"
                    opened = torch.UntypedStorage.from_file(path, shared=True, nbytes=handle["num_bytes"])
                else:
                    opened = torch.UntypedStorage._new_shared_cuda(
                        device.index or 0,
                        base64.b64decode(handle["handle"]),
                        handle["num_bytes"],
                        handle["offset_bytes"],
                        base64.b64decode(handle["counter_handle"]),
                        handle["counter_offset"],
                        base64.b64decode(handle["event_handle"]),
                        handle["event_sync_required"],
                    )
                storages.append(opened)
        except (RuntimeError, OSError) as error:
            raise EngineError(
                f"memory of the server cannot be opened (pid {self.pid}: {reason_of(error)}): trainer and server must "
                "run on one machine, as one user, not in separate containers. With expandable_segments in "
                "PYTORCH_CUDA_ALLOC_CONF, set +engine.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False: some "
                "machines cannot share such memory"
            ) from error

        # The server's tensors, and of each the rows that are a parameter of the checkpoint.
        whole, parts = {}, {}
        for t in self.tensors:
            view = torch.empty(0, dtype=DTYPES[t["dtype"]], device=device)
            whole[t["name"]] = view.set_(storages[t["storage"]], t["offset"], t["shape"], t["stride"])
        for part in self.param_mappings:
            view = whole[part["tensor"]]
            parts[part["name"]] = view.narrow(0, part["row"], part["rows"]) if view.dim() else view
        return parts


def start_time_of(pid: int) -> int | None:
    """When a process started, in clock ticks after the machine; None if it has ended. Unique with the pid."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def check_coverage(parameters: dict[str, Any], views: dict[str, Tensor], *, compare: bool) -> None:
    """Every parameter of the policy must have a view of its shape and dtype, with its bits where `compare`. Equal bits
    are what tells plain weights from packed, permuted or derived ones without a list of models.
    """
    problems = [f"{name}: the server has no such tensor" for name in parameters if name not in views]
    for name in parameters.keys() & views.keys():
        parameter, view = parameters[name], views[name]
        if view.shape != parameter.shape or view.dtype != parameter.dtype:
            ours, theirs = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (parameter, view))
            problems.append(f"{name}: {ours} in the trainer, {theirs} in the server")
        elif compare and not torch.equal(view, parameter.data.to(view.device)):
            problems.append(f"{name}: other values than the trainer's")

    # What the server alone has would stay as it is while everything around it is trained.
    covered = {view.data_ptr() for name, view in views.items() if name in parameters}  # a tied one has two names
    others = [name for name, v in views.items() if name not in parameters and v.data_ptr() not in covered]
    problems += [f"{name}: the trainer has no such parameter" for name in others]
    if problems:
        raise ConfigError(
            f"weight_sync=shared_vllm: {len(problems)} of {len(parameters)} parameters cannot be shared: "
            f"{'; '.join(sorted(problems)[:5])}. Start the server from the policy's own weights and dtype "
            "(engine.args.dtype, train.precision), or use weight_sync=reload: it needs no equal layout"
        )
