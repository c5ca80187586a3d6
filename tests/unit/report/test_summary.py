import io
from pathlib import Path

from rich.console import Console

from offline_grpo.report.history import History
from offline_grpo.report.summary import print_summary


def printed(history: History) -> str:
    stream = io.StringIO()
    print_summary(history, Console(file=stream, width=200))
    return stream.getvalue()


def test_before_after_best_reward_time_and_place() -> None:
    evals = {
        -1: {"pass@1": 0.2, "pass@1_low": 0.1, "pass@1_high": 0.3},
        0: {"pass@1": 0.6, "pass@1_low": 0.5, "pass@1_high": 0.7},
        1: {"pass@1": 0.4, "pass@1_low": 0.3, "pass@1_high": 0.5},
    }
    train = {i: {"reward_mean": 0.25 + i / 2, "time/generate_s": 90.0, "time/train_s": 30.0} for i in range(2)}
    text = printed(History(Path("/runs/one"), train, evals))
    assert "before 0.200 [0.100, 0.300]   after 0.400 [0.300, 0.500]   best 0.600 [0.500, 0.700] after iteration 1" in text
    assert "first 0.250   last 0.750" in text
    assert "4.0 min   generate 75%   train 25%" in text
    assert "/runs/one" in text


def test_a_run_without_evaluation_or_metrics() -> None:
    text = printed(History(Path("/runs/two"), {0: {"reward_mean": 0.5}}, {}))
    assert "first 0.500   last 0.500" in text
    assert "pass@" not in text
    assert printed(History(Path("/runs/three"), {}, {})) == ""
