"""Turns an exception into one line on stderr and an exit code: 0 done, 1 failed, 2 configuration rejected, 128 + N
stopped by signal N.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import rich
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from offline_grpo.disk import NOT_WRITABLE
from offline_grpo.errors import ConfigError, GrpoError, StopRequested, ending_with_reader, forget_output, no_such_key
from offline_grpo.run import config, launch, resume, sweep_jobs, sweep_workers
from offline_grpo.run.build import sweep_hint
from offline_grpo.run.help import groups
from offline_grpo.run.interrupt import StopSignal, ignore_from_now_on
from offline_grpo.run.run_dir import discard_fresh

T = TypeVar("T")
log = logging.getLogger(__name__)
logging.getLogger("bitsandbytes").setLevel(
    logging.ERROR
)  # peft imports it, and it warns about kernels that are not used

SHOWS_TRACEBACKS = os.environ.get("HYDRA_FULL_ERROR") == "1"
"""Whether the user has asked for them, before `exit_with` sets the variable for Hydra."""

EXPECTED = (GrpoError, StopRequested, KeyboardInterrupt, HydraException, OmegaConfBaseException)
"""Exceptions that `leave` reports as one line."""

NO_OPTION = re.compile(r"[^.=]+=(null|true|false|[-+.\d]+)", re.IGNORECASE)
"""For a group, where an option's name belongs."""

NEEDED = {
    r"Value '(.*)' of type '\w+' could not be converted to Integer": "a whole number",
    r"Value '(.*)' of type '\w+' could not be converted to Float": "a number",
    r"Value '(.*)' is not a valid bool .*": "true or false",
    r"Cannot convert '\w+' to string: '(.*)'": "text",
    r"Invalid value assigned: ()\w+ is not a ListConfig.*": "a list, in brackets: [1,2]",
}
"""OmegaConf's message about a type -> what the key needs."""

RENAMED = {
    "model.packing": "model.layout",
    "model/layout": "model.layout",
    "loss": "train/loss",
    "train.loss.scale_rewards": "train/advantage",
    "optimizer": "train/optimizer",
    "lora": "model/lora",
    "lr": "train.lr",
    "train.learning_rate": "train.lr",
    "train.max_steps": "train.iterations",
    "iterations": "train.iterations",
}
"""What people write, and the key that they mean. With a layout of their own, model/layout is a group."""


def exit_with(main: Callable[[], object]) -> NoReturn:
    """Run Hydra's `main` and exit. Errors that the user can fix are reported in one line; other exceptions keep their
    traceback.

    `HYDRA_FULL_ERROR=1` in the environment shows all tracebacks. If `accelerate launch` starts several processes, Hydra
    creates a run folder in rank 0 only.
    """
    _open_missing_streams()
    rich.get_console().on_broken_pipe = _stop_unseen
    try:
        with StopSignal.listening():
            _exit_with(main)
    finally:
        ignore_from_now_on()
        # without the last garbage collection, a process that has imported torch ends in a third of the time
        gc.freeze()


