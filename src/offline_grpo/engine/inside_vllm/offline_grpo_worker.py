"""What must run inside vLLM: exports its weights, tells which rows of which tensor are which parameter, and adds them
up for proofs.

This folder is put on the server's PYTHONPATH, and vLLM loads the class by `--worker-extension-cls`; no file of vLLM is
touched. The module stands alone (torch, vLLM, its neighbours in this folder), because the server may run in another
environment than the trainer. Methods are called through POST /collective_rpc and return plain JSON types: anything else
would end the server.
"""

from __future__ import annotations

import base64
import functools
import itertools
import os
import secrets
import select
import signal
import sys
import threading
import types
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from offline_grpo_weights import (
    Described,
    as_part,
    empty_bucket,
    fingerprints,
    layout,
    meet,
    plain_name,
    sums,
    texts,
    totals,
)
from torch import Tensor, nn


def prepare_process() -> None:
    """Runs when the worker imports this module, before it loads the model."""
    # The server's processes are killed when its guardian is: the API's ends then, and vLLM's engine would stay forever.
    if "OFFLINE_GRPO_GUARDIAN" in os.environ:
        try:
            gone = os.pidfd_open(int(os.environ["OFFLINE_GRPO_GUARDIAN"]))
        except ProcessLookupError:
            os.killpg(0, signal.SIGKILL)
            return

        def end_with_guardian() -> None:
            select.select([gone], [], [])
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=end_with_guardian, name="ends with its guardian", daemon=True).start()

    if torch.cuda.is_available():
        from offline_grpo_scheduler import look_further_ahead
        from offline_grpo_sets import find_sets_at_once

        look_further_ahead()
        find_sets_at_once()
        if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
            from offline_grpo_alike import be_batch_invariant

            be_batch_invariant()
    else:
        # On CPUs vLLM packs the weights of linear layers into a format of its own, which nobody else can read or write.
        from vllm.model_executor.layers import utils
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        def keep_plain(layer: nn.Module, remove_weight: bool = False) -> None:
            layer.cpu_linear = nn.functional.linear  # type: ignore[assignment]

        utils.dispatch_cpu_unquantized_gemm = keep_plain

        # There it also packs experts (0.32) when it makes their kernel, at the first load, and takes reloaded ones for
        # packed. So each load makes the kernel anew.
        process = UnquantizedFusedMoEMethod.process_weights_after_loading

        @functools.wraps(process)
        def process_anew(method: Any, layer: nn.Module) -> None:
            method.moe_kernel = None
            process(method, layer)  # type: ignore[arg-type]

        UnquantizedFusedMoEMethod.process_weights_after_loading = process_anew  # type: ignore[method-assign]

    # vLLM 0.25 imports ray for CUDA IPC weight transfer, without using it in a server and without requiring it.
    if os.environ.get("OFFLINE_GRPO_NEEDS_RAY") == "1" and "ray" not in sys.modules and not find_spec("ray"):
        sys.modules["ray"] = types.ModuleType("ray")

    # A file says when vLLM has measured what is free on the GPUs and allocated its KV cache, in all processes of the
    # server: trainers wait for it.
    if (path := os.environ.get("OFFLINE_GRPO_HAS_MEMORY")) is not None:
        from vllm.v1.worker.gpu_worker import Worker  # on a CPU too

        initialize = Worker.initialize_from_config

        @functools.wraps(initialize)
        def initialize_and_tell(worker: Any, *args: Any, **options: Any) -> None:
            initialize(worker, *args, **options)
            files = [Path(f"{path}.{rank}") for rank in range(worker.parallel_config.world_size)]
            files[worker.rank].touch()
            if all(file.exists() for file in files):
                Path(path).touch()

        Worker.initialize_from_config = initialize_and_tell  # type: ignore[method-assign]


