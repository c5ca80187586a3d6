"""Asks the memory plan whether a run fits its GPUs, before weights are loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from offline_grpo import progress
from offline_grpo.model.compiling import is_compiled_by_default
from offline_grpo.model.dtypes import TORCH_NAMES, torch_dtype
from offline_grpo.model.load import read_model_config
from offline_grpo.model.reference import is_adapted_policy
from offline_grpo.placement.device_plan import DevicePlan, check, describe
from offline_grpo.placement.devices import reference_gpu, server_gpus, trainer_gpus
from offline_grpo.placement.memory import (
    MemoryRequest,
    ServerRequest,
    available_bytes,
    choose_share,
    in_words,
    predict,
)
from offline_grpo.run.engine_spec import num_shards
from offline_grpo.run.plan import Plan
from offline_grpo.train.optimizer import Adafactor, AdamW, AdamW8bit, is_offloaded

log = logging.getLogger(__name__)

SHARE_KEYS = ("gpu_memory_utilization", "mem_fraction_static")  # of vLLM and SGLang
DEFAULT_SHARE = 0.92  # vLLM's own
STATES: dict[type, tuple[float, int]] = {AdamW: (8.0, 0), AdamW8bit: (2 * (1 + 4 / 256), 0), Adafactor: (0.0, 2)}
"""Bytes of optimizer state per weight, and fp32 copies of the largest parameter that a step makes; an optimizer from
outside counts as AdamW. 8-bit AdamW has a scale for every 256 weights; Adafactor's rows and columns are few."""


def check_memory(
    plan: Plan, model_id: str, *, prompt_tokens: tuple[int, int], num_processes: int
) -> tuple[float, list[DevicePlan]]:
    """Where `placement.check_memory` asks for it, refuse a run that the GPUs cannot hold; log the prediction.

    Returns the share of the blocks that are recomputed, see `train.gradient_checkpointing`: without GPUs, `auto`
    recomputes none. And the prediction, where one was made.

    Args:
        model_id: of the model to train; of it, and of a reference, the configuration alone is read.
        prompt_tokens: of the shortest and of the longest prompt.

    Raises:
        ConfigError: names key, value and fix.
    """
    model = plan.config.model
    trainers = trainer_gpus(model.device, num_processes)
    devices = plan.devices(num_processes)
    recompute = plan.config.train.gradient_checkpointing
    if not trainers or not (plan.config.placement.check_memory or recompute == "auto"):
        return float(recompute is True), []
    with progress.phase("memory plan"):
        trust = {"trust_remote_code": model.trust_remote_code}
        request = memory_request(
            plan,
            read_model_config(model_id, "model.train_id", **trust),
            read_model_config(model.ref_id or model_id, "model.ref_id", **trust)
            if needs_reference_copy(plan)
            else None,
            prompt_tokens=prompt_tokens,
            trainers=trainers,
            reference=reference_gpu(devices),
            engine_gpus=[gpu for gpus in server_gpus(devices) for gpu in gpus or ()],
            total_bytes=[
                torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())
            ],
        )
        if recompute == "auto":
            share, predicted = choose_share(request)
            log.info("train.gradient_checkpointing=auto: recomputes %s", in_words(share))
        else:
            share, predicted = request.recompute, predict(request)
        for line in describe(predicted):
            log.info(line)
        if plan.config.placement.check_memory:
            check(predicted)
        return share, predicted


def needs_reference_copy(plan: Plan) -> bool:
    """Whether a KL term compares with a model of its own: without LoRA, or with another `model.ref_id` (see
    `load_reference`).
    """
    return plan.loss.kl_coef > 0 and not is_adapted_policy(plan.config.model)


def memory_request(
    plan: Plan,
    model_config: PretrainedConfig,
    reference_config: PretrainedConfig | None,
    *,
    prompt_tokens: tuple[int, int],
    trainers: Sequence[int],
    reference: int | None = None,
    engine_gpus: Sequence[int],
    total_bytes: Sequence[int],
) -> MemoryRequest:
    """What the memory plan needs to know of a run (see `MemoryRequest`).

    Args:
        reference_config: None where `needs_reference_copy` says that there is no copy.
        reference: the GPU that it has for itself.
        engine_gpus: of all servers; unused where the run starts none.
    """
    config = plan.config
    is_compiled = config.model.compile is True
    if config.model.compile == "auto" and torch.cuda.is_available():
        is_compiled = is_compiled_by_default(torch.device("cuda"))
    keeps_tiles = config.train.precision == "bf16" and plan.loss.entropy_coef == 0
    state_bytes, copies = STATES.get(type(plan.optimizer), STATES[AdamW])
    return MemoryRequest(
        model=config.model,
        train=config.train,
        recompute=float(config.train.gradient_checkpointing is True),
        is_compiled=is_compiled,
        model_config=model_config,
        reference_config=reference_config,
        kept_head_bytes=int(getattr(plan.head, "kept_gib", 0) * 2**30) if keeps_tiles else 0,
        state_bytes_per_weight=state_bytes,
        copies_per_step=copies,
        offload=is_offloaded(plan.optimizer),
        is_sharded=config.train.sharding == "fsdp2" and len(trainers) > 1,
        shares_weights=plan.weight_sync.requires.shares_weights,
        num_sequences=config.data.problems_per_iteration * config.data.rollouts_per_problem,
        prompt_tokens=prompt_tokens,
        max_new_tokens=plan.sampling.max_new_tokens,
        eval_max_new_tokens=plan.eval_sampling.max_new_tokens,
        sampling_batch_size=0 if plan.engine.needs_server else plan.engine.client_node.get("batch_size", 1),
        trainers=tuple(trainers),
        reference_is_beside=reference is None and config.model.ref_device != "cpu",
        reference_gpu=reference,
        server=_server_request(plan, engine_gpus) if plan.engine.launcher is not None else None,
        total_bytes=tuple(total_bytes),
        host_bytes=available_bytes(),
    )


def _server_request(plan: Plan, gpus: Sequence[int]) -> ServerRequest:
    args = plan.server_args
    share = next((key for key in SHARE_KEYS if key in args), SHARE_KEYS[0])
    dtype = args.get("dtype")
    return ServerRequest(
        num_servers=plan.engine.num_managed,
        gpus=tuple(gpus),
        dtype=torch_dtype(
            dtype if dtype in TORCH_NAMES else plan.config.train.precision
        ),  # others, such as auto, are the model's own
        num_shards=num_shards(args),
        share_frac=args.get(share) or DEFAULT_SHARE,
        share_key=f"engine.args.{share}",
    )
