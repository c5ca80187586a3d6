"""The command that trains: `run_grpo.py`, `offline-grpo` and `python -m offline_grpo` are this one."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from traceback import extract_tb
from typing import NoReturn, cast

import psutil
from hydra import version
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from offline_grpo.checkpoint.files import latest_checkpoint, latest_state
from offline_grpo.commands import cli
from offline_grpo.config import compose
from offline_grpo.config.help import check_options, empty_group
from offline_grpo.errors import ConfigError, GrpoError, StopRequested, exit_code_of
from offline_grpo.history import resume, sweeps
from offline_grpo.history.folder import RunDir, discard_fresh
from offline_grpo.history.signals import StopSignal, is_main
from offline_grpo.report.runs import load_run

OVERRIDE = re.compile(r"~|\+*[^-=]+=")
"""How a word of the command line begins that is an override and not an option."""

compose.register()  # at import, because processes that a sweep's launcher starts import this module for `job`


def main() -> NoReturn:
    """Compose the configuration from `conf/` and the command line, run, and exit."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        from offline_grpo.config.help import help_text

        words = [word for word in get_args_parser().parse_known_args()[0].overrides if "=" not in word]
        cli.run_command(lambda: print(help_text(compose.folders(sys.argv[1:]), words)))
    start_missing_processes()
    cli.exit_with(lambda: start(sys.argv[1:]))


def start(words: Sequence[str]) -> None:
    """What these words ask for: a run, a sweep, or the rest of either."""
    HydraConfig.instance().cfg = None  # so that it says from now on whether Hydra has composed a configuration
    check_options(words)
    typed = compose.readable([word for word in words if OVERRIDE.match(word)], compose.folders(words))
    options = [word for word in words if not OVERRIDE.match(word)]
    is_sweep = not {"-m", "--multirun"}.isdisjoint(options)

    # What is resumed, if it is known already: a run, a checkpoint, or a sweep. With `auto`: what is in the named
    # folder, or for sweeps the newest one with the same words; which run is alike, its configuration decides later.
    named = resume.value_of("resume", typed)
    if named == "auto":
        place = resume.value_of("hydra.sweep.dir" if is_sweep else "hydra.run.dir", typed)
        if place is None:
            named = str(sweeps.newest_alike(typed) or "auto") if is_sweep else "auto"
        elif (Path(place) / sweeps.RECORD).is_file() if is_sweep else resume.run_of(Path(place)) is not None:
            named = place
    path = None if named in (None, "auto") else Path(named).expanduser().resolve()

    if path is not None and (path / sweeps.RECORD).is_file():
        if is_main():
            print(f"going on with the sweep in {path}; leave resume out to start another one", flush=True)
        typed, options, is_sweep = sweeps.overrides(path, typed), [*options, *([] if is_sweep else ["-m"])], True
    elif path is not None and is_sweep:
        fix = "is one run, whose folder all jobs of --multirun would share; leave it out"
        raise ConfigError("resume", named, fix)
    elif path is not None:
        # A run goes on with the configuration that it stored, and begins again if it has no checkpoint yet. A
        # checkpoint that stands alone has none: it goes on with what is typed, as a new run would.
        run = resume.run_of(path)
        if run is None and resume.was_cut_short(path):
            run = path
            if is_main():
                about = f"resume={named}: has no checkpoint yet"
                print(f"{about}; it starts from the beginning, in that folder", flush=True)
        if run is None or not path.exists():
            raise ConfigError("resume", named, resume.NO_CHECKPOINT)
        if (run / ".hydra" / "config.yaml").exists():
            cfg, overrides = resume.resumed_configuration(run, typed)
            cfg.resume, folder = named, run
            if "--cfg" in options:
                print(OmegaConf.to_yaml(cfg))
                return
            if path not in (run, latest_checkpoint(run / "checkpoints")):  # an older checkpoint: a new run
                fresh = datetime.now().strftime("outputs/%Y-%m-%d/%H-%M-%S-%f")
                folder = Path(resume.value_of("hydra.run.dir", typed) or fresh) if is_main() else Path()
            _run(cfg, folder, overrides, {compose.key_of(word) for word in typed})
            return

    beside = [] if is_main() else ["hydra.run.dir=."]  # of several processes, the first alone makes a folder
    with StopSignal.listening() as stop:
        if is_sweep:  # whose jobs are interruptible, and what is between them is not
            stop.hold("this step of the sweep")
        run_hydra([*beside, *typed, *options])


