"""Loads what a run needs and connects the parts. The only module that knows all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from offline_grpo import progress
from offline_grpo.checkpoint.checkpointer import Checkpointer
from offline_grpo.checkpoint.files import TrainerState
from offline_grpo.engine.server import Server
from offline_grpo.eval.evaluator import PassAtKEvaluator
from offline_grpo.interfaces import Deployment, RolloutClient, RunListener, Sharding, Source, TextCodec
from offline_grpo.logger.first_look import FirstLook
from offline_grpo.loss.base import reward_penalty
from offline_grpo.model.device import make_current, resolve_device, torch_dtype
from offline_grpo.model.load import context_length, load_policy, load_reference
from offline_grpo.model.policy import Policy
from offline_grpo.model.proof import LONGEST, check_causality, import_ahead, settle_compile, settle_layout
from offline_grpo.placement.ranks import Ranks
from offline_grpo.redaction import redacted
from offline_grpo.report.run_files import WITHOUT_EFFECT
from offline_grpo.rollouts.store.recorder import Origin, Recorder, architecture_hash, tokenizer_hash
from offline_grpo.run.begin import Begun
from offline_grpo.run.build import build
from offline_grpo.run.config import fresh_schedule
from offline_grpo.run.gpu_memory import check_memory
from offline_grpo.run.plan import Plan, Start
from offline_grpo.run.prompts import check_model, codec_of
from offline_grpo.run.serving import deployments, loads_onto_servers_gpu
from offline_grpo.run.signals import StopSignal
from offline_grpo.run.task_data import TaskData, records, source_node
from offline_grpo.run.teacher import load_teacher
from offline_grpo.seeding import derive_seed
from offline_grpo.train.loop import Evaluation, Loop
from offline_grpo.train.milestones import Milestones
from offline_grpo.train.offload import OffloadedAdamW
from offline_grpo.train.optimizer import is_offloaded
from offline_grpo.train.sharding import Replicas
from offline_grpo.train.update import Updater
from offline_grpo.weight_sync.in_process import prove_sampling

BESIDE_BYTES = 4 * 2**30
"""On the GPU beside a copy of the weights: for short sequences, their gradients, and the compiler's trials."""


