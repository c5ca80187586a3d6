"""One run: configuration in, trained model and files out."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig
from rich.console import Console

from offline_grpo import progress
from offline_grpo.checkpoint.files import latest_checkpoint
from offline_grpo.disk import is_full, sweep
from offline_grpo.engine.process import kept_compiled
from offline_grpo.errors import ConfigError, DiskFull, GrpoError, OutOfMemory, StopRequested, reason_of
from offline_grpo.interfaces import RunListener
from offline_grpo.run import launch, resume
from offline_grpo.run.config import as_plain, typed
from offline_grpo.run.describe import describe_batches, describe_data, warnings
from offline_grpo.run.environment import record_start
from offline_grpo.run.log_outputs import hide_progress_bars, kept_for_log, log_to
from offline_grpo.run.plan import Start, listeners, make_plan
from offline_grpo.run.run_dir import (
    ResumePoint,
    RunDir,
    copy_metrics,
    discard_after,
    discard_fresh,
    find_resume_point,
    is_finished,
    released_at_end,
)
from offline_grpo.run.signals import StopSignal

if TYPE_CHECKING:
    from offline_grpo.model.policy import Policy
    from offline_grpo.run.task_data import TaskData

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""In a RuntimeError of CUDA, cuBLAS, or torch's allocator for the host."""
LESS_MEMORY = (
    "train.tokens_per_microbatch (or train.batch_size), generation.batch_size, or the server's share of the GPU"
)

log = logging.getLogger(__name__)


def run(
    cfg: DictConfig, output_dir: Path, overrides: Sequence[str] = (), typed_keys: Collection[str] = ()
) -> float | None:
    """One run, from the composed configuration to the report. Returns the last pass@1, None where nothing was
    evaluated.

    Args:
        output_dir: the folder that Hydra made for this start; a resumed run works in its own.
        overrides: of the command line, which `cfg` has in it already.
        typed_keys: those that are new in this start of a resumed run.
    """
    fresh = RunDir(output_dir.resolve())
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignal.listening())
        stack.enter_context(released_at_end())
        stack.callback(discard_fresh, fresh.path)  # of a start that was refused, or that resumes another folder
        stack.enter_context(progress.followed())
        stack.enter_context(kept_for_log())
        start = _start(cfg, fresh, overrides, typed_keys)
        from offline_grpo.placement.ranks import told_if_abandoned

        run_dir, is_main = start.run_dir, start.ranks.is_main
        stack.enter_context(told_if_abandoned())
        stack.enter_context(log_to(run_dir.path, is_main=is_main))
        if start.resume is not None and is_finished(start.resume.source, start.resume.state, start.plain):
            log.info(resume.describe_finished(start.resume, start.plan.config))
            return report(run_dir) if is_main else None
        try:
            return _run(start, cfg, stop, overrides)
        except StopRequested as signal:
            log.warning("stopped by %s; %s", signal.signal_name, resume.where(run_dir))
            signal.is_reported = True
            raise
        except Exception as error:
            log.error("%s", error, exc_info=not isinstance(error, GrpoError), extra=progress.LOG_ALONE)
            raise


def _start(cfg: DictConfig, fresh: RunDir, overrides: Sequence[str], typed_keys: Collection[str]) -> Start:
    """Everything that can be refused before a model is loaded: the plan, and the checkpoint to resume from."""
    config, plain = typed(cfg), as_plain(cfg)
    if launch.is_main():
        print("offline-grpo: loading ...", flush=True)
    os.environ.update(kept_compiled())
    with importing():
        plan = make_plan(config)
        from offline_grpo.run.problems import idle_overrides
    for problem in idle_overrides(overrides, cfg.rollouts, plan):
        raise ConfigError(problem)

    def find() -> tuple[ResumePoint | None, RunDir]:
        point = find_resume_point(config.resume, fresh, plain)  # locks the run's folder
        point = None if point is None else resume.checked(point, config, plain, typed_keys)
        return point, fresh if point is None else point.run_dir

    found = find() if launch.num_processes() == 1 else None  # a refusal needs no torch
    with importing():
        import torch

        from offline_grpo.model.device import resolve_device
        from offline_grpo.placement.ranks import Ranks

        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        ranks = Ranks(use_cpu=resolve_device(config.model.device).type == "cpu")
    point, run_dir = found or ranks.on_main(find)  # in the group, so that a refusal ends all processes
    return Start(plan, plain, run_dir, point, ranks)


