"""Who computes where: the GPUs of the training processes, and of a server that the run starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from offline_grpo.errors import ConfigError
from offline_grpo.model.dtypes import TORCH_NAMES, torch_dtype
from offline_grpo.model.layouts import choose_layout
from offline_grpo.model.load import read_model_config, resolve_device
from offline_grpo.placement.memory_plan import MemoryRequest, ServerRequest, check, describe, predict
from offline_grpo.run.preflight import Plan

log = logging.getLogger(__name__)

SHARE_KEYS = ("gpu_memory_utilization", "mem_fraction_static")  # of vLLM and SGLang
DEFAULT_SHARE = 0.92  # vLLM's own


def check_devices(plan: Plan, num_processes: int) -> None:
    """Refuse devices that do not exist, or do not suit the strategy or the layout, before any model is made.

    Raises:
        ConfigError: names key, value and fix.
    """
    device = plan.config.model.device
    server_gpus(plan, num_processes)
    choose_layout(plan.layout, resolve_device(device), torch_dtype(plan.config.train.precision))
    if not trainer_gpus(device, num_processes) and getattr(plan.weight_sync, "needs_gpu", False):
        raise ConfigError(
            f"model.device={device}: weight_sync={_name(plan)} moves weights from GPU to GPU, and training is on the CPU; use "
            "weight_sync=shared_vllm or reload there"
        )


def check_memory(plan: Plan, model_id: str, *, longest_prompt: int, num_processes: int) -> None:
    """Where `placement.check_memory` asks for it, refuse a run that the GPUs cannot hold; log the prediction.

    Args:
        model_id: of the model to train; of it, and of a reference, the configuration alone is read.
        longest_prompt: in tokens.

    Raises:
        ConfigError: names key, value and fix.
    """
    model = plan.config.model
    trainers = trainer_gpus(model.device, num_processes)
    servers = server_gpus(plan, num_processes)
    if not trainers or not plan.config.placement.check_memory:
        return
    devices = predict(
        memory_request(
            plan,
            read_model_config(model_id, "model.train_id"),
            read_model_config(model.ref_id or model_id, "model.ref_id") if needs_reference_copy(plan) else None,
            longest_prompt=longest_prompt,
            trainers=trainers,
            server_gpus=servers or (),
            total_bytes=[torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())],
        )
    )
    for line in describe(devices):
        log.info(line)
    check(devices)


def needs_reference_copy(plan: Plan) -> bool:
    """Whether a KL term compares with a model of its own: without LoRA, or with another `model.ref_id` (see `load_reference`)."""
    model = plan.config.model
    return plan.loss.kl_coef > 0 and (model.lora is None or model.ref_id not in (None, model.train_id))


def memory_request(
    plan: Plan,
    model_config: PretrainedConfig,
    reference_config: PretrainedConfig | None,
    *,
    longest_prompt: int,
    trainers: Sequence[int],
    server_gpus: Sequence[int],
    total_bytes: Sequence[int],
) -> MemoryRequest:
    """What the memory plan needs to know of a run (see `MemoryRequest`).

    Args:
        reference_config: None where `needs_reference_copy` says that there is no copy.
        server_gpus: unused where the run starts no server.
    """
    config = plan.config
    return MemoryRequest(
        model=config.model,
        train=config.train,
        model_config=model_config,
        reference_config=reference_config,
        layout=choose_layout(plan.layout, torch.device("cuda"), torch_dtype(config.train.precision)),
        head=plan.head,
        optimizer=plan.optimizer,
        shares_weights=plan.weight_sync.shares_weights,
        num_sequences=config.data.problems_per_iteration * config.data.rollouts_per_problem,
        longest_prompt=longest_prompt,
        max_new_tokens=plan.sampling.max_new_tokens,
        eval_max_new_tokens=plan.eval_sampling.max_new_tokens,
        sampling_batch_size=0 if plan.needs_server else plan.client_node.get("batch_size", 1),
        trainers=tuple(trainers),
        server=_server_request(plan, server_gpus) if plan.launcher is not None else None,
        total_bytes=tuple(total_bytes),
    )


def _server_request(plan: Plan, gpus: Sequence[int]) -> ServerRequest:
    args: Mapping[str, Any] = {**plan.launcher.args, **getattr(plan.weight_sync, "server_args", {})}
    share = next((key for key in SHARE_KEYS if key in args), SHARE_KEYS[0])
    dtype = args.get("dtype")
    return ServerRequest(
        gpus=tuple(gpus),
        dtype=torch_dtype(dtype if dtype in TORCH_NAMES else plan.config.train.precision),  # others, such as auto, are the model's own
        num_shards=args.get("tensor_parallel_size") or args.get("tp_size") or 1,
        share_frac=args.get(share) or DEFAULT_SHARE,
        share_key=f"engine.args.{share}",
    )


def trainer_gpus(device: str, num_processes: int) -> list[int]:
    """The GPU of every training process, that of the first one first; empty on the CPU.

    Args:
        device: `model.device`.

    Raises:
        ConfigError: a GPU that this machine has not.
    """
    devices = [resolve_device(device, process) for process in range(num_processes)]
    return [device.index or 0 for device in devices if device.type == "cuda"]


def server_gpus(plan: Plan, num_processes: int) -> list[int] | None:
    """The GPUs of a server that the run starts; None where it starts none, or where all that it sees will do. See `engine_gpus`."""
    if plan.launcher is None:
        return None
    return engine_gpus(
        plan.config.placement.engine_devices,
        getattr(plan.weight_sync, "gpu_rule", "any"),
        name=_name(plan),
        trainers=trainer_gpus(plan.config.model.device, num_processes),
        num_gpus=torch.cuda.device_count(),
    )


def _name(plan: Plan) -> str:
    return getattr(plan.weight_sync, "name", type(plan.weight_sync).__name__)


def engine_gpus(configured: Sequence[int] | None, rule: str, *, name: str, trainers: Sequence[int], num_gpus: int) -> list[int] | None:
    """The GPUs of a server that the run starts, numbered as this process sees them; None (all that it sees) for trainers on the CPU.

    Args:
        configured: `placement.engine_devices`; null takes the trainer's GPU for the rule "same", else the first that no process trains on,
            else (rule "any") the trainer's.
        rule: "same" where weights never leave the trainer's GPU, "other" where they must, "any".
        name: of the strategy with that rule.
        trainers: the GPU of every training process, that of the first one first.

    Raises:
        ConfigError: GPUs that do not exist or break the rule.
    """
    setting = f"placement.engine_devices={'null' if configured is None else list(configured)}"
    if configured is not None:
        _check_existing(configured, setting, num_gpus)
    if not trainers:
        return None if configured is None else list(configured)
    free = [gpu for gpu in range(num_gpus) if gpu not in trainers]
    if configured is None:
        if rule == "other" and not free:
            raise ConfigError(
                f"{setting}: weight_sync={name} needs a GPU for the server that no process trains on, and all {num_gpus} of this machine "
                "are trained on; use weight_sync=shared_vllm, or fewer training processes"
            )
        return [trainers[0]] if rule == "same" or not free else [free[0]]
    if rule == "same" and trainers[0] not in configured:
        raise ConfigError(
            f"{setting}: weight_sync={name} needs the server on the trainer's GPU {trainers[0]}; use placement.engine_devices=null, or "
            "weight_sync=nccl"
        )
    shared = sorted(set(configured) & set(trainers))
    if rule == "other" and shared:
        raise ConfigError(
            f"{setting}: weight_sync={name} needs other GPUs for the server, and GPU {shared[0]} is trained on; "
            + (f"use placement.engine_devices={free[:1]}" if free else "use weight_sync=shared_vllm")
        )
    return list(configured)


def _check_existing(gpus: Sequence[int], setting: str, num_gpus: int) -> None:
    if all(0 <= gpu < num_gpus for gpu in gpus) and len(set(gpus)) == len(gpus):
        return
    exist = f"this machine has {num_gpus} GPU{'s' if num_gpus != 1 else ''}" + (f", 0 to {num_gpus - 1}" if num_gpus > 1 else "")
    raise ConfigError(f"{setting}: {exist}; name each GPU of the server once, or use placement.engine_devices=null")