def assemble(
    start: Start, begun: Begun, stop: StopSignal, listeners: Sequence[RunListener], stack: ExitStack
) -> tuple[Loop, TaskData, TrainerState | None]:
    """The loop, its problems, and what the checkpoint said, None for a new run. `stack` ends what has to end."""
    ranks, config, folder = start.ranks, start.plan.config, start.run_dir.path
    plan, devices, model_id, servers = begun
    checkpoint = start.resume.checkpoint if start.resume is not None else None
    plan, prompt_tokens = check_model(plan, model_id)
    recompute = check_memory(plan, model_id, prompt_tokens=prompt_tokens, num_processes=ranks.world_size)
    if servers:
        device, dtype = resolve_device(config.model.device, ranks.local_rank), torch_dtype(config.train.precision)
        with progress.phase("imports and data"):
            import_ahead(plan.layout, config.model.compile, device, dtype)
    if loads_onto_servers_gpu(plan.weight_sync, devices):
        for server in servers:
            ranks.on_main(server.wait_for_memory)
    with progress.step("load model", f"loading the model {checkpoint or model_id}"):
        policy = _policy(plan, model_id, checkpoint, ranks, recompute)
    sharding = _sharding(config.train.sharding, ranks)
    sharding.prepare(policy)
    is_shared = plan.weight_sync.requires.shares_weights and ranks.is_main  # else `load_policy` has settled it
    is_settled = is_shared and _moves_beside(servers, policy)  # while the server records its CUDA graphs
    if is_settled:
        _settle(policy, plan)
    training, evaluation = deployments(plan, servers, policy, sharding, folder, ranks)
    for deployment in dict.fromkeys((training, evaluation)):
        stack.callback(deployment.close)
        deployment.connect(policy)
    if is_shared and not is_settled:
        _settle(policy, plan)
    with progress.phase("proof"):
        longest = min(max(16, prompt_tokens[1] + plan.sampling.max_new_tokens), LONGEST[policy.compute_device.type])
        check_causality(policy.scoring, longest, policy.compute_device)
        if not plan.engine.needs_server and (plan.data.train is not None or config.eval.enabled):
            with sharding.gathered(policy):
                prove_sampling(training.client, policy, longest)
    with progress.phase("masters"):
        masters = policy.make_masters(offload=is_offloaded(plan.optimizer))
        if config.train.dither_masters and checkpoint is None:  # which has its own
            masters.dither(config.seed)
    updater = make_updater(plan, policy, model_id, folder, ranks, sharding)
    if start.resume is not None and start.resume.lr_schedule is not None:
        updater.lr_schedule = start.resume.lr_schedule
    public = redacted(start.plain)
    about = {key: value for key, value in public.items() if key not in WITHOUT_EFFECT}
    origin = Origin(model_id, architecture_hash(policy.causal_lm.config), tokenizer_hash(policy.tokenizer), about)
    codec = codec_of(config, policy.tokenizer, policy.causal_lm.generation_config)
    source = _source(plan, policy, codec, training.client, updater, folder, origin)
    stack.callback(source.close)
    milestones = Milestones(config.checkpoint.keep_best, config.train.stop_when)
    checkpointer = Checkpointer(
        policy=policy,
        updater=updater,
        source=source,
        milestones=milestones,
        folder=start.run_dir.checkpoints,
        ranks=ranks,
        config=public,
        keep_last_k=config.checkpoint.num_kept,
        format=config.checkpoint.format,
    )
    if ranks.is_main and records(config):  # before all other listeners
        recorder = Recorder(folder, origin, lambda: (updater.counters.version, policy.trained_here()))
        stack.callback(recorder.close)
        listeners = [recorder, *listeners]
    listeners = [*listeners, FirstLook(codec.tokenizer, codec.end_ids)]
    for listener in listeners:
        listener.loaded(partial(codec.decode, skip_special_tokens=False))
    last, save_interval = config.train.iterations - 1, config.checkpoint.save_interval
    loop = Loop(
        policy=policy,
        updater=updater,
        source=source,
        milestones=milestones,
        config=config.train,
        deployment=training,
        push_interval=plan.weight_sync.interval,
        evaluation=_evaluation(plan, codec, evaluation, ranks) if config.eval.enabled else None,
        checkpointer=checkpointer if config.checkpoint.enabled else None,
        save_due=lambda i: i == last or (save_interval > 0 and (i + 1) % save_interval == 0),
        listeners=listeners,
        ranks=ranks,
        stop=stop,
        on_failure=config.scoring.on_failure,
        stop_at_failed_frac=config.scoring.stop_at_failed_frac,
        fills_updates=config.data.resample_zero_signal,
    )
    return loop, plan.data, checkpointer.restore(checkpoint) if checkpoint is not None else None


def _moves_beside(servers: Sequence[Server], policy: Policy) -> bool:
    """Move weights that will be a server's memory, and are on the CPU still, to its device, if a copy has room there
    for as long as the server starts. Not before the server has taken its memory.
    """
    device, model = policy.compute_device, cast(nn.Module, policy.model)
    if device.type == "cuda":
        for server in servers:
            server.wait_for_memory()
        if torch.cuda.mem_get_info(device)[0] < BESIDE_BYTES + sum(p.nbytes for p in model.parameters()):
            return False
        make_current(device)
    model.to(device)
    return True


def _settle(policy: Policy, plan: Plan) -> None:
    with progress.phase("layout and compile"):
        settle_layout(policy.scoring, plan.layout, policy.compute_device)
        settle_compile(policy.scoring, plan.config.model.compile, policy.compute_device)


