"""One run: configuration in, trained model and files out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from offline_grpo import progress
from offline_grpo.disk import NOT_WRITABLE, sweep
from offline_grpo.errors import GrpoError, StopRequested
from offline_grpo.run import launch, resume_record
from offline_grpo.run.config import as_plain, typed
from offline_grpo.run.describe import describe_batches, describe_data, describe_staleness, describe_warmup
from offline_grpo.run.engine_spec import check_overrides
from offline_grpo.run.environment import record_start
from offline_grpo.run.log_outputs import kept_for_log, log_to
from offline_grpo.run.preflight import Plan, listeners, make_plan
from offline_grpo.run.run_dir import (
    ResumePoint,
    RunDir,
    copy_metrics,
    discard_after,
    discard_fresh,
    find_resume_point,
    released_at_end,
)
from offline_grpo.run.signals import StopSignal
from offline_grpo.run.task_data import check_data_overrides
from offline_grpo.settings import RunConfig

if TYPE_CHECKING:
    from offline_grpo.interfaces import RunListener
    from offline_grpo.placement.ranks import Ranks

log = logging.getLogger(__name__)


def run(
    cfg: DictConfig, output_dir: Path, overrides: Sequence[str] = (), typed_keys: Collection[str] = ()
) -> float | None:
    """One run, from the composed configuration to the report. Returns the last pass@1, None where nothing was
    evaluated.

    Args:
        output_dir: the folder that Hydra made for this start; a resumed run works in its own folder and this one
            goes away.
        overrides: of the command line, which `cfg` has in it already.
        typed_keys: those that are new in this start of a resumed run.
    """
    fresh = RunDir(output_dir.resolve())
    with (
        StopSignal.listening() as stop,
        released_at_end(),
        _leaving_no_empty_folder(fresh),
        progress.followed(),
        kept_for_log(),
    ):
        config, plain = typed(cfg), as_plain(cfg)
        if launch.is_main():
            print("offline-grpo: loading ...", flush=True)
        check = partial(
            check_overrides,
            overrides,
            uses_cluster=config.placement.score_on_cluster or config.placement.trainer == "ray",
        )
        if config.engine is None and config.generation.get("base_url") is None:
            check(None)
        with progress.phase("imports and data"):
            plan = make_plan(config)
        check(plan.engine)
        if plan.data.train is None:
            check_data_overrides(overrides, cfg)
        find = partial(_find_resume_point, config, fresh, plain, typed_keys)
        found = find() if launch.num_processes() == 1 else None  # what is refused needs no torch
        with progress.phase("imports and data"):
            ranks = _join(config)
        resume, run_dir = found or ranks.on_main(find)  # in the group, so that a refusal ends all processes
        from offline_grpo.placement.ranks import told_if_abandoned

        with told_if_abandoned(), _told_if_unwritable(run_dir), log_to(run_dir.path, ranks):
            if resume is not None and resume_record.is_finished(resume, plain):
                log.info(resume_record.describe_finished(resume, config))
                return report(run_dir) if ranks.is_main else None
            try:
                return _run(plan, cfg, run_dir, resume, ranks, stop, overrides)
            except StopRequested as signal:
                log.warning("stopped by %s; %s", signal.signal_name, resume_record.where(run_dir))
                signal.is_reported = True
                raise


def _find_resume_point(
    config: RunConfig, fresh: RunDir, plain: Mapping[str, Any], typed_keys: Collection[str]
) -> tuple[ResumePoint | None, RunDir]:
    """What the run goes on from, None for a new run, and its folder, which is locked then. Called on the first process."""
    with _told_if_unwritable(fresh):
        resume = find_resume_point(config.resume, fresh, plain)
    if resume is None:
        return None, fresh
    resume = resume_record.checked(resume, config, plain, typed_keys)
    return resume, resume.run_dir


def _join(config: RunConfig) -> Ranks:
    """This process among the others of the run."""
    import torch

    from offline_grpo.model.device import resolve_device
    from offline_grpo.placement.ranks import Ranks

    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return Ranks(use_cpu=resolve_device(config.model.device).type == "cpu")


def _run(
    plan: Plan,
    cfg: DictConfig,
    run_dir: RunDir,
    resume: ResumePoint | None,
    ranks: Ranks,
    stop: StopSignal,
    overrides: Sequence[str],
) -> float | None:
    with progress.phase("imports and data"):
        from offline_grpo.run.assemble import Start, assemble

    config, plain = plan.config, as_plain(cfg)
    with ExitStack() as stack, ended_whole(stop):
        if ranks.is_main:
            sweep(run_dir.path)
            stack.callback(sweep, run_dir.path)
            if not (run_dir.path / ".hydra").exists():
                resume_record.write_configuration(run_dir, cfg, overrides)
        told: list[RunListener] = []
        ranks.on_main(lambda: told.extend(listeners(config, run_dir.path)))
        for listener in told:
            stack.push(_closing(listener))
        progress.tell(told)
        loop, restored = assemble(Start(plan, plain, run_dir, resume, ranks), stop, told, stack)
        if ranks.is_main:
            run_dir.create()
            record_start(run_dir.path)
            log.info("run folder: %s", run_dir.path)
            for line in (*describe_data(plan.data, config.data.problems_per_iteration), *describe_batches(plan)):
                log.info(line)
            num_all = sum(parameter.numel() for parameter in loop.policy.model.parameters())
            log.info("training %s of %s parameters", f"{loop.policy.num_trainable:,}", f"{num_all:,}")
            for warning in (describe_staleness(plan), describe_warmup(config)):
                if warning is not None:
                    log.warning(warning)
            if resume is not None:
                for line in resume_record.describe(resume, config):
                    log.info(line)
                if resume.has_new_folder:
                    copy_metrics(resume)
                elif resume.changes:
                    discard_after(run_dir, resume.state.iteration)
            resume_record.record(run_dir, cfg, overrides, resume)
        for listener in loop.listeners:
            listener.start(plain, config.train.iterations)
        with stop.held("this iteration"):
            if restored is None:
                loop.run(0, None)
            else:
                evaluates_first = resume is not None and run_dir.misses_evaluation(resume.state)
                loop.run(restored.iteration + 1, restored.source, evaluates_first=evaluates_first)
            stop.hold("the report")
            stack.close()
            return report(run_dir) if ranks.is_main else None


@contextmanager
def ended_whole(stop: StopSignal) -> Iterator[None]:
    """After an error, a signal waits until what the run has started has ended: the error is told then, and a signal
    would replace it.
    """
    try:
        yield
    except BaseException:
        stop.hold("the end of what the run has started")
        raise


def _closing(listener: RunListener) -> Callable[..., None]:
    """For an `ExitStack`. What `close` raises while another error is on its way is logged, and does not replace that
    one.
    """

    def close(_kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            listener.close()
        except GrpoError as second:
            if error is None:
                raise
            log.error("%s", second)

    return close


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
    print_summary(history, output_console())
    pass_at_1 = history.series("eval", "pass@1").values
    return float(pass_at_1[-1]) if len(pass_at_1) else None


@contextmanager
def _told_if_unwritable(run_dir: RunDir) -> Iterator[None]:
    """One line about a disk that is full or a folder that became read-only. What was committed before is whole."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        place = (
            error.filename2 or error.filename or run_dir.path
        )  # of two, the second was written: the target of a copy
        raise GrpoError(
            f"{place}: cannot be written ({error.strerror}); free some space or fix the permissions; {resume_record.where(run_dir)}"
        ) from error


@contextmanager
def _leaving_no_empty_folder(fresh: RunDir) -> Iterator[None]:
    """A start that was refused, or that went on in another run's folder, leaves nothing of its own behind."""
    try:
        yield
    finally:
        discard_fresh(fresh.path)