def _run(start: Start, cfg: DictConfig, stop: StopSignal, overrides: Sequence[str]) -> float | None:
    with importing():
        from offline_grpo.run.begin import begin

    config, run_dir, ranks = start.plan.config, start.run_dir, start.ranks
    with shortage_in_a_line(run_dir), ExitStack() as stack, ended_whole(stop):
        if ranks.is_main:
            sweep(run_dir.path)
            stack.callback(sweep, run_dir.path)
            if not (run_dir.path / ".hydra").exists():
                resume.write_configuration(run_dir, cfg, overrides)
        told: list[RunListener] = []
        ranks.on_main(lambda: told.extend(listeners(config, run_dir.path)))
        for listener in told:
            stack.callback(listener.close)
        progress.tell(told)
        begun = begin(start, stack)
        with importing():
            from offline_grpo.run.assemble import assemble

            hide_progress_bars()
        loop, data, restored = assemble(start, begun, stop, told, stack)
        if ranks.is_main:
            run_dir.create()
            record_start(run_dir.path)
            _describe(start, data, loop.policy)
            if start.resume is not None and start.resume.source != run_dir:
                copy_metrics(start.resume)
            elif start.resume is not None and start.resume.changes:
                discard_after(run_dir, start.resume.state.iteration)
            resume.record(run_dir, cfg, overrides, start.resume)
        for listener in loop.listeners:
            listener.start(start.plain, config.train.iterations)
        with stop.held("this iteration"):
            if restored is None:
                loop.run(0, None)
            else:
                evaluates_first = ranks.on_main(lambda: run_dir.misses_evaluation(restored))
                loop.run(restored.iteration + 1, restored.source, evaluates_first=evaluates_first)
            stop.hold("the report")
            stack.close()
            return report(run_dir) if ranks.is_main else None


def _describe(start: Start, data: TaskData, policy: Policy) -> None:
    """Log where the run is, what it does, and what may be unexpected about it."""
    plan, config = start.plan, start.plan.config
    lines = [
        f"run folder: {start.run_dir.path}",
        *describe_data(data, config.data.problems_per_iteration),
        *describe_batches(plan),
        f"training {policy.num_trainable:,} of {policy.num_weights:,} parameters",
    ]
    for line in lines:
        log.info("%s", line)
    for warning in warnings(plan):
        log.warning("%s", warning)
    for line in [] if start.resume is None else resume.describe(start.resume, config):
        log.info("%s", line)


@contextmanager
def importing() -> Iterator[None]:
    """The phase of imports. They take a sixth less without garbage collection."""
    gc.disable()
    try:
        with progress.phase("imports and data"):
            yield
    finally:
        gc.enable()


@contextmanager
def ended_whole(stop: StopSignal) -> Iterator[None]:
    """After an error, a signal waits until what the run has started has ended, so that the error is reported."""
    try:
        yield
    except BaseException:
        stop.hold("the end of what the run has started")
        raise


@contextmanager
def shortage_in_a_line(run_dir: RunDir) -> Iterator[None]:
    """Raise OutOfMemory, in one line, for an allocation that fails, and DiskFull for a file that finds no room."""
    try:
        yield
    except Exception as error:
        phase = progress.phase_of(error) or "the start"
        if is_full(error):
            place = getattr(error, "filename", None) or run_dir.path
            kept = "" if (last := latest_checkpoint(run_dir.checkpoints)) is None else f"{last.name} is whole; "
            fix = f"make room there; {kept}{resume.where(run_dir)}"
            raise DiskFull(
                f"no room on the disk of {place}, in the phase {phase} ({reason_of(error)}); {fix}"
            ) from error
        if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            fix = f"to need less, lower {LESS_MEMORY}; {resume.where(run_dir)}"
            raise OutOfMemory(f"out of memory in the phase {phase}: {reason_of(error)}; {fix}") from error
        raise


def report(run_dir: RunDir) -> float | None:
    """Draw report.png and print the summary from the recorded metrics. Returns the last pass@1."""
    from offline_grpo.logger import output_console
    from offline_grpo.report.history import load_history
    from offline_grpo.report.plots import save_report
    from offline_grpo.report.summary import print_summary

    history = load_history(run_dir.path)
    if not history.train:
        log.warning("no metrics were recorded (logger=json was left out), so there is no report")
        return None
    save_report(history)
    text = StringIO()
    print_summary(history, Console(file=text, width=output_console().width))
    log.info("%s", text.getvalue().rstrip("\n"))
    pass_at_1 = history.series("eval", "pass@1").values
    return float(pass_at_1[-1]) if len(pass_at_1) else None