def _sharding(name: str, ranks: Ranks) -> Sharding:
    if name == "none" or ranks.world_size == 1:  # a single process has nobody to share with
        return Replicas(ranks)
    from offline_grpo.train.fsdp2 import FullyShardedPolicy  # which takes a second

    return FullyShardedPolicy(ranks)


def _policy(plan: Plan, model_id: str, checkpoint: Path | None, ranks: Ranks, recompute: float) -> Policy:
    config = plan.config
    torch.manual_seed(derive_seed(config.seed, "adapters"))  # LoRA draws its first weights
    return load_policy(
        config.model,
        model_id,
        layout=plan.layout,
        head=plan.head,
        device=resolve_device(config.model.device, ranks.local_rank),
        precision=config.train.precision,
        train_layer_indices=config.train.train_layer_indices,
        gradient_checkpointing=recompute,
        checkpoint=checkpoint,
        shares_weights=plan.weight_sync.requires.shares_weights and ranks.is_main,
    )


def make_updater(
    plan: Plan, policy: Policy, model_id: str, run_folder: Path, ranks: Ranks, sharding: Sharding
) -> Updater:
    """The updater of a run whose policy is loaded; loads the reference if there is a KL term, and the teacher."""
    train, reference = plan.config.train, None
    if plan.loss.kl_coef > 0:
        with progress.phase("load reference"):
            model = plan.config.model
            reference = load_reference(model, model_id, policy, layout=plan.layout, precision=train.precision)
            sharding.prepare_reference(reference)
    teacher = load_teacher(plan, policy, sharding)
    optimizer = plan.optimizer.create(policy.masters.parameters.values())
    return Updater(
        policy=policy,
        reference=reference,
        loss=plan.loss,
        advantage=plan.advantage,
        reward_penalty=reward_penalty(plan.loss),
        teacher=teacher,
        optimizer=OffloadedAdamW(optimizer, policy.masters) if is_offloaded(plan.optimizer) else optimizer,
        scaler=torch.amp.GradScaler(policy.device.type, enabled=train.precision == "fp16"),
        config=train,
        ranks=ranks,
        sharding=sharding,
        max_new_tokens=plan.sampling.max_new_tokens,
        lr_schedule=fresh_schedule(plan.config),
        seed=plan.config.seed,
        failure_dir=run_folder,
    )


def _source(
    plan: Plan,
    policy: Policy,
    codec: TextCodec,
    client: RolloutClient,
    updater: Updater,
    run_folder: Path,
    origin: Origin,
) -> Source:
    """The component of the group `rollouts`, connected to the client that it samples from."""
    runtime = {
        "client": client,
        "task": plan.data.task,
        "codec": codec,
        "vocab_size": policy.vocab_size,
        "context": context_length(policy.causal_lm.config),
        "sampling": plan.sampling,
        "advantage": plan.advantage,
        "on_failure": plan.config.scoring.on_failure,
        "run_folder": run_folder,
        "model_id": origin.model,
        "origin": origin,
        "rank": updater.ranks.rank,
        "world_size": updater.ranks.world_size,
        "trainer_version": lambda: updater.counters.version,
        "updates_per_iteration": plan.config.planned_updates,
        "num_iterations": plan.config.train.iterations,
        **({} if plan.data.train is None else {"problems": plan.data.train}),
    }
    return build(source_node(plan.config), key="rollouts", protocol=Source, **runtime)


def _evaluation(plan: Plan, codec: TextCodec, deployment: Deployment, ranks: Ranks) -> Evaluation:
    """The evaluator of held-out problems, which asks `deployment`, and when it does."""
    settings, last = plan.config.eval, plan.config.train.iterations - 1
    evaluator = PassAtKEvaluator.of(
        settings,
        task=plan.data.task,
        problems=plan.data.held_out,
        codec=codec,
        sampling=plan.eval_sampling,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    return Evaluation(
        evaluator=evaluator,
        deployment=deployment,
        before_training=settings.eval_first,
        is_due=lambda i: i == last or (i + 1) % settings.interval == 0,
    )
