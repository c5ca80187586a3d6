"""What a run starts before it imports transformers and looks at its prompts: the servers, which take longest."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from offline_grpo.checkpoint.files import check_model_folder
from offline_grpo.config.build import build
from offline_grpo.config.problems import isolated
from offline_grpo.engine.server import next_to_start
from offline_grpo.errors import ScoreError, require
from offline_grpo.generation.judging import judging, scores_of
from offline_grpo.generation.teacher import KEY
from offline_grpo.history.records import hide_progress_bars
from offline_grpo.model.device import resolve_device, torch_dtype
from offline_grpo.model.gguf import convert
from offline_grpo.model.quantization import check_nf4
from offline_grpo.placement.devices import check_devices, server_gpus
from offline_grpo.start.serving import check_found_servers, starts_before_the_policy, training_servers
from offline_grpo.state import Run
from offline_grpo.train.advantage.gdpo import GDPO


def begin(run: Run) -> None:
    """Look at the machine, and start the servers on it, unless they need the policy. The processes that score start
    too.
    """
    ranks, plan, config, folder = run.ranks, run.plan, run.config, run.folder.path
    # Completions are scored in processes of their own, which are forked while this one is small.
    how = {"num_processes": ranks.world_size, "on_cluster": config.placement.score_on_cluster}
    plan.data = replace(plan.data, task=isolated(plan.data.task, config, folder, run.stack, **how))

    # Whether a reward of the user's own has the several parts that gdpo adds up, one score tells.
    if isinstance(plan.advantage, GDPO) and plan.data.train and plan.advantage.needs_score(config):
        with suppress(ScoreError):  # of an empty answer, which the model may never give
            judgements = list(judging(plan.data.task, plan.data.train[0], [""]))
            plan.advantage.check_score(scores_of(judgements, 1)[0])

    # Refuse what this machine lacks: vLLM, GPUs, a layout's kernels, the model's files, running servers.
    if plan.engine.launcher is not None and config.placement.address is None:  # machines of a cluster check their own
        plan.engine.launcher.check_installed()
    run.devices = plan.devices(ranks.world_size)
    check_devices(run.devices)
    if plan.layout is not None:  # to choose one starts CUDA, which takes a second
        plan.layout.check(resolve_device(config.model.device), torch_dtype(config.train.precision))
    if config.model.quantization is not None:
        check_nf4(resolve_device(config.model.device, ranks.local_rank))
    run.model_id = _model_id(run)
    ranks.on_main(lambda: check_found_servers(plan, run.model_id))

    # A resumed run's server begins with the checkpoint's weights, unless only an adapter moves.
    run.servers = training_servers(plan, server_gpus(run.devices), folder, ranks, run.stack)
    if starts_before_the_policy(plan.engine, plan.weight_sync, run.devices):
        moves_all = plan.lora_rank is None and plan.weight_sync.requires.moves != "nothing"
        served = str(run.checkpoint) if run.checkpoint is not None and moves_all else run.model_id
        for server in next_to_start(run.servers):
            ranks.on_main(lambda server=server: server.begin(served))


def _model_id(run: Run) -> str:
    """The model to train: a folder, a hub id, or a folder in the cache with the model of a GGUF file or the tiny model,
    which the first process builds if it is missing.
    """
    plan, config, ranks = run.plan, run.config, run.ranks
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
