"""One run: configuration in, trained model and files out. `train` is its life, from top to bottom; `loop.train` is what
it does in every iteration.

Three things have to happen early, and make the order of the steps: most of what a person may have typed wrong is
refused before torch is imported, within three seconds; servers, which take longest, start before transformers is
imported; and the weights come after the servers have taken their memory. What does not go together is refused at the
moment when it is first known: `check_settings`, `check_machine`, `check_model`.
"""

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
from offline_grpo.config.parts import check_settings, describe, listeners, make_plan, warnings
from offline_grpo.disk import is_full, sweep
from offline_grpo.engine.spawn import kept_compiled
from offline_grpo.errors import DiskFull, GrpoError, OutOfMemory, StopRequested, reason_of
from offline_grpo.history import records, resume
from offline_grpo.history.folder import RunDir, discard_fresh
from offline_grpo.history.signals import StopSignal, is_main, num_processes
from offline_grpo.state import Run

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""In a RuntimeError of CUDA, cuBLAS, or torch's allocator for the host."""

log = logging.getLogger(__name__)


def train(
    cfg: DictConfig, output_dir: Path, overrides: Sequence[str] = (), typed_keys: Collection[str] = ()
) -> float | None:
    """One run, from the composed configuration to the report. Returns the last pass@1, None where nothing was
    evaluated. With several processes, each one makes all of these steps; what `ranks.on_main` runs, the first one does
    alone, and an error there ends all.

    Args:
        output_dir: the folder that was made for this start; a resumed run works in its own.
        overrides: those of the command line, which `cfg` already contains.
        typed_keys: the settings among them that this start changes, if it resumes a run.
    """
    fresh = RunDir(output_dir.resolve())
    with ExitStack() as outer:
        # SIGINT, SIGTERM and SIGUSR1 are heard from here on. Until the loop begins they end the run at once: there is
        # nothing to lose yet. A start that is refused, or that resumes another folder, leaves no folder behind.
        stop = outer.enter_context(StopSignal.listening())
        outer.callback(discard_fresh, fresh.path)
        outer.enter_context(progress.followed())
        early_lines = outer.enter_context(records.kept_for_log())
        run = Run(stop, ExitStack())
        locks = outer.enter_context(ExitStack())

        # 1. WHAT WAS TYPED. BEFORE TORCH: the settings get their types, in range. The folder is locked, with the
        #    checkpoint to go on from, so that no second writer comes. Then `make_plan` builds the parts that need no
        #    model from the signatures of their classes: sampling, loggers, source, task and problems.
        #    WITH TORCH, which it imports then: weight sync, loss, advantage and optimizer. CHECK: they go together, and
        #    all that was typed has an effect.
        if is_main():
            print("offline-grpo: loading ...", flush=True)
        os.environ.update(kept_compiled())
        run.config, run.plain = typed(cfg), as_plain(cfg)

        def take_folder() -> tuple[resume.ResumePoint | None, RunDir]:
            point = resume.find_resume_point(run.config.resume, fresh, run.plain, locks)
            changed = None if point is None else resume.checked(point, run.config, run.plain, typed_keys)
            return changed, fresh if point is None else point.run_dir

        if num_processes() == 1:
            run.resume, run.folder = take_folder()
        with importing():
            run.plan = make_plan(run.config)
            check_settings(run.plan, overrides, cfg.rollouts)

        # Several processes meet here. Then the first one takes the folder: a refusal ends them all.
        with importing():
            import torch

            from offline_grpo.model.device import be_deterministic, resolve_device
            from offline_grpo.placement.ranks import Ranks, raise_on_peer_exit

            if run.config.num_threads is not None:
                torch.set_num_threads(run.config.num_threads)
            if run.config.is_batch_invariant:
                be_deterministic()
            run.ranks = Ranks(use_cpu=resolve_device(run.config.model.device).type == "cpu")
        if num_processes() > 1:
            run.resume, run.folder = run.ranks.on_main(take_folder)

        # The folder is this run's: its log begins, and from here on an error is in it, after all has ended that the run
        # has started. A run that is complete only draws its report.
        outer.enter_context(raise_on_peer_exit())
        outer.enter_context(records.log_to(run.folder.path, early_lines, is_main=run.ranks.is_main))
        if run.resume is not None and resume.is_finished(run.resume.source, run.resume.state, run.plain):
            log.info(resume.describe_finished(run.resume, run.config))
            return report(run.folder) if run.ranks.is_main else None
        outer.enter_context(ending(run))
        open_records(run, cfg, overrides)

        # 2. THE MACHINE, AND THE SERVERS ON IT. The processes that score are forked while this one is small. CHECK: the
        #    machine has the GPUs, the packages, the model's files, and the servers that the settings name. Then the run
        #    starts its own servers: they import torch and read the weights meanwhile. A server that needs the policy's
        #    adapter, or cannot say how much memory it has taken, waits for step 3.
        with importing():
            from offline_grpo.start import servers
        servers.begin_scoring(run)
        servers.check_machine(run)
        servers.begin(run)

        # 3. THE MODEL. CHECK, before a weight is read: its config and tokenizer, the prompts in its tokens, and the
        #    memory plan. On a GPU that a server shares, its memory comes first, because vLLM measures what is free
        #    when it starts; then the policy is loaded beside it (with shared_vllm, its weights are the server's).
        #    Masters, optimizer and gradients come last. After that nobody gives memory back before the run ends.
        with importing():
            from offline_grpo import loop
            from offline_grpo.start import model, prompts

            records.hide_progress_bars()
        with progress.phase("imports and data"):
            prompts.check_model(run)
        model.load_policy(run)  # once each server on its GPU has taken its memory
        model.connect_engines(run)  # starts the servers that step 2 left, and waits until all are up
        model.prove(run)  # that this model is causal, and that the sampler in this process draws what training computes
        model.prepare_training(run)

        # 4. THE ITERATIONS. Nothing more can be refused: the run is on record.
        record_and_describe(run, cfg, overrides)
        with stop.held("this iteration"):  # a signal waits, except where the loop is `interruptible`
            loop.train(run)
            stop.hold("the report")
            run.stack.close()  # engines end before the report is drawn
            return report(run.folder) if run.ranks.is_main else None


