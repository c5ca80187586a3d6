"""One run: configuration in, trained model and files out. `train` is its life, from top to bottom."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from offline_grpo import progress
from offline_grpo.checkpoint.files import latest_checkpoint
from offline_grpo.config.compose import as_plain, typed
from offline_grpo.config.describe import describe_batches, describe_data, warnings
from offline_grpo.config.parts import listeners, make_plan
from offline_grpo.config.plan import Plan
from offline_grpo.disk import is_full, sweep
from offline_grpo.engine.spawn import kept_compiled
from offline_grpo.errors import ConfigError, DiskFull, GrpoError, OutOfMemory, StopRequested, reason_of
from offline_grpo.history import launch, resume
from offline_grpo.history.folder import (
    ResumePoint,
    RunDir,
    begin_anew,
    copy_metrics,
    discard_after,
    discard_fresh,
    find_resume_point,
    is_finished,
    released_at_end,
)
from offline_grpo.history.run_log import hide_progress_bars, kept_for_log, log_to
from offline_grpo.history.signals import StopSignal
from offline_grpo.history.starts import newer_than_tested, record_start
from offline_grpo.state import Run

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""In a RuntimeError of CUDA, cuBLAS, or torch's allocator for the host."""
LESS_MEMORY = (
    "train.tokens_per_microbatch (or train.batch_size), generation.batch_size, or the server's share of the GPU"
)

log = logging.getLogger(__name__)


def train(
    cfg: DictConfig, output_dir: Path, overrides: Sequence[str] = (), typed_keys: Collection[str] = ()
) -> float | None:
    """One run, from the composed configuration to the report. Returns the last pass@1, None where nothing was
    evaluated. The order of the steps is the design: what a user may have typed wrong is refused before torch is
    imported, servers start before transformers is imported, and weights come after servers have taken their memory.

    Args:
        output_dir: the folder that Hydra made for this start; a resumed run works in its own.
        overrides: of the command line, which `cfg` has in it already.
        typed_keys: those that are new in this start of a resumed run.
    """
    fresh = RunDir(output_dir.resolve())
    with ExitStack() as outer:
        # From here on signals are heard, and a start that is refused, or resumes another folder, leaves none behind.
        stop = outer.enter_context(StopSignal.listening())
        outer.enter_context(released_at_end())
        outer.callback(discard_fresh, fresh.path)
        outer.enter_context(progress.followed())
        outer.enter_context(kept_for_log())
        run = Run(stop, ExitStack())

        # 1. Settings, and the parts that need no model. Most mistakes are refused here, before torch is imported.
        if launch.is_main():
            print("offline-grpo: loading ...", flush=True)
        os.environ.update(kept_compiled())
        run.config, run.plain = typed(cfg), as_plain(cfg)
        if launch.num_processes() == 1:
            take_folder(run, fresh, typed_keys)
        with importing():
            run.plan = make_plan(run.config)
            refuse_idle_overrides(overrides, cfg, run.plan)
        join_processes(run, fresh, typed_keys)

        # The folder is this run's, so its log begins, and from here on errors are in it.
        from offline_grpo.placement.ranks import told_if_abandoned

        outer.enter_context(told_if_abandoned())
        outer.enter_context(log_to(run.folder.path, is_main=run.ranks.is_main))
        if run.resume is not None and is_finished(run.resume.source, run.resume.state, run.plain):
            log.info(resume.describe_finished(run.resume, run.config))
            return report(run.folder) if run.ranks.is_main else None
        outer.enter_context(errors_in_log(run.folder))
        outer.enter_context(shortage_in_a_line(run.folder))
        outer.enter_context(run.stack)
        outer.enter_context(ended_whole(stop))
        with importing():
            from offline_grpo.start import servers
        open_records(run, cfg, overrides)

        # 2. Servers take longest, so they start before transformers is imported and prompts are looked at.
        servers.begin(run)

        # 3. The model: its files are checked first, and its weights are read once servers have taken their memory.
        with importing():
            from offline_grpo import loop
            from offline_grpo.start import model

            hide_progress_bars()
        model.check(run)
        model.load_policy(run)
        model.connect_engines(run)
        model.prove(run)
        model.prepare_training(run)

        # 4. Nothing more can be refused: the run is on record, and trains.
        record_and_describe(run, cfg, overrides)
        with stop.held("this iteration"):
            loop.train(run)
            stop.hold("the report")
            run.stack.close()  # engines end before the report is drawn
            return report(run.folder) if run.ranks.is_main else None


def refuse_idle_overrides(overrides: Sequence[str], cfg: DictConfig, plan: Plan) -> None:
    """Raise ConfigError for an override that would do nothing in this run."""
    from offline_grpo.config.checks import idle_overrides

    for problem in idle_overrides(overrides, cfg.rollouts, plan):
        raise ConfigError(problem)


