"""Loads the model of a run, and connects it with engines, data and optimizer: the steps of `run.train` that need
transformers, in their order.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn

from offline_grpo import progress
from offline_grpo.checkpoint.checkpointer import Checkpointer
from offline_grpo.config.build import build
from offline_grpo.config.compose import fresh_schedule
from offline_grpo.config.problems import records, source_node
from offline_grpo.eval.evaluator import PassAtKEvaluator
from offline_grpo.generation.teacher import KEY, TeacherServer
from offline_grpo.interfaces import Source
from offline_grpo.logger.samples import FirstLook
from offline_grpo.loss.base import reward_penalty
from offline_grpo.model import load, proof
from offline_grpo.model.device import make_current, resolve_device, torch_dtype
from offline_grpo.model.masters import part_of_process
from offline_grpo.model.proof import LONGEST, check_causality, import_ahead
from offline_grpo.model.scoring import BaseScoring
from offline_grpo.redaction import redacted
from offline_grpo.report.runs import WITHOUT_EFFECT
from offline_grpo.rollouts.recorder import Origin, Recorder, architecture_hash, tokenizer_hash
from offline_grpo.seeding import derive_seed
from offline_grpo.start import prompts, servers
from offline_grpo.state import Run
from offline_grpo.train.advantage import is_url
from offline_grpo.train.batch import Passes
from offline_grpo.train.optimizer import OffloadedAdamW, is_offloaded
from offline_grpo.train.schedule import Milestones
from offline_grpo.train.sharding import Sharding
from offline_grpo.train.update import Updater
from offline_grpo.weight_sync.in_process import prove_sampling

BESIDE_BYTES = 4 * 2**30
"""On the GPU beside a copy of the weights: for short sequences, their gradients, and the compiler's trials."""


def load_policy(run: Run) -> None:
    """Read the policy's weights, in this process's memory or onto its GPU."""
    plan, config, ranks = run.plan, run.config, run.ranks
    device = resolve_device(config.model.device, ranks.local_rank)

    # While servers start, packages are imported that layout and compiler need.
    if run.servers:
        with progress.phase("imports and data"):
            import_ahead(plan.layout, config.model.compile, device, torch_dtype(config.train.precision))

    # Not onto a GPU that a server shares before the server has taken its memory: vLLM measures what is free.
    if servers.loads_onto_servers_gpu(plan.weight_sync, run.devices):
        for server in run.servers:
            ranks.on_main(server.wait_for_memory)
    with progress.step("load model", f"loading the model {run.checkpoint or run.model_id}"):
        torch.manual_seed(derive_seed(config.seed, "adapters"))  # LoRA draws its first weights
        run.policy = load.load_policy(
            config.model,
            run.model_id,
            layout=plan.layout,
            head=plan.head,
            device=device,
            precision=config.train.precision,
            train_layer_indices=config.train.train_layer_indices,
            gradient_checkpointing=run.recompute,
            activation_offload=run.offloads_activations,
            checkpoint=run.checkpoint,
            shares_weights=_shares_weights(run),
        )

    if (size := config.train.sequence_parallel) > 1:
        proof.share_sequences(run.policy.scoring, ranks.neighbours(size), device)

    # A single process has nobody to share with.
    if config.train.sharding == "none" or ranks.world_size == 1:
        run.sharding = Sharding(ranks)
    else:
        from offline_grpo.train.fsdp2 import FullyShardedPolicy  # which takes a second

        run.sharding = FullyShardedPolicy(ranks)
    run.sharding.prepare(run.policy)


def connect_engines(run: Run) -> None:
    """Wait for the servers, or start those that need the policy, and open the way of its weights to them."""
    # Where a server's memory becomes the policy's, layout and compiler are tried while it records its CUDA graphs: on
    # its GPU, if a copy of the weights has room there, but not before the server has taken its memory. Elsewhere
    # `load_policy` has done it.
    policy, device, is_shared = run.policy, run.policy.compute_device, _shares_weights(run)
    has_room = True
    if is_shared:
        model = cast(nn.Module, policy.model)
        if device.type == "cuda":
            for server in run.servers:
                server.wait_for_memory()
            needed = BESIDE_BYTES + sum(p.nbytes for p in model.parameters())
            has_room = torch.cuda.mem_get_info(device)[0] >= needed
        has_room = has_room and run.plan.lora_rank is None  # torch's cache keeps the copy, and that is what is saved
        if has_room:
            make_current(device)
            model.to(device)
            _settle(run)

    run.training, run.evaluation = servers.deployments(run)
    for deployment in dict.fromkeys((run.training, run.evaluation)):
        run.stack.callback(deployment.close)
        deployment.connect(policy)
    if is_shared and not has_room:
        _settle(run)


def _shares_weights(run: Run) -> bool:
    """Whether a server's weights are the memory of this process's policy."""
    return run.plan.weight_sync.requires.shares_weights and run.ranks.is_main


def _settle(run: Run) -> None:
    with progress.phase("layout and compile"):
        load.settle(run.policy.scoring, run.config.model, run.plan.layout, run.policy.compute_device)


def prove(run: Run) -> None:
    """Raise ConfigError unless this model attends to the past alone, and the sampler in this process draws from the
    distribution that training computes.
    """
    with progress.phase("proof"):
        device = run.policy.compute_device
        longest = min(max(16, run.prompt_tokens[1] + run.plan.sampling.max_new_tokens), LONGEST[device.type])
        check_causality(run.policy.scoring, longest, device)
        run.policy.scoring.vision = run.vision  # from here on tokens that stand for pictures have no probability
        samples = run.plan.data.train is not None or run.config.eval.enabled
        if samples and not run.plan.engine.needs_server:
            with run.sharding.gathered(run.policy):
                prove_sampling(run.training.client, run.policy, longest)