@contextmanager
def importing() -> Iterator[None]:
    """The phase of imports. They take a sixth less time without garbage collection."""
    gc.disable()
    try:
        with progress.phase("imports and data"):
            yield
    finally:
        gc.enable()


@contextmanager
def ending(run: Run) -> Iterator[None]:
    """On exit, end what the run has started, the last first. After an error, a signal waits until that is done, and the
    log says why the run ended early.
    """
    try:
        with run.stack:
            try:
                yield
            except BaseException:
                run.stop.hold("the end of what the run has started")
                raise
    except StopRequested as signal:
        log.warning("stopped by %s; %s", signal.signal_name, resume.where(run.folder))
        signal.is_reported = True
        raise
    except Exception as error:
        known = shortage(error, run.folder) or error
        log.error("%s", known, exc_info=not isinstance(known, GrpoError), extra=progress.LOG_ALONE)
        if known is error:
            raise
        raise known from error


def shortage(error: Exception, folder: RunDir) -> GrpoError | None:
    """The error in one line if memory or the disk was too small; None for any other error."""
    phase = "" if (name := progress.phase_of(error)) is None else f" in the phase {name}"
    if is_full(error):
        place = getattr(error, "filename", None) or folder.path
        kept = "" if (last := latest_checkpoint(folder.checkpoints)) is None else f"{last.name} is whole; "
        fix = f"make room there; {kept}{resume.where(folder)}"
        return DiskFull(f"no room on the disk of {place}{phase} ({reason_of(error)}); {fix}")
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        fix = "to need less, lower train.tokens_per_microbatch (or train.batch_size), generation.batch_size, or the "
        fix += f"server's share of the GPU; {resume.where(folder)}"
        return OutOfMemory(f"out of memory{phase}: {reason_of(error)}; {fix}")
    return None


def open_records(run: Run, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Write the run's configuration, and make its listeners, which follow the start already."""
    folder = run.folder.path
    if run.ranks.is_main:
        sweep(folder)
        run.stack.callback(sweep, folder)
        if run.resume is None:  # of a start that was killed before it saved anything, and may have had other settings
            run.folder.discard_after(-2)
            (folder / ".hydra" / "starts.yaml").unlink(missing_ok=True)
        source = run.folder if run.resume is None else run.resume.source
        if run.resume is None or not (folder / ".hydra").exists():
            resume.write_configuration(run.folder, cfg, overrides, source)
    # A listener that cannot use its folder or account raises now, and so ends all processes before the model is loaded.
    run.ranks.on_main(lambda: run.listeners.extend(listeners(run.config, folder)))
    for listener in run.listeners:
        run.stack.callback(listener.close)
    progress.tell(list(run.listeners))
    if run.ranks.is_main and (newer := records.newer_than_tested()) is not None:
        log.warning("%s", newer)


def record_and_describe(run: Run, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Record this start in the run's folder; log where the run is, what it does, and what may be unexpected."""
    if run.ranks.is_main:
        # From here on the folder counts as a run: a start that is refused before this leaves none.
        run.folder.metrics.mkdir(parents=True, exist_ok=True)
        run.folder.checkpoints.mkdir(exist_ok=True)
        records.record_start(run.folder.path)
        log.info("run folder: %s", run.folder.path)
        for line in describe(run.plan):
            log.info("%s", line)
        log.info("training %s of %s parameters", f"{run.policy.num_trainable:,}", f"{run.policy.num_weights:,}")
        for warning in warnings(run.plan):
            log.warning("%s", warning)
        for line in [] if run.resume is None else resume.describe(run.resume, run.config):
            log.info("%s", line)
        resume.record(run.folder, cfg, overrides, run.resume)
    for listener in run.listeners:
        listener.start(run.plain, run.config.train.iterations)


def report(folder: RunDir) -> float | None:
    """Draw report.png and print the summary from the recorded metrics. Returns the last pass@1."""
    from offline_grpo.logger import output_console
    from offline_grpo.report.plots import save_report
    from offline_grpo.report.runs import load_run
    from offline_grpo.report.tables import print_summary

    # By what the files say: a run that was resumed knows only its last start.
    run = load_run(folder.path)
    if not run.train:
        log.warning("no metrics were recorded (logger=json was left out), so there is no report")
        return None
    save_report(run)
    text = StringIO()
    print_summary(run, Console(file=text, width=output_console().width))
    log.info("%s", text.getvalue().rstrip("\n"))
    return run.pass_at_1