def take_folder(run: Run, fresh: RunDir, typed_keys: Collection[str]) -> tuple[ResumePoint | None, RunDir]:
    """Find the checkpoint to go on from, if there is one, and lock the folder to work in, which is its run's or the
    fresh one. Needs no torch.
    """
    point = find_resume_point(run.config.resume, fresh, run.plain)
    run.resume = None if point is None else resume.checked(point, run.config, run.plain, typed_keys)
    run.folder = fresh if point is None else point.run_dir
    return run.resume, run.folder


def join_processes(run: Run, fresh: RunDir, typed_keys: Collection[str]) -> None:
    """Join the run's other processes, of which the first takes the folder."""
    with importing():
        import torch

        from offline_grpo.model.device import resolve_device
        from offline_grpo.placement.ranks import Ranks

        if run.config.num_threads is not None:
            torch.set_num_threads(run.config.num_threads)
        run.ranks = Ranks(use_cpu=resolve_device(run.config.model.device).type == "cpu")
    if launch.num_processes() > 1:  # in the group, so that a refusal ends all processes
        run.resume, run.folder = run.ranks.on_main(lambda: take_folder(run, fresh, typed_keys))


def open_records(run: Run, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Write the run's configuration, and make its listeners, which follow the start already."""
    folder = run.folder.path
    if run.ranks.is_main:
        sweep(folder)
        run.stack.callback(sweep, folder)
        if run.resume is None:  # what a start left that was killed before it saved anything
            begin_anew(run.folder)
        if not (folder / ".hydra").exists():
            resume.write_configuration(run.folder, cfg, overrides)
    run.ranks.on_main(lambda: run.listeners.extend(listeners(run.config, folder)))
    for listener in run.listeners:
        run.stack.callback(listener.close)
    progress.tell(list(run.listeners))
    if run.ranks.is_main and (newer := newer_than_tested()) is not None:
        log.warning("%s", newer)


def record_and_describe(run: Run, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Record this start in the run's folder; log where the run is, what it does, and what may be unexpected."""
    if run.ranks.is_main:
        run.folder.create()
        record_start(run.folder.path)
        data = run.plan.data
        log.info("run folder: %s", run.folder.path)
        for line in (*describe_data(data, run.config.data.problems_per_iteration), *describe_batches(run.plan)):
            log.info("%s", line)
        log.info("training %s of %s parameters", f"{run.policy.num_trainable:,}", f"{run.policy.num_weights:,}")
        for warning in warnings(run.plan):
            log.warning("%s", warning)
        for line in [] if run.resume is None else resume.describe(run.resume, run.config):
            log.info("%s", line)
        # metrics of iterations that this start repeats, or that another run has made, are those of this run
        if run.resume is not None and run.resume.source != run.folder:
            copy_metrics(run.resume)
        elif run.resume is not None and run.resume.changes:
            discard_after(run.folder, run.resume.state.iteration)
        resume.record(run.folder, cfg, overrides, run.resume)
    for listener in run.listeners:
        listener.start(run.plain, run.config.train.iterations)


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
def errors_in_log(folder: RunDir) -> Iterator[None]:
    """Write in the log why the run ends before its time: a signal, or an error."""
    try:
        yield
    except StopRequested as signal:
        log.warning("stopped by %s; %s", signal.signal_name, resume.where(folder))
        signal.is_reported = True
        raise
    except Exception as error:
        log.error("%s", error, exc_info=not isinstance(error, GrpoError), extra=progress.LOG_ALONE)
        raise


@contextmanager
def ended_whole(stop: StopSignal) -> Iterator[None]:
    """After an error, a signal waits until what the run has started has ended, so that the error is reported."""
    try:
        yield
    except BaseException:
        stop.hold("the end of what the run has started")
        raise


@contextmanager
def shortage_in_a_line(folder: RunDir) -> Iterator[None]:
    """Raise OutOfMemory, in one line, for an allocation that fails, and DiskFull for a file that finds no room."""
    try:
        yield
    except Exception as error:
        phase = progress.phase_of(error) or "the start"
        if is_full(error):
            place = getattr(error, "filename", None) or folder.path
            kept = "" if (last := latest_checkpoint(folder.checkpoints)) is None else f"{last.name} is whole; "
            fix = f"make room there; {kept}{resume.where(folder)}"
            raise DiskFull(
                f"no room on the disk of {place}, in the phase {phase} ({reason_of(error)}); {fix}"
            ) from error
        if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            fix = f"to need less, lower {LESS_MEMORY}; {resume.where(folder)}"
            raise OutOfMemory(f"out of memory in the phase {phase}: {reason_of(error)}; {fix}") from error
        raise


def report(folder: RunDir) -> float | None:
    """Draw report.png and print the summary from the recorded metrics. Returns the last pass@1."""
    from offline_grpo.logger import output_console
    from offline_grpo.report.plots import save_report
    from offline_grpo.report.runs import load_run
    from offline_grpo.report.tables import print_summary

    run = load_run(folder.path)
    if not run.train:
        log.warning("no metrics were recorded (logger=json was left out), so there is no report")
        return None
    save_report(run)
    text = StringIO()
    print_summary(run, Console(file=text, width=output_console().width))
    log.info("%s", text.getvalue().rstrip("\n"))
    return run.pass_at_1
