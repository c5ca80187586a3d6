"""A logger of the user's own comes last, and what it raises is one line that names its class."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from factories import compose_config

from offline_grpo.errors import GrpoError, StopRequested
from offline_grpo.interfaces import RunListener
from offline_grpo.logger.custom import CustomListener
from offline_grpo.logger.json_logger import JsonLogger
from offline_grpo.logger.profiler import Profiler
from offline_grpo.run.app import _closing
from offline_grpo.run.config import typed
from offline_grpo.run.preflight import listeners
from offline_grpo.types import Metrics

CALLS: Mapping[str, Callable[[RunListener], None]] = {
    "start": lambda listener: listener.start({"seed": 0}, 3),
    "phase": lambda listener: listener.phase("train", 1),
    "progress": lambda listener: listener.progress(1, 2, "completions"),
    "rollouts": lambda listener: listener.rollouts("train", [], advantages=None, iteration=1),
    "log": lambda listener: listener.log("train", {"loss": 1.0}, iteration=1),
    "close": lambda listener: listener.close(),
}


class Ours(RunListener):
    """Records `log`; `close` and `log` raise `error` if there is one."""

    error: BaseException | None = None

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        self.seen.append((name, metrics, iteration))
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        if self.error is not None:
            raise self.error


class Broken:
    """Raises wherever it is called."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise KeyError(name)

        return fail


def guarded(error: BaseException | None = None) -> CustomListener:
    listener = Ours()
    listener.error = error
    return CustomListener("logger.mine", listener)


def test_it_comes_after_all_of_the_packages_own() -> None:
    words = (f"+logger.mine._target_={__name__}.Ours", "logger=[json]", "train.profile=1")
    found = listeners(typed(compose_config(*words)), Path("/nowhere"))
    *ours, last = found
    assert {type(listener).__module__.partition(".")[0] for listener in ours} == {"offline_grpo"}
    assert {JsonLogger, Profiler} <= {type(listener) for listener in ours}
    assert isinstance(last, CustomListener)
    assert isinstance(last.listener, Ours)
    assert last.key == "logger.mine"


def test_it_is_told_everything() -> None:
    listener = guarded()
    for call in CALLS.values():
        call(listener)
    assert listener.listener.seen == [("train", {"loss": 1.0}, 1)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", CALLS)
def test_what_it_raises_is_one_line_that_names_class_error_and_place(method: str) -> None:
    broken: Any = Broken()
    with pytest.raises(GrpoError) as caught:
        CALLS[method](CustomListener("logger.mine", broken))
    line, place = str(caught.value), "(test_custom.py, line "
    assert line.startswith(f"logger.mine: {__name__}.Broken.{method} raised KeyError: '{method}' {place}")
    assert line.endswith(
        ", in fail); the fix belongs in that class, or leave this logger out; HYDRA_FULL_ERROR=1 shows the traceback"
    )
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionError("refused\nby peer"), "ConnectionError: refused"),
        (AssertionError(), "AssertionError"),
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: "),
    ],
)
def test_only_the_first_line_of_an_error_is_told(error: Exception, told: str) -> None:
    with pytest.raises(GrpoError, match=rf"Ours\.log raised {told}") as caught:
        CALLS["log"](guarded(error))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [GrpoError("its own words"), StopRequested(15), KeyboardInterrupt()])
def test_errors_with_words_for_the_user_and_signals_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        CALLS["log"](guarded(error))
    assert caught.value is error


def test_an_error_at_the_end_is_told_unless_another_one_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(GrpoError, match=r"Ours\.close raised OSError: gone"), ExitStack() as stack:
        stack.push(_closing(guarded(OSError("gone"))))
    assert not caplog.messages
    with pytest.raises(ZeroDivisionError), ExitStack() as stack:
        stack.push(_closing(guarded(OSError("gone"))))
        raise ZeroDivisionError
    [line] = caplog.messages
    assert "Ours.close raised OSError: gone" in line
