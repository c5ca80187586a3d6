"""The command that trains: `run_grpo.py`, `offline-grpo` and `python -m offline_grpo` are this one."""

from __future__ import annotations

import sys
from pathlib import Path
from traceback import extract_tb
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from offline_grpo.commands import cli
from offline_grpo.config import compose
from offline_grpo.config.hints import check_options, empty_group
from offline_grpo.errors import ConfigError, GrpoError, StopRequested
from offline_grpo.history import launch, resume, sweeps
from offline_grpo.history.folder import discard_fresh
from offline_grpo.history.signals import StopSignal

compose.register()  # at import, because processes that a sweep's launcher starts import this module for `job`

_has_begun = False
"""Whether Hydra has called `job` in this process: until then, an error is about the command line."""


def job(cfg: DictConfig) -> float | None:
    """Hydra's task function: run once. Returns the last held-out pass@1, which sweepers maximise.

    An error that the user can fix ends the process with one line; in a sweep it is reported, and other jobs still run.
    """
    global _has_begun
    _has_begun = True
    folder = Path(HydraConfig.get().runtime.output_dir)
    is_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    with sweeps.numbered_lines():
        try:
            with StopSignal.listening() as stop, stop.interruptible():
                result = _run(cfg, folder)
                if is_sweep:  # a run that was complete when the signal came ends as any other; its sweep ends here
                    stop.check()
                return result
        except cli.EXPECTED as error:
            discard_fresh(folder)
            if is_sweep and isinstance(error, StopRequested):
                if HydraConfig.get().launcher._target_ == sweeps.LOCAL:
                    return None  # the launcher reports it for all jobs
                say_how_to_resume_sweep(error, Path(HydraConfig.get().sweep.dir))
            if not is_sweep or not isinstance(error, GrpoError):
                cli.leave(error)
            cli.say(f"error in job {HydraConfig.get().job.num} of the sweep: {error}")
            sweeps.record_failure(error.exit_code)
            return None


def _run(cfg: DictConfig, folder: Path) -> float | None:
    is_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    if is_sweep:
        sweeps.check_folder(folder)
    own, typed = resume.own_configuration(cfg, folder)
    if is_sweep and own.resume == "auto" and sweeps.is_finished(folder, compose.as_plain(own)):
        from offline_grpo.report.runs import load_run

        print(f"run {HydraConfig.get().job.num} of the sweep is finished: {folder}")
        return load_run(folder).pass_at_1
    from offline_grpo.history import ray_trainers

    if ray_trainers.is_wanted(own.placement):
        return ray_trainers.train(compose.typed(own), folder)
    from offline_grpo.run import train  # which imports torch

    return train(own, folder, HydraConfig.get().overrides.task, typed)


def say_how_to_resume_sweep(error: StopRequested, folder: Path) -> None:
    """Print the command that resumes the sweep in this folder. Hydra keeps no record of a search."""
    is_search = not (folder / sweeps.RECORD).is_file()
    how = "a search starts anew" if is_search else f"continue the sweep with: {resume.command(folder.resolve())}"
    cli.say(how if error.is_reported else f"stopped by {error.signal_name}; {how}")
    error.is_reported = True


def main() -> NoReturn:
    """Compose the configuration from `conf/` and the command line, run, and exit."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        from offline_grpo.config.help import help_text

        words = [word for word in sys.argv[1:] if not word.startswith("-") and "=" not in word]
        cli.run_command(lambda: print(help_text(compose.folder(), words)))
    cli.exit_with(_compose_and_run)


def _compose_and_run() -> int:
    """With several processes, Hydra makes a run folder in the first one only. Returns the exit code."""
    global _has_begun
    _has_begun = False
    launch.start_missing_processes()
    if {"-m", "--multirun"} & set(sys.argv) and (stop := StopSignal.current()) is not None:
        stop.hold("this step of the sweep")
    check_options(sys.argv[1:])
    sys.argv[1:] = resume.arguments(sys.argv[1:])
    try:
        hydra.main(version_base="1.3", config_path=str(compose.folder()), config_name="config")(job)()
    except (AssertionError, ValueError) as error:  # Hydra's, for GROUP=null and for a key below one that is null
        if _has_begun and "optuna" not in extract_tb(error.__traceback__)[-1].filename:  # whose trials have all failed
            raise
        if not _has_begun:
            hints = (empty_group(compose.key_of(word), sys.argv[1:]) for word in sys.argv[1:])
            raise ConfigError(next(filter(None, hints), f"{' '.join(sys.argv[1:])}: {error}")) from error
    codes = sweeps.take_failures()
    if codes:
        jobs = "1 job" if len(codes) == 1 else f"{len(codes)} jobs"
        cli.say(f"{jobs} of the sweep failed, with an error above; a refused one has no row")
    return max(codes, default=0)