def _exit_with(main: Callable[[], object]) -> NoReturn:
    launch.start_missing_processes()
    if not launch.is_main():
        place = next((i for i, word in enumerate(sys.argv[1:], 1) if resume.OVERRIDE.match(word)), len(sys.argv))
        sys.argv[place:place] = [
            "hydra.run.dir=.",
            "hydra.output_subdir=null",
        ]  # argparse needs all overrides in one place
    if SHOWS_TRACEBACKS:
        sys.argv[1:] = resume.arguments(sys.argv[1:])
        main()
        sys.exit(0)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing and exiting with 1
    try:
        with ending_with_reader():
            sys.argv[1:] = resume.arguments(sys.argv[1:])
            main()
    except EXPECTED as error:
        leave(error)
    except ValueError as error:  # Hydra's, for --multirun --cfg and for GROUP=null
        if str(error).startswith("Only one of --run"):
            leave(ConfigError(f"{error}; leave the others out"))
        if not str(error).startswith("Config group override must be"):
            raise
        wrong = ", ".join(
            word
            for word in sys.argv[1:]
            if NO_OPTION.fullmatch(word) and (config.folder() / word.partition("=")[0]).is_dir()
        )
        leave(ConfigError(f"{wrong}: a group needs one of its options; remove the override to use the default"))
    except AssertionError as error:  # OmegaConf's, for a key below one that is null
        frames = [
            frame
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_name == "_apply_overrides_to_config"
        ]
        if not frames or not str(error).startswith("Unexpected type for root"):
            raise
        leave(ConfigError(in_empty(frames[-1].f_locals["key"])))
    except OSError as error:
        if error.filename is None and error.errno in NOT_WRITABLE:
            leave(_unwritten(error))
        if run_job.__code__ in {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}:
            raise
        leave(_no_folder(error))
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
    if failed := len(sweep_jobs.exit_codes):
        from offline_grpo.report.history import count

        print(
            f"{count(failed, 'job')} of the sweep failed, with an error above; a refused one has no row",
            file=sys.stderr,
        )
    sys.exit(max(sweep_jobs.exit_codes, default=0))


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    """For commands that load a model."""
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="execute Python code that comes with the model"
    )


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run the `main` of a command without Hydra's own, and exit; errors are told as by `exit_with`."""
    _open_missing_streams()
    try:
        with ending_with_reader():
            main()
    except EXPECTED as error:
        leave(error)
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        leave(_unwritten(error))
    sys.exit(0)


def _unwritten(error: OSError) -> GrpoError:
    if error.filename is None:
        forget_output()
    what = error.filename or "the output, or a file"
    return GrpoError(f"{what}: cannot be written or read ({error.strerror}); free some space or fix the permissions")


def _stop_unseen() -> None:
    """Whoever read a run's output has ended: stop as for SIGTERM, which saves."""
    forget_output()
    rich.get_console().quiet = True
    # in a thread of its own: this one may hold the display, for which somebody else who logs waits
    threading.Thread(target=log.warning, args=("the program that read the output has ended",)).start()
    os.kill(os.getpid(), signal.SIGTERM)


