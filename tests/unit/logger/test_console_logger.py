import io

import pytest
from rich.console import Console

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import RunListener
from offline_grpo.logger.console import ConsoleLogger

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
TRAIN = {"reward_mean": 0.4123, "success_rate": 0.375, "loss_total": -0.0123, "kl_divergence": 0.0012, "perf/tokens_per_s": 12345.6}
EVAL = {"pass@1": 0.25, "pass@1_low": 0.125, "pass@1_high": 0.5, "pass@10": 0.9, "pass@10_low": 0.8, "pass@10_high": 1.0, "mean@1": 0.3}


def logger_on(*, terminal: bool) -> tuple[ConsoleLogger, io.StringIO]:
    stream = io.StringIO()
    logger = ConsoleLogger(refresh_per_s=50)
    logger.console = Console(file=stream, force_terminal=terminal, width=140, color_system=None)
    return logger, stream


def test_a_log_file_gets_one_plain_line_per_record() -> None:
    logger, stream = logger_on(terminal=False)
    assert isinstance(logger, RunListener)
    logger.start({}, 10)
    logger.phase("generate", 0)
    logger.log("eval", EVAL, iteration=-1)
    logger.log("train", TRAIN, iteration=2)
    logger.close()
    before, train = stream.getvalue().splitlines()
    assert before == "before training | eval | pass@1 0.250 [0.125, 0.500] | pass@10 0.900 [0.800, 1.000]"
    assert train.startswith("iteration 3/10 | train | reward 0.412 | success 37.5% | loss -0.0123 | KL 0.0012 | tokens/s 12,346 | 0:00:0")
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_shows_progress_metrics_phase_and_last_evaluation() -> None:
    logger, stream = logger_on(terminal=True)
    assert isinstance(logger, RunListener)
    logger.start({}, 10)
    logger.log("eval", EVAL, iteration=1)
    logger.log("train", TRAIN, iteration=1)
    logger.phase("generate", 2)
    assert logger._live is not None
    logger._live.refresh()
    for text in ("iteration 2/10", "generate", "0.412", "37.5%", "12,346", "left", "eval after iteration 2", "pass@1 0.250 [0.125, 0.500]"):
        assert text in stream.getvalue()
    logger.close()


@pytest.mark.parametrize(("iteration", "last_word"), [(1, "done"), (0, "stopped")])
def test_the_cursor_comes_back_however_the_run_ends(iteration: int, last_word: str) -> None:
    logger, stream = logger_on(terminal=True)
    logger.start({}, 2)
    logger.log("train", TRAIN, iteration=iteration)
    logger.close()
    logger.close()
    output = stream.getvalue()
    assert output.count(HIDE_CURSOR) == output.count(SHOW_CURSOR) == 1
    assert output.rindex(SHOW_CURSOR) > output.rindex(last_word)


def test_close_before_start_is_harmless() -> None:
    logger, stream = logger_on(terminal=True)
    logger.close()
    assert stream.getvalue() == ""


def test_time_left_is_that_of_recent_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    logger, stream = logger_on(terminal=False)
    logger.start({}, 100)
    now_s += 500  # the evaluation before training is no part of an iteration
    logger.log("eval", EVAL, iteration=-1)
    for iteration in range(50, 53):  # resumed at 50
        now_s += 20
        logger.log("eval", EVAL, iteration=iteration)
        now_s += 40
        logger.log("train", TRAIN, iteration=iteration)
    # 47 iterations of a minute are left.
    assert stream.getvalue().splitlines()[-1].endswith("| 0:47:00 left")


def test_a_refresh_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logger\.console\.refresh_per_s=0"):
        ConsoleLogger(refresh_per_s=0)
