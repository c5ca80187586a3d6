import io
import logging
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from offline_grpo.history.records import ToTerminal
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import console
from offline_grpo.logger.console import ConsoleLogger

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
TRAIN = {"reward_mean": 0.4123, "success_rate": 0.375, "loss_total": -0.0123, "kl_divergence": 0.0012}
TRAIN |= {"grad_norm": 0.5, "perf/generate_tokens_per_s": 12345.6, "perf/train_tokens_per_s": 34567.8}
EVAL = {"pass@1": 0.25, "pass@1_low": 0.125, "pass@1_high": 0.5, "mean@1": 0.3}
EVAL |= {"pass@10": 0.9, "pass@10_low": 0.8, "pass@10_high": 1.0}


class Clock:
    now_s = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stands still, however long a busy machine takes for a line."""
    clock = Clock()
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def logger_on(*, terminal: bool, width: int = 80) -> tuple[ConsoleLogger, io.StringIO]:
    stream = io.StringIO()
    logger = ConsoleLogger(refresh_per_s=50, names="default")
    logger.console = Console(file=stream, force_terminal=terminal, width=width, color_system=None)
    return logger, stream


def drawn(logger: ConsoleLogger) -> list[str]:
    """The lines of the live display, on a console of their own: its thread draws on the other one."""
    apart = Console(file=io.StringIO(), force_terminal=True, width=logger.console.width, color_system=None)
    with apart.capture() as capture:
        apart.print(logger._render())
    return capture.get().splitlines()


def test_a_log_file_gets_one_plain_line_per_record() -> None:
    logger, stream = logger_on(terminal=False)
    assert isinstance(logger, RunListener)
    logger.start({}, 10)
    logger.phase("generate", 0)
    logger.progress(3, 256, "completions")
    logger.log("eval", EVAL, iteration=-1)
    logger.log("train", TRAIN, iteration=2)
    logger.close()
    before, train = stream.getvalue().splitlines()
    assert before == " 0/10  eval  pass@1 0.250 [0.125, 0.500]  pass@10 0.900 [0.800, 1.000]"
    assert train == " 3/10  reward 0.412  success 0.375  KL 0.0012  gen tok/s 12,346  0:00:00 left"


def test_a_terminal_shows_progress_metrics_phase_and_last_evaluation() -> None:
    logger, stream = logger_on(terminal=True)
    logger.names = "atropos"
    logger.start({}, 1000)
    logger.log("train", TRAIN | {"entropy": 0.5, "clip_frac": 0.5, "sync/frozen": 1.0}, iteration=998)
    logger.log("eval", EVAL, iteration=998)
    logger.phase("generate", 999)
    logger.progress(1024, 4096, "completions")
    lines = drawn(logger)
    text = "\n".join(lines)
    for part in (
        "iteration 999/1000",
        "left",
        "generate  1,024/4,096 completions  0:00:00",
        "0.412",
        "12,346",
        "frozen",
    ):
        assert part in text
    assert "eval after 999  pass@1 0.250 [0.125, 0.500]  pass@10 0.900 [0.800, 1.000]" in lines
    assert max(map(len, lines)) <= 80
    logger.log("train", TRAIN, iteration=999)
    logger.phase("eval", 999)
    assert "iteration 1000/1000" in "\n".join(drawn(logger)), "the last evaluation does not set it back"
    assert "completions" not in "\n".join(drawn(logger))
    logger.close()
    assert "…" not in text + stream.getvalue()
    assert "Step 999/1000\n  Loss: -0.012300, Grad norm: 0.5000\n" in stream.getvalue()


@pytest.mark.parametrize(("early", "last_word"), [({}, "stopped"), ({"stopped_early": 1.0}, "done")])
def test_the_cursor_comes_back_however_the_run_ends(early: dict[str, float], last_word: str) -> None:
    logger, stream = logger_on(terminal=True)
    logger.start({}, 2)
    logger.log("train", TRAIN | early, iteration=0)
    logger.close()
    logger.close()
    output = stream.getvalue()
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1
    assert output.rindex(SHOW_CURSOR) > output.rindex(last_word)


def test_time_left_is_that_of_recent_iterations(clock: Clock) -> None:
    logger, stream = logger_on(terminal=False)
    logger.start({}, 100)
    clock.now_s += 500  # the evaluation before training is no part of an iteration
    logger.log("eval", EVAL, iteration=-1)
    clock.now_s += 500  # nor is the push before the first one, of a run that is resumed at 50
    for iteration in range(50, 53):
        logger.phase("generate", iteration)
        clock.now_s += 20
        clock.now_s += 40
        logger.log("train", TRAIN, iteration=iteration)
        logger.log("eval", EVAL, iteration=iteration)
    # 47 iterations of a minute are left.
    assert stream.getvalue().splitlines()[-2].endswith("  0:47:00 left")


def test_a_long_phase_says_every_half_minute_how_far_it_is(clock: Clock) -> None:
    logger, stream = logger_on(terminal=False)
    logger.start({}, 10)
    logger.phase("generate", 2)
    logger.progress(12, 64, "completions")
    clock.now_s += 29
    deadline = time.monotonic() + 20
    while not stream.getvalue():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert stream.getvalue() == " 2/10  generate  12/64 completions  0:00:29\n"
    logger.close()


def test_a_warm_start_says_how_long_it_will_take(clock: Clock) -> None:
    logger, _ = logger_on(terminal=False)
    logger._ends = threading.Event()  # without the thread that waits for silence
    logger.phase("warm start", -1)
    logger.progress(0, 1000, "steps")
    clock.now_s += 5
    assert logger._how_far() == "0/1,000 steps  0:00:05"
    logger.progress(10, 1000, "steps")
    clock.now_s += 20
    assert logger._how_far() == "10/1,000 steps  0:00:25, about 0:41:15 left"


def test_records_are_in_the_log_too_and_only_there(caplog: pytest.LogCaptureFixture) -> None:
    """run.log has the lines of iterations; the handler of the terminal leaves them out."""
    logger, stream = logger_on(terminal=True)
    handler = ToTerminal(logger.console)
    package = logging.getLogger("offline_grpo")
    package.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO):
            logger.log("train", TRAIN, iteration=2)
            package.warning("a long line " * 10)
    finally:
        package.removeHandler(handler)
    assert caplog.messages[0].lstrip().startswith("3/0 ")
    record, *lines = stream.getvalue().splitlines()
    assert "reward" in record
    assert [line[:6] for line in lines] == ["a long", "line a"], "no record twice, and no word is broken"