class WorkerExtension:
    """Mixed into vLLM's worker. Names start with `grpo_`, because none may collide with one of the worker's."""

    model_runner: Any
    vllm_config: Any
    _grpo_tag: str | None = None
    _grpo_files: list[int]  # descriptors of the shared memory, which a trainer opens through /proc
    _grpo_group: Any = None  # of the trainer and all workers
    _grpo_layout: list[dict[str, Any]] | None = None

    def grpo_describe(self) -> dict[str, Any]:
        """Who and what this worker is, and why its weights cannot be shared, if so."""
        # What is true of all weights comes first.
        device, num_workers = next(_model(self).parameters()).device, self.vllm_config.parallel_config.world_size
        quantization, refusals = self.vllm_config.model_config.quantization, list(_rearranged(self.vllm_config))
        if quantization is not None:
            refusals.insert(0, f"the server quantises its weights ({quantization})")
        if num_workers > 1:
            what = f"the server spreads its weights over {num_workers} processes (tensor or pipeline parallel)"
            refusals.insert(0, what)
        return {
            "pid": os.getpid(),
            "device": device.type,
            "gpu_uuid": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
            "refusals": refusals,
            "quantization": quantization,
            "logprobs_mode": str(self.vllm_config.model_config.logprobs_mode),
            "max_logprobs": self.vllm_config.model_config.max_logprobs,
            "max_lora_rank": getattr(self.vllm_config.lora_config, "max_lora_rank", None),
        }

    def grpo_layout(self) -> list[dict[str, Any]]:
        """One entry for each checkpoint parameter: the server's tensor that holds it, and its rows there."""
        return list(layout(_model(self)))

    def grpo_export(self) -> dict[str, Any]:
        """Handles of every storage that holds parameters, and where in it each tensor lies."""
        # On a GPU the storages stay where they are, because CUDA graphs hold their addresses. On the CPU they move into
        # anonymous shared memory, which has no name that could outlive the processes.
        model = _model(self)
        if not hasattr(self, "_grpo_files"):
            self._grpo_files, moved = [], dict[int, Any]()
            for parameter in model.parameters() if next(model.parameters()).device.type == "cpu" else ():
                old = parameter.data.untyped_storage()
                if old.data_ptr() not in moved:
                    self._grpo_files.append(os.memfd_create("offline-grpo-weights"))
                    os.ftruncate(self._grpo_files[-1], max(old.nbytes(), 1))
                    file = f"/proc/self/fd/{self._grpo_files[-1]}"
                    new = torch.UntypedStorage.from_file(file, shared=True, nbytes=old.nbytes())
                    new.copy_(old)
                    moved[old.data_ptr()] = new
            for parameter in model.parameters() if moved else ():
                old = parameter.data
                place = moved[old.untyped_storage().data_ptr()], old.storage_offset(), old.shape, old.stride()
                parameter.data = torch.empty(0, dtype=old.dtype).set_(*place)

        # One handle for each storage, which several tensors may be parts of.
        storages: dict[int, int] = {}
        handles: list[dict[str, Any]] = []
        tensors = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            storage = parameter.data.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = len(handles)
                if self._grpo_files:
                    fd = self._grpo_files[len(handles)]
                    handles.append({"kind": "file", "fd": fd, "num_bytes": storage.nbytes()})
                else:
                    _, handle, size, offset, counter, counter_offset, event, sync = storage._share_cuda_()
                    handles.append(
                        {
                            "kind": "cuda",
                            "handle": base64.b64encode(handle).decode(),
                            "num_bytes": size,
                            "offset_bytes": offset,
                            "counter_handle": base64.b64encode(counter).decode(),
                            "counter_offset": counter_offset,
                            "event_handle": base64.b64encode(event).decode(),
                            "event_sync_required": sync,
                        }
                    )
            tensors.append(
                {
                    "name": plain_name(name),
                    "storage": storages[storage.data_ptr()],
                    "offset": parameter.storage_offset(),
                    "shape": list(parameter.shape),
                    "stride": list(parameter.stride()),
                    "dtype": str(parameter.dtype).removeprefix("torch."),
                }
            )
        return {"storages": handles, "tensors": tensors}

    def grpo_set_tag(self, tag: str) -> None:
        """Note which weights are served (version and owner) once everything written so far has arrived. vLLM's own
        functions that load weights make the tag untrue.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._grpo_tag = tag

        # Once for each of vLLM's functions: afterwards it is an attribute of the object itself.
        for owner, name in ((self.model_runner, "reload_weights"), (_model(self), "load_weights")):
            if not hasattr(owner, name) or name in vars(owner):
                continue
            load = getattr(owner, name)

            @functools.wraps(load)
            def loading(*args: Any, load: Callable[..., Any] = load, **kwargs: Any) -> Any:
                self._grpo_tag = ""
                return load(*args, **kwargs)

            setattr(owner, name, loading)

    def grpo_tag(self) -> str | None:
        """What was noted last, None if nothing since the start, "" if anybody has loaded weights since then."""
        return self._grpo_tag

    def grpo_state(self) -> dict[str, Any]:
        """The weights' dtype, and of each checkpoint parameter, or the part of it that this worker has in this dtype,
        where it begins and its share of the fingerprint.

        None where the server derives its tensors from the checkpoint's. Of a quantised model those of layers that are
        not quantised (embeddings, norms, the head), and of bitsandbytes' 4 bits those of the dequantised numbers, which
        a trainer has too; none of one that several workers have.
        """
        # Of a quantised model what is not quantised, but for bitsandbytes the dequantised numbers.
        config, quantization = self.vllm_config, self.vllm_config.model_config.quantization
        is_unknown = quantization is not None and config.parallel_config.world_size > 1
        parts = {} if is_unknown or any(_rearranged(config)) else self._grpo_parts()
        if quantization not in (None, "bitsandbytes"):  # whose kernels may reorder the bias of a quantised layer
            parts = {name: part for name, part in parts.items() if f"{name.rpartition('.')[0]}.weight" in parts}
        found = texts(totals(as_part(tensor, *place) for tensor, *place in parts.values()))
        prints = {name: (start, text) for (name, (_, _, start, _)), text in zip(parts.items(), found, strict=True)}
        if parts and quantization == "bitsandbytes":
            prints |= {name: (0, fingerprints([weights])[0]) for name, weights in self._grpo_dequantised()}
        return {"dtype": str(config.model_config.dtype).removeprefix("torch."), "fingerprints": prints}

    def grpo_sums(self, names: list[str]) -> dict[str, tuple[int, str]]:
        """Of parameters that `grpo_state` named: where this worker's part begins, and its `sums`."""
        parts = ((name, tensor, start) for name, (tensor, _, start, _) in self._grpo_parts().items())
        weights = itertools.chain(parts, ((*named, 0) for named in self._grpo_dequantised()))
        return {name: (start, sums([tensor])[0]) for name, tensor, start in weights if name in names}

    def _grpo_dequantised(self) -> Iterator[tuple[str, Tensor]]:
        """The numbers of each checkpoint parameter that bitsandbytes holds in 4 bits, by its name, one at a time: all
        together would need four times the memory of the model.
        """
        weights = {plain_name(name): p for name, p in _model(self).named_parameters() if hasattr(p, "bnb_quant_state")}
        for tensor, entries in itertools.groupby(layout(_model(self)), lambda entry: entry["tensor"]):
            states = getattr(weights.get(tensor), "bnb_quant_state", {})
            # One state may be of rows that several parameters have: then nobody knows their numbers.
            names = [entry["name"] for entry in entries]
            if len(names) == len(states):
                from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found]

                packed: Any = weights[tensor]
                parts = packed.data.tensor_split(packed.bnb_shard_offsets[1:-1])
                for number, name in enumerate(names):
                    weight = dequantize_4bit(parts[number], states[number])
                    yield name, weight.to(self.vllm_config.model_config.dtype)

    def grpo_join(self, address: str, port: int, first_rank: int, world_size: int) -> None:
        """Form a group with the trainer, whose rank is 0, and other workers. This server's have the ranks from
        `first_rank` on.
        """
        config, device = self.vllm_config.parallel_config, next(_model(self).parameters()).device
        rank = getattr(config, "data_parallel_index", 0) * config.world_size + config.rank
        if self._grpo_group is not None:
            self._grpo_group.abort()
        self._grpo_group = meet(address, port, first_rank + rank, world_size, device)

    def grpo_receive(self, buckets: list[list[Described]], in_place: bool, tag: str) -> None:
        """Load the weights that the trainer broadcasts to the group, a bucket at a time.

        Args:
            in_place: write them where they are. Else vLLM's own loader takes them, which knows what it makes of them.
        """
        # Until all have arrived, the tag is that of weights that nobody pushed.
        self._grpo_tag, arriving = "", self._grpo_arriving(buckets, next(_model(self).parameters()).device)
        if not in_place:  # which puts the parameters on the meta device first
            self.reload_weights(weights_iterator=(pair for bucket in arriving for pair in bucket))  # type: ignore[attr-defined]
        else:
            parts = self._grpo_parts()
            for bucket in arriving:
                pairs = [(parts[name], tensor) for name, tensor in bucket if name in parts]
                theirs = [
                    torch.atleast_1d(t).narrow(dim, start, len(own) if dim == 0 else own.shape[dim])
                    for (own, dim, start, _), t in pairs
                ]
                torch._foreach_copy_([own for (own, *_), _ in pairs], theirs)  # pyright: ignore[reportPrivateImportUsage]
        self.grpo_set_tag(tag)

    def _grpo_arriving(
        self, buckets: list[list[Described]], device: torch.device
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """The weights of each bucket, while the next one is under way."""
        # A bucket is handed out when the next one's broadcast has begun.
        before: tuple[Any, list[tuple[str, Tensor]]] | None = None
        for described in buckets:
            flat, tensors = empty_bucket(described, device)
            work = self._grpo_group.broadcast(flat, 0)
            if before is not None:
                before[0].wait()
                yield before[1]
            before = work, list(zip((name for name, _, _ in described), tensors, strict=True))
        assert before is not None
        before[0].wait()
        yield before[1]

    def _grpo_parts(self) -> dict[str, tuple[Tensor, int, int, int]]:
        """By a checkpoint parameter's name the rows that are it, or a part of it: (rows, dim, start, whole), see
        `layout`. Some tensors are always fp32: state decays, gates.
        """
        tensors = {plain_name(name): p.data for name, p in _model(self).named_parameters(remove_duplicate=False)}
        dtype, is_spread = self.vllm_config.model_config.dtype, self.vllm_config.parallel_config.world_size > 1
        if self._grpo_layout is None:
            self._grpo_layout = list(layout(_model(self), is_spread=is_spread))
        return {
            entry["name"]: (
                torch.atleast_1d(tensors[entry["tensor"]]).narrow(0, entry["row"], entry["rows"]),
                *(entry[key] for key in ("dim", "start", "whole")),
            )
            for entry in self._grpo_layout
            if tensors[entry["tensor"]].dtype == dtype
        }


def _model(worker: Any) -> nn.Module:
    return worker.model_runner.get_model() if hasattr(worker.model_runner, "get_model") else worker.model_runner.model


def _rearranged(config: Any) -> Iterator[str]:
    """Why this server has not the parameters of the checkpoint."""
    model = config.model_config
    if getattr(model, "use_mla", False):
        yield "the server derives tensors from the weights when it loads them (multi-head latent attention)"
    if getattr(model, "enable_sleep_mode", False) or getattr(model, "enable_cumem_allocator", False):
        yield "the server may take its memory away (sleep mode)"
    offload = getattr(config, "offload_config", None)
    if getattr(config.cache_config, "cpu_offload_gb", 0) or getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0):
        yield "the server keeps part of its weights on the host (cpu_offload_gb)"


class TokenGate:
    """ASGI middleware: every request but GET /health needs the token. vLLM's own --api-key guards /v1 alone, not the
    control endpoints.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ.get('OFFLINE_GRPO_API_KEY') or os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        given = dict(scope.get("headers") or []).get(b"authorization", b"")
        is_health = scope["type"] == "http" and (scope["method"], scope["path"]) == ("GET", "/health")
        if scope["type"] == "lifespan" or is_health or secrets.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        body = b'{"error": "this server needs its token: Authorization: Bearer ..."}'
        await send({"type": "http.response.body", "body": body})


prepare_process()