def run_hydra(words: Sequence[str]) -> None:
    """Have Hydra compose the configuration, and call `job` for the run or for each of a sweep."""
    version.setbase("1.3")
    parser = get_args_parser()
    conf = str(compose.folder())
    try:
        _run_hydra(parser.parse_args(words), parser, job, config_path=conf, config_name="config")
    except (AssertionError, ValueError) as error:  # Hydra's, for GROUP=null and for a key below one that is null
        if not HydraConfig.initialized():
            hints = (empty_group(compose.key_of(word), words) for word in words)
            raise ConfigError(next(filter(None, hints), f"{' '.join(words)}: {error}")) from error
        if "optuna" not in extract_tb(error.__traceback__)[-1].filename:
            raise
        sweeps.leave_if_failed(Path(HydraConfig.get().sweep.dir).resolve())  # all of its trials have


def job(cfg: DictConfig) -> float | None:
    """Hydra's task function: run once. Returns the last held-out pass@1, which sweepers maximise."""
    hydra = HydraConfig.get()
    # As they were typed: the record of a run has ${oc.env:KEY}, and not the key.
    folder = Path(hydra.runtime.output_dir)
    words = cast("list[str]", OmegaConf.to_container(hydra.overrides.task))
    if hydra.mode is not RunMode.MULTIRUN:
        try:
            return _run(resume.with_absolute_paths(cfg), folder, words)
        except cli.EXPECTED as error:
            discard_fresh(folder)
            cli.leave(error)  # here, because Hydra would print the overrides

    # A job of a sweep. One that was complete when a signal came ends as any other; the sweep ends then.
    with sweeps.numbered_lines():
        try:
            with StopSignal.listening() as stop, stop.interruptible():
                # It goes on from its last checkpoint if the sweep is resumed, and is skipped if nothing is left to do.
                sweeps.check_folder(folder)
                typed: set[str] = set()
                stored = folder / ".hydra" / "config.yaml"
                if cfg.resume is not None and resume.run_of(folder) is not None and stored.exists():
                    new = [word for word in words if word not in resume.own_overrides(folder)]
                    cfg, words = resume.resumed_configuration(folder, new)
                    cfg.resume, typed = "auto", {compose.key_of(word) for word in new}
                cfg = resume.with_absolute_paths(cfg)
                if cfg.resume == "auto" and RunDir(folder).is_reported:
                    run, state = load_run(folder), latest_state(folder / "checkpoints")
                    plain = compose.as_plain(cfg)
                    is_done = run.is_done if state is None else resume.is_finished(RunDir(folder), state, plain)
                    if is_done and stored.is_file():
                        print(f"run {hydra.job.num} of the sweep is finished: {folder}")
                        return run.pass_at_1
                result = _run(cfg, folder, words, typed)
                stop.check()
                return result
        except cli.EXPECTED as error:
            discard_fresh(folder)
            if isinstance(error, StopRequested):
                if hydra.launcher._target_.endswith((".LocalLauncher", ".SharedServerLauncher")):
                    return None  # the launcher reports it for all jobs
                say_how_to_resume_sweep(error, Path(hydra.sweep.dir))
            if not isinstance(error, GrpoError):
                cli.leave(error)
            sweeps.report_failure(Path(hydra.sweep.dir), hydra.job.num, str(error), error.exit_code)
            return None  # the others still run


def _run(cfg: DictConfig, folder: Path, overrides: Sequence[str], typed: set[str] | None = None) -> float | None:
    from offline_grpo.history import ray_trainers

    # Not in a training process, which has the same configuration and was started so.
    if cfg.placement.trainer == "ray" and ray_trainers.STARTED not in os.environ:
        return ray_trainers.train(compose.typed(cfg), folder)
    from offline_grpo.run import train  # which imports torch

    with StopSignal.listening() as stop, stop.interruptible():
        return train(cfg, folder, overrides, typed or ())


def say_how_to_resume_sweep(error: StopRequested, folder: Path) -> None:
    """Print the command that resumes the sweep in this folder."""
    how = sweeps.how_it_goes_on(folder)
    cli.say(how if error.is_reported else f"stopped by {error.signal_name}; {how}")
    error.is_reported = True


def start_missing_processes() -> None:
    """Be torchrun for N processes, and exit, if `accelerate launch` was asked for N processes and started only this
    one: accelerate 1.15 does so, without a warning, unless it finds several accelerators or an MPI launcher.
    """
    if "LOCAL_RANK" in os.environ or "RANK" in os.environ:
        return
    # What started this process, and the `--num_processes` of it.
    parent = psutil.Process().parent()
    command = [] if parent is None else parent.cmdline()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", type=int, default=1)
    is_accelerate = any(os.path.basename(word).startswith("accelerate") for word in command[:3])
    num_processes = parser.parse_known_args(command)[0].num_processes if is_accelerate else 1
    if num_processes == 1:
        return
    import torch  # takes seconds; most calls return before this line

    if torch.cuda.is_available():
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(["--standalone", "--nproc_per_node", str(num_processes), *sys.argv])
    except ChildFailedError as error:  # which the processes have explained
        sys.exit(exit_code_of(error.get_first_failure()[1].exitcode))
    sys.exit(0)
