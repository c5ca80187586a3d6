"""The learning rate at each update."""

from itertools import pairwise

import pytest

from offline_grpo.errors import ConfigError
from offline_grpo.train.schedule import LrSchedule

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
