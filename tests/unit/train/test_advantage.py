"""Group advantages against worked examples and Python's statistics module."""

from __future__ import annotations

import statistics

import pytest
from factories import compose_config

from offline_grpo.train.advantage import group_advantages

GROUPS = [[1.0, 0.0, 0.0, 0.0], [0.3, -0.2, 0.9], [2.0, 2.0]]


def test_worked_example():
    assert group_advantages([[1, 0], [5, 5]], scale="none") == [[0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_values_against_statistics(scale):
    flat_std = statistics.stdev(reward for group in GROUPS for reward in group)
    for rewards, advantages in zip(GROUPS, group_advantages(GROUPS, scale=scale), strict=True):
        divisor = {"group": statistics.stdev(rewards) + 1e-4, "batch": flat_std + 1e-4, "none": 1.0}[scale]
        assert advantages == pytest.approx([(reward - statistics.fmean(rewards)) / divisor for reward in rewards])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(("size", "reward"), [(1, 0.1), (3, 1e6 + 0.1)])
def test_constant_groups_are_exactly_zero(scale, size, reward):
    advantages = group_advantages([[reward] * size, [0.0, 1.0]], scale=scale)
    assert advantages[0] == [0.0] * size
    assert advantages[1][0] < 0 < advantages[1][1]


def test_rounding_noise_is_not_signal():
    rewards = [0.1 + 0.2, 0.3, 0.3]
    assert len(set(rewards)) > 1
    assert group_advantages([rewards], scale="group") == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "GroupStd"),
        (("train/loss=dr_grpo",), "GroupMean"),
        (("train/loss=dr_grpo", "train/advantage=group_std"), "GroupStd"),
        (("train/advantage=batch_std", "train/loss=dr_grpo"), "BatchStd"),
    ],
)
def test_a_loss_chooses_its_advantage_unless_the_user_does(words, expected):
    assert compose_config(*words).train.advantage._target_ == f"offline_grpo.train.advantage.{expected}"
