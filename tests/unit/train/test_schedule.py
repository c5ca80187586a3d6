"""The learning rate at each update."""

import pytest

from offline_grpo.train.schedule import lr_scale


def scales(n, **settings):
    return [lr_scale(i, num_updates=n, **settings) for i in range(n)]


def test_warmup_starts_above_zero_and_reaches_the_peak():
    assert scales(4, warmup_steps=2, schedule="constant") == [0.5, 1.0, 1.0, 1.0]


def test_linear_matches_the_documented_example():
    assert scales(4, warmup_steps=2, schedule="linear") == [0.5, 1.0, 1.0, 0.5]


def test_cosine_halves_midway():
    assert scales(4, warmup_steps=0, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 50])
def test_no_planned_update_has_lr_zero(schedule, warmup_steps):
    assert all(0 < scale <= 1 for scale in scales(5, warmup_steps=warmup_steps, schedule=schedule))
