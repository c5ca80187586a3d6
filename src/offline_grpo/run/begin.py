"""What a run starts before it imports the rest and looks at its prompts: the servers, which take longest."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from offline_grpo.checkpoint.files import check_model_folder
from offline_grpo.engine.server import Server, next_to_start
from offline_grpo.errors import ScoreError, require
from offline_grpo.generation.judging import judging, scores_of
from offline_grpo.generation.teacher import KEY
from offline_grpo.model import nf4
from offline_grpo.model.device import resolve_device, torch_dtype
from offline_grpo.model.gguf import convert
from offline_grpo.placement.devices import Devices, check_devices, server_gpus
from offline_grpo.placement.ranks import Ranks
from offline_grpo.run.build import build
from offline_grpo.run.log_outputs import hide_progress_bars
from offline_grpo.run.plan import Plan, Start
from offline_grpo.run.serving import check_found_servers, starts_before_the_policy, training_servers
from offline_grpo.run.task_data import isolated
from offline_grpo.train.advantage.gdpo import GDPO


class Begun(NamedTuple):
    """The plan, with a task that scores in processes of its own, where it computes, the model to train, and the servers
    that training samples from.
    """

    plan: Plan
    devices: Devices
    model_id: str
    servers: list[Server]


def begin(start: Start, stack: ExitStack) -> Begun:
    """Start the servers, unless they need the policy.

    Args:
        stack: gets what has to be let go of on every way out.
    """
    ranks, config, folder = start.ranks, start.plan.config, start.run_dir.path
    how = {"num_processes": ranks.world_size, "on_cluster": config.placement.score_on_cluster}
    task = isolated(start.plan.data.task, config, folder, stack, **how)
    plan = replace(start.plan, data=replace(start.plan.data, task=task))
    if isinstance(plan.advantage, GDPO) and plan.data.train and plan.advantage.needs_score(config):
        with suppress(ScoreError):  # of an empty answer, which the model may never give
            plan.advantage.check_score(scores_of(list(judging(task, plan.data.train[0], [""])), 1)[0])
    if (
        plan.engine.launcher is not None and config.placement.address is None
    ):  # each machine of a cluster checks its own
        plan.engine.launcher.check_installed()
    devices = plan.devices(ranks.world_size)
    check_devices(devices)
    if plan.layout is not None:  # to choose one starts CUDA, which takes a second
        plan.layout.check(resolve_device(config.model.device), torch_dtype(config.train.precision))
    if config.model.quantization is not None:
        nf4.check_device(resolve_device(config.model.device, ranks.local_rank))
    model_id = _model_id(plan, ranks)
    ranks.on_main(lambda: check_found_servers(plan, model_id))
    checkpoint = start.resume.checkpoint if start.resume is not None else None
    servers = training_servers(plan, server_gpus(devices), folder, ranks, stack)
    if starts_before_the_policy(plan.engine, plan.weight_sync, devices):
        moves_all = plan.lora_rank is None and plan.weight_sync.requires.moves != "nothing"
        served = str(checkpoint) if checkpoint is not None and moves_all else model_id
        for server in next_to_start(servers):
            ranks.on_main(lambda server=server: server.begin(served))
    return Begun(plan, devices, model_id, servers)


def _model_id(plan: Plan, ranks: Ranks) -> str:
    """The model to train: a folder, a hub id, or a folder in the cache with the model of a GGUF file or the tiny model,
    which the first process builds if it is missing.
    """
    config = plan.config
    named = {"model.train_id": config.model.train_id, "model.ref_id": config.model.ref_id, KEY: plan.advantage.teacher}
    for key, name in named.items():
        if name is not None:
            ranks.on_main(lambda key=key, name=name: check_model_folder(name, key))
    if config.model.train_id is not None:
        return config.model.train_id
    hide_progress_bars()
    cache = Path(config.cache_dir).resolve()
    if (gguf_file := config.model.gguf_file) is not None:
        return ranks.on_main(lambda: str(convert(gguf_file, cache)))
    tiny = build(config.model.tiny, key="model.tiny")
    for key, sampling in (("generation", plan.sampling), ("eval", plan.eval_sampling)):
        room = tiny.max_position_embeddings
        fix = f"leaves no room for a prompt in the context of model.tiny.max_position_embeddings={room}"
        require(sampling.max_new_tokens < room, f"{key}.max_new_tokens", sampling.max_new_tokens, fix)
    return ranks.on_main(lambda: str(tiny.prepare(plan.data.task, cache, show_progress=True)))
