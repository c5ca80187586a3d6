"""The best evaluation so far and early stopping, on sequences of values worked out by hand."""

import pytest

from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.schedule import Milestones, early_stop_reason

NEVER = StopWhenConfig("pass@1", None, None)


def saves(milestones: Milestones, metric: str, values: list[float], first: int = -1) -> list[int]:
    """The iterations whose state must be saved, of evaluations with these values from iteration `first` on."""
    return [i for i, value in enumerate(values, first) if milestones.see({metric: value}, i)]


@pytest.mark.parametrize(
    ("metric", "values", "saved"),
    [
        # a tie is no better, and the value before training has no checkpoint
        ("pass@1", [0.9, 0.2, 0.4, 0.4, 0.3, 0.5], [0, 1, 4]),
        ("-length", [1.0, 7.0, 8.0, 6.0, 6.0], [0, 2]),
    ],
)
def test_the_best_evaluation_is_saved(metric: str, values: list[float], saved: list[int]) -> None:
    milestones = Milestones(metric, NEVER)
    assert saves(milestones, metric.lstrip("-"), values) == saved
    assert milestones.best_iteration == saved[-1]
    assert milestones.stop_reason is None


@pytest.mark.parametrize(
    ("stop_when", "values", "stops_at", "reason"),
    [
        (StopWhenConfig("m", 0.5, None), [0.6, 0.4, 0.5], 1, "m=0.5 has reached train.stop_when.threshold=0.5"),
        (StopWhenConfig("-m", 0.5, None), [0.1, 0.6, 0.4], 1, "m=0.4 has reached"),
        (StopWhenConfig("m", None, 2), [0.3, 0.4, 0.4, 0.1, 0.5], 2, "no better m than 0.4 (after iteration 1) in"),
    ],
)
def test_a_run_stops_early(stop_when: StopWhenConfig, values: list[float], stops_at: int, reason: str) -> None:
    milestones = Milestones(None, stop_when)
    for iteration, value in enumerate(values, -1):
        assert milestones.stop_reason is None, f"stopped before iteration {iteration}"
        is_last = milestones.see({"m": value}, iteration)
        if iteration == stops_at:
            break
    assert is_last, "the state is saved"
    assert milestones.stop_reason is not None
    assert reason in milestones.stop_reason
    state = milestones.state_dict()
    assert early_stop_reason(state, stop_when) == milestones.stop_reason
    assert early_stop_reason(state, StopWhenConfig("m", 2.0, None)) is None, "with another goal it would go on"
    assert early_stop_reason(state, NEVER) is None
    assert early_stop_reason({}, stop_when) is None


def test_state_goes_through_a_checkpoint() -> None:
    cut, values = 3, [0.3, 0.2, 0.5, 0.4, 0.45, 0.1]
    stop_when = StopWhenConfig("m", None, 3)
    whole, first, second = (Milestones("m", stop_when) for _ in range(3))
    expected = saves(whole, "m", values)
    saved = saves(first, "m", values[:cut])
    second.load_state_dict(first.state_dict())
    assert saved + saves(second, "m", values[cut:], first=cut - 1) == expected
    assert second.state_dict() == whole.state_dict()
    assert second.stop_reason == whole.stop_reason
    assert whole.stop_reason is not None


def test_another_metric_starts_anew() -> None:
    before, after = Milestones("a", NEVER), Milestones("b", NEVER)
    before.see({"a": 1.0}, 0)
    after.load_state_dict(before.state_dict())
    assert after.best_iteration is None
