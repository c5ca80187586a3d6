"""From an exception to one line on stderr and an exit code: 0 done, 1 failed, 2 refused, 128 + N stopped by signal N."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from offline_grpo.build import sweep_hint
from offline_grpo.errors import GrpoError
from offline_grpo.interrupt import StopRequested


def exit_with(main: Callable[[], object]) -> NoReturn:
    """Run Hydra's `main`, report what people can act on in one line, and leave. Other exceptions keep their traceback.

    `HYDRA_FULL_ERROR=1` in the environment shows the traceback of everything. Of the processes that `accelerate launch` starts, only
    the first lets Hydra make a run folder.
    """
    if os.environ.get("RANK", "0") != "0":
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null"]
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        main()
        sys.exit(0)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra must raise, not print and exit with 1
    try:
        main()
    except GrpoError as error:
        _leave(str(error), error.exit_code)
    except StopRequested as stop:
        sys.exit(stop.exit_code)  # the run has said where it stopped
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except (HydraException, OmegaConfBaseException) as error:
        _leave(explain(error), 2)
    sys.exit(0)


def explain(error: BaseException) -> str:
    """A Hydra or OmegaConf error as one line that names key, value and fix."""
    cause: BaseException = error
    while cause.__cause__ is not None and isinstance(cause.__cause__, OmegaConfBaseException):
        cause = cause.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(line for line in lines if not line.startswith(("object_type=", "reference_type=")))
    key = getattr(cause, "full_key", None)
    if key and f"full_key: {key}" in text:
        text = text.replace(f"full_key: {key}", "").strip()
        value = getattr(cause, "value", None)
        group, _, name = key.rpartition(".")
        text = f"{key}: {text}{sweep_hint(group, name, value)}"
    return text


def _leave(message: str, code: int) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
