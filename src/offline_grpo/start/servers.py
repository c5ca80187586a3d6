"""What a run samples from: the servers, which take longest and so are started before transformers is imported and
prompts are looked at; and the deployments of training and evaluation, once there is a policy.
"""

from __future__ import annotations

import logging
import shlex
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from offline_grpo.checkpoint.files import check_model_folder
from offline_grpo.config.build import build
from offline_grpo.config.engine_spec import EngineSpec, num_shards
from offline_grpo.config.parts import Plan
from offline_grpo.config.problems import isolated
from offline_grpo.disk import models_cache
from offline_grpo.engine.engine import next_to_start
from offline_grpo.engine.ray_actor import Room
from offline_grpo.engine.server_engine import ServerEngine
from offline_grpo.errors import ConfigError, EngineError, ScoreError, require
from offline_grpo.generation.judging import Judgement
from offline_grpo.generation.teacher import KEY
from offline_grpo.history.records import hide_progress_bars
from offline_grpo.model.device import TORCH_NAMES, resolve_device, torch_dtype
from offline_grpo.model.gguf import convert
from offline_grpo.model.quantization import check_nf4
from offline_grpo.model.text import end_ids
from offline_grpo.placement.devices import Devices
from offline_grpo.state import Run
from offline_grpo.train.advantage import GDPO
from offline_grpo.types import SamplingParams
from offline_grpo.weight_sync.deployment import Deployment
from offline_grpo.weight_sync.lora import LoraRestart, room_for
from offline_grpo.weight_sync.strategy import WeightSync

log = logging.getLogger(__name__)


def begin_scoring(run: Run) -> None:
    """Fork the processes that score completions, and play episodes. They are forked while this one is small."""
    plan, config = run.plan, run.config
    how = {"num_processes": run.ranks.world_size, "on_cluster": config.placement.score_on_cluster}
    plan.data = replace(plan.data, task=isolated(plan.data.task, config, run.folder.path, run.stack, **how))


def check_machine(run: Run) -> None:
    """Refuse what this machine lacks: vLLM, GPUs, a layout's kernels, the model's files, running servers. The model is
    there after that: of a tiny one and of a GGUF file, the first process makes it if it is missing.
    """
    ranks, plan, config = run.ranks, run.plan, run.config
    # Whether a reward of the user's own has the several parts that gdpo adds up, one score tells.
    if isinstance(plan.advantage, GDPO) and plan.data.train and plan.advantage.needs_score(config):
        with suppress(ScoreError):  # of an empty answer, which the model may never give
            plan.advantage.check_score(Judgement(plan.data.task, plan.data.train[0], [""]).scores()[0])

    if ranks.world_size % (size := config.train.sequence_parallel):
        fix = f"must divide the number of training processes, {ranks.world_size} (accelerate launch --num_processes N)"
        raise ConfigError("train.sequence_parallel", size, fix)
    if config.is_batch_invariant and plan.engine.launcher is not None:
        fix = "vLLM can do so on NVIDIA GPUs; on a CPU, use +engine.args.max_num_seqs=1"
        require(resolve_device(config.model.device).type == "cuda", "generation.batch_invariant", "true", fix)
    if plan.engine.launcher is not None and config.placement.address is None:  # machines of a cluster check their own
        plan.engine.launcher.check_installed()
    run.devices = plan.devices(ranks.world_size)
    if plan.layout is not None:  # to choose one starts CUDA, which takes a second
        plan.layout.check(resolve_device(config.model.device), torch_dtype(config.train.precision))
    if config.model.quantization is not None:
        check_nf4(resolve_device(config.model.device, ranks.local_rank))

    # The model: a folder, a hub id, or a folder in the cache.
    named = {"model.train_id": config.model.train_id, "model.ref_id": config.model.ref_id, KEY: plan.advantage.teacher}
    for key, name in named.items():
        if name is not None:
            ranks.on_main(lambda key=key, name=name: check_model_folder(name, key))
    cache, gguf_file = models_cache(config.cache_dir), config.model.gguf_file
    if config.model.train_id is not None:
        run.model_id = config.model.train_id
    elif gguf_file is not None:
        hide_progress_bars()
        run.model_id = ranks.on_main(lambda: str(convert(gguf_file, cache)))
    else:
        hide_progress_bars()
        tiny = build(config.model.tiny, key="model.tiny")
        for key, sampling in (("generation", plan.sampling), ("eval", plan.eval_sampling)):
            room = tiny.max_position_embeddings
            fix = f"leaves no room for a prompt in the context of model.tiny.max_position_embeddings={room}"
            require(sampling.max_new_tokens < room, f"{key}.max_new_tokens", sampling.max_new_tokens, fix)
        run.model_id = ranks.on_main(lambda: str(tiny.prepare(plan.data.task, cache)))
    ranks.on_main(lambda: check_found_servers(plan, run.model_id))