def _open_missing_streams() -> None:
    """A shell's `>&-` closes one; Python has None for it."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def run_job(job: Callable[[], T]) -> T | None:
    """Call the function that Hydra runs; exit at once if it fails. A failed job of a sweep is reported, and the other
    jobs still run.
    """
    is_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    try:
        with StopSignal.listening() as stop:
            stop.begin()
            result = job()
            if is_sweep:  # a run that was complete when the signal came ends as any other; its sweep does not go on
                stop.check()
                stop.hold("this step of the sweep")
            return result
    except EXPECTED as error:
        discard_fresh(Path(HydraConfig.get().runtime.output_dir))
        if is_sweep and isinstance(error, StopRequested):
            if sweep_workers.sweep_process() is not None:
                return None  # the launcher says it of all jobs
            say_how_the_sweep_goes_on(error, Path(HydraConfig.get().sweep.dir))
        if not is_sweep or not isinstance(error, GrpoError):
            leave(error)
        _print(f"error in job {HydraConfig.get().job.num} of the sweep: {error}")
        sweep_jobs.record_failure(error.exit_code)
        return None


def say_how_the_sweep_goes_on(error: StopRequested, folder: Path, done: str | None = None) -> None:
    """Print the command that goes on with the sweep in this folder, after what is `done`. Hydra keeps no record of a
    search.
    """
    from offline_grpo.run import going_on

    is_search = not (folder / sweep_jobs.RECORD).is_file()
    how = "a search starts anew" if is_search else f"the sweep goes on with: {going_on.command(folder.resolve())}"
    line = f"{f'{done}; ' if done else ''}{how}"
    _print(line if error.is_reported else f"stopped by {error.signal_name}; {line}")
    error.is_reported = True


def _no_folder(error: OSError) -> ConfigError:
    """Hydra makes the folder of a run before it calls the job, and of a sweep before it starts jobs."""
    key = "hydra.sweep.dir" if {"-m", "--multirun"} & set(sys.argv) else "hydra.run.dir"
    return ConfigError(
        f"{key}: {error.filename} cannot be made or written ({error.strerror}); choose a folder that you can write to"
    )


def leave(error: BaseException) -> NoReturn:
    """Print an error as one line, after its traceback if that is wanted, and exit with its code."""
    if isinstance(error, StopRequested):
        if not error.is_reported:
            _print(f"stopped by {error.signal_name} before the run began; nothing was saved")
        sys.exit(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        _print("interrupted")
        sys.exit(130)
    if isinstance(error, GrpoError) and error.of_one_process and not launch.is_main():
        print(f"error in process {os.environ['RANK']}: {error}", file=sys.stderr)
    if SHOWS_TRACEBACKS and launch.is_main():
        traceback.print_exception(error)
    _print(f"error: {error if isinstance(error, GrpoError) else explain(error)}")
    sys.exit(error.exit_code if isinstance(error, GrpoError) else 2)


def _print(line: str) -> None:
    if launch.is_main():
        print(line, file=sys.stderr)


def explain(error: BaseException) -> str:
    """A Hydra or OmegaConf error as one line that names key, value and fix."""
    if isinstance(error, OverrideParseException):
        return f"{error.override}: is not an override; write KEY=VALUE, GROUP=OPTION or +NEWKEY=VALUE, quoted for the shell"
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        options = error.options or sorted(
            path.stem for path in (config.folder() / group).glob("*.yaml")
        )  # Hydra has none for a list
        choices = ", ".join(choice for choice in options if not choice.startswith("_"))
        more = (
            ", or install more of them: `uv run --extra sweeps ...`"
            if group in ("hydra/launcher", "hydra/sweeper")
            else ""
        )
        return f"{group}={option}: no such option; " + (
            f"choose one of {choices}{more}" if choices else f"there is no group {group}"
        )
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    text = " ".join(
        line.strip() for line in str(cause).splitlines() if "_type=" not in line and "full_key:" not in line
    )
    key = getattr(cause, "full_key", None) or getattr(cause, "key", None)
    if not isinstance(cause, OmegaConfBaseException) or not key:
        return " ".join(str(error).split())
    parent = cause.parent_node
    group, _, name = str(key).rpartition(".")
    if re.match("Key '.*' (not in|is not in struct)", text) and isinstance(parent, DictConfig):
        if key in RENAMED:
            return f"{key}: no such key; the setting is {RENAMED[key]}"
        known = (
            [str(child) for child in parent if child != "hydra"]
            if "/" not in str(key)
            else list(groups(config.folder()))
        )
        return str(no_such_key(str(key), known)) if known else in_empty(str(key))
    if "is not Optional" in text:
        return f"{key}=null: needs a value"
    if "does not support deletion" in text:
        return f"{key}: cannot be deleted; every setting has a value: write {key}=VALUE"
    return f"{_mistyped(str(key), text) or f'{key}: {text}'}{sweep_hint(group, name, getattr(cause, 'value', None))}"


def _mistyped(key: str, text: str) -> str | None:
    """A message of OmegaConf's about a value of the wrong type, as `KEY=VALUE: must be ...`; None for any other."""
    if through := re.fullmatch(r"While dereferencing interpolation '\$\{([\w.]+)\}': (.*)", text):
        return _mistyped(through[1], through[2])  # the key that was set, and not one that follows it
    for pattern, needed in NEEDED.items():
        if found := re.fullmatch(pattern, text):
            return f"{key}{found[1] and f'={found[1]}'}: must be {needed}"
    return None


def in_empty(key: str) -> str:
    """What is said of a setting whose group is null, or has no settings."""
    group = key.rpartition(".")[0]
    options = sorted(path.stem for path in (config.folder() / group.replace(".", "/")).glob("[!_]*.yaml"))
    choices = " or ".join(f"{group.replace('.', '/')}={option}" for option in options)
    return f"{key}: {group} is empty here; " + (f"add {choices}" if choices else f"+{key}=VALUE adds to it")
