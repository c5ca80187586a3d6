"""From an exception to a line on stderr and an exit code: 0 done, 1 failed, 2 configuration rejected, 128 + N stopped
by signal N.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from offline_grpo.config import compose
from offline_grpo.config.help import empty_group, no_such_key
from offline_grpo.disk import is_full
from offline_grpo.errors import ConfigError, DiskFull, GrpoError, StopRequested, ending_with_reader, reason_of
from offline_grpo.history.signals import HANDLED, StopSignal, is_main

SHOWS_TRACEBACKS = os.environ.get("HYDRA_FULL_ERROR") == "1"
"""Whether the user has asked for them, before `exit_with` sets the variable for Hydra."""

FIRST_SAYS_IT_S = 3.0
"""For which other processes wait with an error that all have: torchrun stops the first one as soon as another ends."""

EXPECTED = (GrpoError, StopRequested, KeyboardInterrupt, HydraException, OmegaConfBaseException)
"""Exceptions that `leave` reports as one line."""


def exit_with(main: Callable[[], object]) -> NoReturn:
    """Run `main`, which calls Hydra, and exit. Errors that the user can fix are one line; others keep their traceback.
    `HYDRA_FULL_ERROR=1` in the environment shows all tracebacks.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing and exiting with 1
    try:
        with StopSignal.listening(), ending_with_reader():
            main()
        sys.exit(0)
    except EXPECTED as error:
        leave(error)
    finally:
        # From here on a signal shall not change the exit code.
        os.environ.pop("HYDRA_FULL_ERROR")
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)


def run_command(main: Callable[[], None]) -> NoReturn:
    """Run the `main` of a command without Hydra's own, and exit; errors as in `exit_with`. A signal ends what `main`
    has begun, too.
    """
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - where it is closed
    try:
        with StopSignal.listening() as stop, ending_with_reader():
            try:
                main()
            finally:
                stop.check()  # libraries may make another error of it, or none
    except StopRequested as error:
        sys.exit(error.exit_code)  # its handler has said it
    except EXPECTED as error:
        leave(error, has_sweeps=False)
    except Exception as error:
        if not is_full(error):
            raise
        leave(DiskFull(f"no room on the disk ({reason_of(error)}); make room there, or write elsewhere"))
    sys.exit(0)


def add_trust_option(parser: argparse.ArgumentParser) -> None:
    about = "execute Python code that comes with the model"
    parser.add_argument("--trust-remote-code", action="store_true", help=about)


def leave(error: BaseException, *, has_sweeps: bool = True) -> NoReturn:
    """Print an error as one line, after its traceback if that is wanted, and exit with its code. `has_sweeps`: whether
    the command has --multirun.
    """
    if isinstance(error, StopRequested):
        if not error.is_reported:
            say(f"stopped by {error.signal_name} before the run began; nothing was saved")
        sys.exit(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        say("interrupted")
        sys.exit(130)
    # Of several processes the first says it, unless it does not know.
    if isinstance(error, GrpoError) and error.of_one_process and not is_main():
        print(f"error in process {os.environ['RANK']}: {error}", file=sys.stderr)
    elif not is_main():
        time.sleep(FIRST_SAYS_IT_S)
    if SHOWS_TRACEBACKS and is_main():
        traceback.print_exception(error)
    line = f"error: {error if isinstance(error, GrpoError) else explain(error, has_sweeps)}"
    say(line)
    if is_main() and (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        # torchrun prints a traceback of its own, and at its end what is in this file.
        reason = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": reason}))
    sys.exit(error.exit_code if isinstance(error, GrpoError) else ConfigError.exit_code)


def say(line: str) -> None:
    """Print a line on stderr, in the first process."""
    if is_main():
        print(line, file=sys.stderr)


def explain(error: BaseException, has_sweeps: bool) -> str:
    """An error of Hydra or OmegaConf about the command line as one line, with a hint where there is one."""
    # Of Hydra: a word that is no override, an option that a group does not have, several values without --multirun.
    if isinstance(error, OverrideParseException):
        return f"{error.override}: is not an override; write KEY=VALUE, GROUP=OPTION or +NEWKEY=VALUE"
    if isinstance(error, MissingConfigException):
        name, known = str(error.missing_cfg_file), compose.groups(compose.folders(sys.argv[1:]))
        group, _, option = name.rpartition("/")
        of_hydra = [each for each in error.options or () if not each.startswith("_")]
        offered = list(dict.fromkeys([*known.get(group, ()), *of_hydra]))  # both: Hydra's plugins bring options, too
        if name.startswith("model/") and name.count("/") > 1 and group not in known:
            model = name.removeprefix("model/")
            hub = f"model=hf model.train_id={model}"
            return f"model={model}: no such option; for a model of the Hugging Face Hub, {hub}"
        if offered:
            own = [f"{group}={each}" for each in offered if each.startswith(option)]
            elsewhere = [f"{other}={option}" for other, options in known.items() if option in {*options} - {"default"}]
            meant = f"choose one of {', '.join(offered)}"
            if elsewhere:
                meant = f"did you mean {' or '.join(own or elsewhere)}?"
            return f"{group}={option}: no such option; {meant}"
        return " ".join(str(error).split())
    if several := re.match("Ambiguous value for argument '(.*)'\n", str(error)):
        key, _, value = several[1].partition("=")
        text = f'"{key}={compose.quoted(value)}"'
        fix = "add --multirun for a run with each value" if has_sweeps else "name one value, and start again for others"
        return f"{several[1]}: {fix}; a list is {key}=[{value}], one text {text}"

    # Of OmegaConf: a key that does not exist, or a value of another type.
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    key, value = getattr(cause, "full_key", None), getattr(cause, "value", None)
    if key and isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        typed = next((other for other in map(compose.key_of, sys.argv[1:]) if other.startswith(str(key))), str(key))
        return empty_group(typed, sys.argv[1:]) or no_such_key(typed)
    if key:
        said = str(cause).splitlines()[0].rstrip(".")
        if elsewhere := re.match(r"While dereferencing interpolation '\$\{([\w.]+)\}': (.*)", said):
            key, said = elsewhere.groups()
        shown = f"{key}={value}" if value is not None else key
        hint = f"; a list is {key}=[{value}]" if "not a ListConfig" in said else compose.sweep_hint(str(key), value)
        return f"{shown}: {said}{hint}"
    return " ".join(str(error).split())
