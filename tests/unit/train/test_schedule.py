"""The learning rate at each update; the best evaluation so far and early stopping, on sequences of values worked out by
hand.
"""

from itertools import pairwise

import pytest

from offline_grpo.errors import ConfigError
from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.schedule import LrSchedule, Milestones, early_stop_reason

KINDS = ["constant", "linear", "cosine"]


def schedule(n, warmup_steps=0, kind="linear"):
    return LrSchedule(kind=kind, num_updates=n, warmup_steps=warmup_steps)


def scales(n, **settings):
    return [schedule(n, **settings)(i) for i in range(n)]


def continued(new, earlier, update, **how):
    return new.continuing(earlier, update, **{"restart": False, "warms_up": False, **how})


def test_warmup_starts_above_zero_and_reaches_the_peak():
    assert scales(4, warmup_steps=2, kind="constant") == [0.5, 1.0, 1.0, 1.0]


def test_cosine_halves_midway():
    assert scales(4, kind="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_run_goes_on_without_a_jump_and_ends_as_it_was_to_end(kind):
    earlier = schedule(100, warmup_steps=10, kind=kind)
    longer = continued(schedule(400, warmup_steps=10, kind=kind), earlier, 99)
    lrs = [earlier(i) for i in range(99)] + [longer(i) for i in range(99, 400)]
    assert longer(99) == earlier(99)
    assert max(abs(b - a) for a, b in pairwise(lrs[10:])) < 0.02
    assert longer(400) == (1 if kind == "constant" else 0)
    # resumed once more, without a change
    assert continued(schedule(400, warmup_steps=10, kind=kind), longer, 250) is longer


def test_a_run_in_its_warmup_goes_on_warming_up():
    going_on = continued(schedule(100, warmup_steps=4), schedule(50, warmup_steps=4), 2)
    assert [going_on(i) for i in (2, 3, 4)] == [0.75, 1, 1]


def test_another_kind_begins_where_the_earlier_one_was():
    constant = continued(schedule(100, kind="constant"), schedule(100), 50)
    assert [constant(50), constant(99)] == [0.5, 0.5]


def test_a_schedule_at_its_end_goes_on_only_from_a_new_learning_rate():
    with pytest.raises(ConfigError, match=r"^train.iterations: .*train.lr="):
        continued(schedule(200), schedule(100), 100)
    again = continued(schedule(200, warmup_steps=2), schedule(100, warmup_steps=2), 100, restart=True)
    assert [again(100), again(150), again(200)] == [1, 0.5, 0]
    warm = continued(schedule(200, warmup_steps=2), schedule(100, warmup_steps=2), 100, restart=True, warms_up=True)
    assert [warm(100), warm(101), warm(102)] == [0.5, 1, 1]


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