def check_found_servers(plan: Plan, model_id: str) -> None:
    """Look at servers that the run does not start, before anything large is loaded.

    Args:
        model_id: the model that they should serve, for the message. Of a model with adapters, a server has the base.

    Raises:
        EngineError: nobody answers there.
        ConfigError: a server lacks what weight sync needs; names the command that starts a right one.
    """
    asked = [(plan.engine, plan.weight_sync)]
    asked += [] if plan.eval_engine is None else [(plan.eval_engine, plan.eval_weight_sync)]
    for spec, weight_sync in asked:
        for number in range(len(spec.base_urls)):
            # What starts a server at that address that has all that weight sync needs.
            engine, needs = spec.engine(number), weight_sync.requires
            args = {"port": urlsplit(engine.base_url).port, "dtype": TORCH_NAMES[plan.config.train.precision]}
            args |= {} if plan.config.model.quantization is None else {"quantization": "bitsandbytes"}
            room = {} if plan.lora_rank is None else {"max_lora_rank": room_for(plan.lora_rank)}
            words = engine.start_words(model_id, args, {**needs.server_args, **room})
            env = [f"{name}={shlex.quote(value)}" for name, value in needs.env.items()]
            command = " ".join([*env, shlex.join(["python", "-m", *words])])

            try:
                engine.start(model_id, {})
            except EngineError as error:
                raise EngineError(f"{error}; this starts one: {command}") from error
            lack = engine.lacks(needs.moves)
            asked_by_environments = spec is plan.engine and plan.config.source.has_environments
            if asked_by_environments and not engine.has("/generate"):
                lack = "has no POST /generate, which environments call (--middleware offline_grpo_generate.Generate)"
            elif lack is not None and needs.moves == "nothing":
                log.warning(
                    "%s=%s: that server %s; weight_sync=none uses it as it is", engine.url_key, engine.base_url, lack
                )
                continue
            if lack is None and plan.lora_rank is not None and needs.moves == "lora":
                most = engine.describe().get("max_lora_rank") or plan.lora_rank  # a stock server does not say
                if plan.lora_rank > most:
                    lack = f"has --max-lora-rank {most}, below model.lora.r={plan.lora_rank}"
            if lack is not None:
                fix = f"that server {lack}; see docs/weight_sync.md, Your own server. Start one that has it: {command}"
                raise ConfigError(f"{engine.url_key}={engine.base_url}: {fix}")


def begin(run: Run) -> None:
    """Make the engines that training samples from, and start their servers, unless these need the policy."""
    plan = run.plan
    run.servers = make_engines(run)
    if not starts_before_the_policy(plan.engine, plan.weight_sync, run.devices):
        return
    # A resumed run's server begins with the checkpoint's weights, unless only an adapter moves.
    moves_all = plan.lora_rank is None and plan.weight_sync.requires.moves != "nothing"
    served = str(run.checkpoint) if run.checkpoint is not None and moves_all else run.model_id
    for server in next_to_start(run.servers):
        run.ranks.on_main(lambda server=server: server.begin(served, {}))