def prepare_training(run: Run) -> None:
    """Masters and optimizer, the source of rollouts, the evaluator, the checkpoint's state, and who follows the run."""
    plan, config, policy, ranks, folder = run.plan, run.config, run.policy, run.ranks, run.folder.path
    with progress.phase("masters"):
        masters = policy.make_masters(offload=is_offloaded(plan.optimizer))
        if config.train.dither_masters and run.checkpoint is None:  # which has its own
            masters.dither(config.seed)
    run.updater = make_updater(run)

    # The source of rollouts. Their record says what model sampled them, and under which settings.
    public = redacted(run.plain)
    about = {key: value for key, value in public.items() if key not in WITHOUT_EFFECT}
    origin = Origin(run.model_id, architecture_hash(policy.causal_lm.config), tokenizer_hash(policy.tokenizer), about)
    run.codec = prompts.codec_of(config, policy.tokenizer, policy.causal_lm.generation_config, run.vision)
    runtime = {
        "client": run.training.client,
        "task": plan.data.task,
        "codec": run.codec,
        "vocab_size": policy.vocab_size,
        "context": load.context_length(policy.causal_lm.config),
        "sampling": plan.sampling,
        "advantage": plan.advantage,
        "on_failure": config.scoring.on_failure,
        "run_folder": folder,
        "model_id": origin.model,
        "origin": origin,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "trainer_version": lambda: run.updater.counters.version,
        "updates_per_iteration": config.planned_updates,
        "num_iterations": config.train.iterations,
        **({} if plan.data.train is None else {"problems": plan.data.train}),
    }
    run.source = build(source_node(config), key="rollouts", protocol=Source, **runtime)
    run.stack.callback(run.source.close)

    # Who evaluates, what an evaluation decides, and what keeps the state.
    if config.eval.enabled:
        run.evaluator = PassAtKEvaluator.of(
            config.eval,
            task=plan.data.task,
            problems=plan.data.held_out,
            codec=run.codec,
            sampling=plan.eval_sampling,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    run.milestones = Milestones(config.checkpoint.keep_best, config.train.stop_when)
    checkpointer = Checkpointer(
        policy=policy,
        updater=run.updater,
        source=run.source,
        milestones=run.milestones,
        folder=run.folder.checkpoints,
        ranks=ranks,
        config=public,
        keep_last_k=config.checkpoint.num_kept,
        format=config.checkpoint.format,
    )
    run.checkpointer = checkpointer if config.checkpoint.enabled else None
    if run.checkpoint is not None:
        run.restored = checkpointer.restore(run.checkpoint)

    # Who follows the run: the record of rollouts first, because others may look at what it has written.
    if ranks.is_main and records(config):
        recorder = Recorder(
            folder,
            origin,
            lambda: (run.updater.counters.version, [part_of_process(p) for p in policy.trained_parameters().values()]),
        )
        run.stack.callback(recorder.close)
        run.listeners.insert(0, recorder)
    run.listeners.append(FirstLook(run.codec.tokenizer, run.codec.end_ids))
    for listener in run.listeners:
        listener.loaded(partial(run.codec.decode, skip_special_tokens=False))


def make_updater(run: Run) -> Updater:
    """The updater of a run whose policy is loaded; loads the reference if there is a KL term, and the teacher."""
    plan, policy, sharding, reference, teacher = run.plan, run.policy, run.sharding, None, None
    train, model, name = plan.config.train, plan.config.model, plan.advantage.teacher
    how: Any = {"layout": plan.layout, "precision": train.precision}
    # Frozen models: under LoRA the reference is the policy without its adapters, and costs nothing.
    if plan.loss.kl_coef > 0:
        with progress.phase("load reference"):
            if load.is_adapted_policy(model):
                reference = BaseScoring(policy.scoring)
            else:
                reference = load.load_frozen(model, model.ref_id or run.model_id, policy, key="model.ref_id", **how)
            sharding.prepare_reference(reference)
    if name is not None and is_url(name):
        teacher = TeacherServer(name)
    elif name is not None:
        with progress.phase("load teacher"):
            teacher = load.load_frozen(model, name, policy, key=KEY, **how)
            sharding.prepare_reference(teacher)

    # What scores a batch, and what steps.
    passes = Passes(
        policy=policy,
        reference=reference,
        loss=plan.loss,
        advantage=plan.advantage,
        config=train,
        ranks=run.ranks,
        sharding=sharding,
        reward_penalty=reward_penalty(plan.loss),
        teacher=teacher,
        router_replay=model.router_replay,
    )
    optimizer = plan.optimizer.create(policy.masters.parameters.values())
    updater = Updater(
        passes,
        optimizer=OffloadedAdamW(optimizer, policy.masters) if is_offloaded(plan.optimizer) else optimizer,
        scaler=torch.amp.GradScaler(policy.device.type, enabled=train.precision == "fp16"),
        max_new_tokens=plan.sampling.max_new_tokens,
        lr_schedule=fresh_schedule(plan.config),
        seed=plan.config.seed,
        failure_dir=run.folder.path,
    )
    if run.resume is not None and run.resume.lr_schedule is not None:
        updater.lr_schedule = run.resume.lr_schedule
    return updater
