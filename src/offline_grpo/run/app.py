"""Puts a run together: configuration in, trained model and files out. The only module that knows all concrete parts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from offline_grpo.checkpoint.checkpointer import Checkpointer
from offline_grpo.errors import ConfigError, StopRequested, require
from offline_grpo.eval.evaluator import PassAtKEvaluator
from offline_grpo.interfaces import MetricLogger, RolloutClient
from offline_grpo.model.load import load_policy, load_reference, load_tokenizer, read_model_config, resolve_device
from offline_grpo.model.policy import Policy
from offline_grpo.model.text import encode
from offline_grpo.placement.devices import check_devices, check_memory
from offline_grpo.placement.ranks import Ranks
from offline_grpo.report.history import load_history
from offline_grpo.report.plots import save_report
from offline_grpo.report.summary import print_summary
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.run import serving
from offline_grpo.run.build import build
from offline_grpo.run.config import as_plain, typed
from offline_grpo.run.interrupt import StopSignal
from offline_grpo.run.preflight import Plan, check_context, describe_batches, make_plan, planned_updates_per_iteration
from offline_grpo.run.run_dir import ResumePoint, RunDir, discard_fresh, find_resume_point
from offline_grpo.seeding import derive_seed
from offline_grpo.settings import RunConfig
from offline_grpo.train.loop import Loop
from offline_grpo.train.update import Updater

log = logging.getLogger(__name__)


def run(cfg: DictConfig, output_dir: Path) -> float | None:
    """One run, from the composed configuration to the report. Returns the last pass@1, None where nothing was evaluated.

    Args:
        output_dir: the folder that Hydra made for this start; a resumed run works in its own folder and this one goes away.
    """
    fresh = RunDir(output_dir.resolve())
    with _leaving_no_empty_folder(fresh):
        config, plain = typed(cfg), as_plain(cfg)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        ranks = Ranks(use_cpu=resolve_device(config.model.device).type == "cpu")
        plan = make_plan(config)
        resume = ranks.from_main(find_resume_point(config.resume, fresh, plain) if ranks.is_main else None)
        run_dir = ranks.from_main(resume.run_dir if resume is not None else fresh)
        with _logging(run_dir, ranks):
            return _run(plan, plain, run_dir, resume, ranks)


def _run(plan: Plan, plain: Mapping[str, Any], run_dir: RunDir, resume: ResumePoint | None, ranks: Ranks) -> float | None:
    config = plan.config
    stop = StopSignal()
    with stop.installed(), ExitStack() as stack:
        loggers = _loggers(config, run_dir) if ranks.is_main else []
        loop, first_iteration = _assemble(plan, plain, run_dir, resume, ranks, stop, loggers, stack)
        if ranks.is_main:
            run_dir.create()
            log.info("run folder: %s", run_dir.path)
            log.info(describe_batches(plan))
        if first_iteration > 0:
            log.info("resuming after iteration %d of %d", first_iteration, config.train.iterations)
        for logger in loggers:
            stack.callback(logger.close)
            logger.start(plain, config.train.iterations)
        try:
            loop.run(first_iteration)
        except StopRequested as signal:
            _close(loggers)
            log.warning("stopped by %s; go on with resume=%s", signal.signal_name, run_dir.path)
            raise
    return _report(run_dir) if ranks.is_main else None


def _close(loggers: Sequence[MetricLogger]) -> None:
    for logger in loggers:
        logger.close()


def _assemble(
    plan: Plan,
    plain: Mapping[str, Any],
    run_dir: RunDir,
    resume: ResumePoint | None,
    ranks: Ranks,
    stop: StopSignal,
    loggers: list[MetricLogger],
    stack: ExitStack,
) -> tuple[Loop, int]:
    """Load what needs loading and connect the parts. Returns the loop and the iteration that it starts with.

    Args:
        stack: what has to be let go of on every way out.
    """
    config = plan.config
    if plan.launcher is not None:
        plan.launcher.check_installed()
    check_devices(plan, ranks.world_size)
    model_id = _model_id(plan, ranks)
    check_memory(plan, model_id, longest_prompt=_check_model(plan, model_id), num_processes=ranks.world_size)
    checkpoint = resume.checkpoint if resume is not None else None
    policy = _policy(plan, model_id, checkpoint, ranks)
    training = serving.for_training(plan, policy, run_dir.path, ranks)
    evaluation = serving.for_evaluation(plan, policy, training, run_dir.path, ranks)
    for sampling in dict.fromkeys((training, evaluation)):
        stack.callback(sampling.weight_sync.close)
        sampling.weight_sync.connect(policy, sampling.client)
    policy.make_masters()
    updater = _updater(plan, policy, model_id, run_dir, ranks)
    checkpointer = None
    first_iteration = 0
    if config.checkpoint.enabled:
        checkpointer = Checkpointer(run_dir.checkpoints, policy, updater, config=plain, keep_last_k=config.checkpoint.keep_last_k)
        first_iteration = checkpointer.restore(checkpoint) + 1 if checkpoint is not None else 0
    last = config.train.iterations - 1
    loop = Loop(
        config=config.train,
        policy=policy,
        source=_source(plan, policy, training.client, ranks),
        updater=updater,
        weight_sync=training.weight_sync,
        eval_client=evaluation.client,
        eval_sync=evaluation.weight_sync if evaluation is not training else None,
        evaluator=_evaluator(plan, policy, ranks) if config.eval.enabled else None,
        checkpointer=checkpointer,
        loggers=loggers,
        ranks=ranks,
        stop=stop,
        temperature=plan.sampling.temperature,
        eval_first=config.eval.enabled and config.eval.eval_first,
        eval_due=lambda i: config.eval.enabled and (i == last or (i + 1) % config.eval.interval == 0),
        save_due=lambda i: checkpointer is not None and (i == last or _is_multiple(i + 1, config.checkpoint.save_interval)),
    )
    return loop, first_iteration


def _policy(plan: Plan, model_id: str, checkpoint: Path | None, ranks: Ranks) -> Policy:
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
        gradient_checkpointing=config.train.gradient_checkpointing,
        checkpoint=checkpoint,
        shares_weights=plan.weight_sync.shares_weights and ranks.is_main,
    )


def _is_multiple(number: int, interval: int) -> bool:
    return interval > 0 and number % interval == 0


def _model_id(plan: Plan, ranks: Ranks) -> str:
    """The model to train: a folder or hub id, or the tiny model, built by the first process if it is not in the cache."""
    config = plan.config
    if config.model.train_id is not None:
        return config.model.train_id
    tiny = build(config.model.tiny, key="model.tiny")
    for key, sampling in (("generation", plan.sampling), ("eval", plan.eval_sampling)):
        fix = f"leaves no room for a prompt in the context of model.tiny.max_position_embeddings={tiny.max_position_embeddings}"
        require(sampling.max_new_tokens < tiny.max_position_embeddings, f"{key}.max_new_tokens", sampling.max_new_tokens, fix)
    try:
        path = tiny.prepare(plan.task, Path(config.cache_dir).resolve(), show_progress=True) if ranks.is_main else None
    except OSError as error:
        raise ConfigError(f"cache_dir={config.cache_dir}: the tiny model cannot be kept there ({error.strerror or error})") from error
    return str(ranks.from_main(path))


def _check_model(plan: Plan, model_id: str) -> int:
    """What config.json and tokenizer say against the settings, before any weights are read. Returns the longest prompt, in tokens."""
    config = plan.config
    if plan.loss.kl_coef > 0 and config.model.ref_id is not None:
        read_model_config(config.model.ref_id, "model.ref_id")
    model_config = read_model_config(model_id, "model.train_id")
    tokenizer = load_tokenizer(model_id)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return check_context(plan, lambda messages: encode(tokenizer, messages), context)


def _updater(plan: Plan, policy: Policy, model_id: str, run_dir: RunDir, ranks: Ranks) -> Updater:
    config = plan.config
    needs_reference = plan.loss.kl_coef > 0
    return Updater(
        policy=policy,
        reference=load_reference(config.model, model_id, policy, precision=config.train.precision) if needs_reference else None,
        loss=plan.loss,
        optimizer=plan.optimizer.create(policy.masters.parameters.values()),
        scaler=torch.amp.GradScaler(policy.device.type, enabled=config.train.precision == "fp16"),
        config=config.train,
        ranks=ranks,
        max_new_tokens=plan.sampling.max_new_tokens,
        planned_updates=config.train.iterations * planned_updates_per_iteration(config),
        seed=config.seed,
        failure_dir=run_dir.path,
    )


def _source(plan: Plan, policy: Policy, client: RolloutClient, ranks: Ranks) -> OnPolicy:
    return OnPolicy(
        client=client,
        task=plan.task,
        problems=plan.train_problems,
        encode=policy.encode,
        decode=policy.decode,
        sampling=plan.sampling,
        problems_per_iteration=plan.config.data.problems_per_iteration,
        group_size=plan.config.data.rollouts_per_problem,
        shuffle=plan.config.data.shuffle,
        seed=plan.config.seed,
        ranks=ranks,
    )


def _evaluator(plan: Plan, policy: Policy, ranks: Ranks) -> PassAtKEvaluator:
    settings = plan.config.eval
    return PassAtKEvaluator(
        task=plan.task,
        problems=plan.eval_problems,
        encode=policy.encode,
        decode=policy.decode,
        sampling=plan.eval_sampling,
        ks=settings.ks,
        replicates=settings.replicates,
        seed_base=settings.seed_base,
        bootstrap_samples=settings.bootstrap_samples,
        rank=ranks.rank,
        world_size=ranks.world_size,
        gather=ranks.gather_results,
    )


def _loggers(config: RunConfig, run_dir: RunDir) -> list[MetricLogger]:
    nodes = config.logger or {}
    return [build(node, key=f"logger.{name}", protocol=MetricLogger, output_dir=run_dir.path) for name, node in nodes.items()]


def _report(run_dir: RunDir) -> float | None:
    """Draw report.png and print the summary from the recorded metrics. Returns the last pass@1."""
    history = load_history(run_dir.path)
    if not history.train:
        log.warning("no metrics were recorded (logger=json was left out), so there is no report")
        return None
    save_report(history)
    print_summary(history, Console())
    pass_at_1 = history.series("eval", "pass@1").values
    return float(pass_at_1[-1]) if len(pass_at_1) else None


@contextmanager
def _leaving_no_empty_folder(fresh: RunDir) -> Iterator[None]:
    """A start that was refused, or that went on in another run's folder, leaves nothing of its own behind."""
    try:
        yield
    finally:
        discard_fresh(fresh.path)


@contextmanager
def _logging(run_dir: RunDir, ranks: Ranks) -> Iterator[None]:
    """The package's messages go to run.log and, as plain lines, to the terminal; those of other processes nowhere."""
    package = logging.getLogger("offline_grpo")
    package.setLevel(logging.INFO)
    package.propagate = False
    disable_progress_bar()  # transformers' bars for loading and saving, which would tear the live display
    handlers: list[logging.Handler] = [logging.NullHandler()]
    if ranks.is_main:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        to_terminal = logging.StreamHandler(sys.stdout)
        to_file = logging.FileHandler(run_dir.path / "run.log")
        to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers = [to_terminal, to_file]
    for handler in handlers:
        package.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            package.removeHandler(handler)
            handler.close()