def make_engines(run: Run) -> list[ServerEngine]:
    """The engines of the servers that training samples from, not started yet; none where it samples in this process."""
    plan, spec, about = run.plan, run.plan.engine, {"log_dir": run.folder.path}
    engines: list[ServerEngine] = []

    def make() -> list[tuple[str, str | None]]:
        """On rank 0: with what starts and restarts them, here or in a Ray cluster. All processes share the key that a
        run makes up.
        """
        placement, numbers, room = plan.config.placement, count(), None
        if placement.address is not None:
            where: Any = {"gpus": num_shards(plan.server_args), "strategy": "SPREAD"}
            key, how_many = "placement.num_engines", spec.num_managed
            room = Room(placement.address, placement.ray_init, key, how_many, **where)
            log.info("the Ray cluster at %s: %s", placement.address, room.machines)
            run.stack.callback(room.close)
        for number in range(spec.num_managed):
            place = {"room": room} if room is not None else {"gpus": run.devices.servers[number]}
            engines.append(spec.engine(number, **about, log_numbers=numbers, **place))
        return [(engine.base_url, engine.api_key) for engine in engines]

    if spec.launcher is not None:
        addresses = run.ranks.on_main(make)
        if not engines:  # on another rank
            found: list[Any] = [{"base_url": url, "api_key": key, "launcher": None} for url, key in addresses]
            engines = [spec.engine(**about, **each) for each in found]
    else:
        engines = [spec.engine(number, **about) for number in range(len(spec.base_urls))]
    for engine in engines:
        run.stack.callback(engine.stop)
    return engines


def starts_before_the_policy(spec: EngineSpec, weight_sync: WeightSync, devices: Devices) -> bool:
    """Whether the servers may start before the policy is loaded."""
    needs_policy = isinstance(weight_sync, LoraRestart)  # its command line names the adapter
    tells = spec.launcher is not None and spec.launcher.tells_of_memory
    return not needs_policy and (tells or not loads_onto_servers_gpu(weight_sync, devices))


def loads_onto_servers_gpu(weight_sync: WeightSync, devices: Devices) -> bool:
    """Whether the policy is loaded onto a GPU of a server, and so not before that has taken its memory
    (`ServerEngine.wait_for_memory`).
    """
    is_shared = any(own is None or gpu in own for own in devices.servers for gpu in devices.trainers)
    return is_shared and not weight_sync.requires.shares_weights


def deployments(run: Run) -> tuple[Deployment, Deployment]:
    """What training samples from and what evaluations ask, which may be the same; not connected yet."""
    plan, policy, ranks, sharding = run.plan, run.policy, run.ranks, run.sharding
    eos_ids = end_ids(policy.causal_lm.generation_config, policy.tokenizer)

    def deployment(
        spec: EngineSpec, engines: list[ServerEngine], sync: WeightSync, sampling: SamplingParams
    ) -> Deployment:
        is_corrected = plan.is_corrected or spec is plan.eval_engine
        if not spec.needs_server:
            known = {"eos_ids": eos_ids, "vocab_size": policy.vocab_size, "sampling": sampling}
            about = {"model": policy.model, "tokenizer": policy.tokenizer, "is_corrected": is_corrected}
            return Deployment([spec.engine(**about, **known, vision=run.vision)], sync, sharding.full_weights)
        for engine in engines:  # what they could not know before there was a policy
            engine.eos_ids, engine.vocab_size = eos_ids, policy.vocab_size
            engine.sampling, engine.is_corrected = sampling, is_corrected
            engine.banned_ids = () if run.vision is None else run.vision.stand_ins
        leads = (ranks, sharding.lead) if ranks.world_size > 1 else None
        return Deployment(engines, sync, sharding.full_weights, leads)

    # Evaluations ask the same engines, unless the settings name a server for them.
    training = deployment(plan.engine, run.servers, plan.weight_sync, plan.sampling)
    if plan.eval_engine is None:
        return training, training
    found = [plan.eval_engine.engine(i, log_dir=run.folder.path) for i in range(len(plan.eval_engine.base_urls))]
    return training, deployment(plan.eval_engine, found, plan.eval_weight_sync, plan.eval_sampling)
