"""Advantages against worked examples, Python's statistics module, and verl 0.9.1 (its numbers, from its own functions
in float64); see tests/equivalence for TRL.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import combinations
from statistics import stdev
from types import SimpleNamespace

import pytest
import yaml
from factories import CONF, compose_config, make_rollout
from run_folders import write_store

from offline_grpo.config.build import build
from offline_grpo.config.compose import typed
from offline_grpo.config.parts import check_settings, make_plan
from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Advantage, Source
from offline_grpo.rollouts.asynchronous import Asynchronous
from offline_grpo.rollouts.atropos import Atropos
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.rollouts.replay import Replay
from offline_grpo.train.advantage import (
    GDPO,
    RLOO,
    Distill,
    MaxRL,
    PassK,
    PerToken,
    PerTurn,
    ReinforceBaseline,
    group_advantages,
)
from offline_grpo.train.batch import build_batch
from offline_grpo.types import Rollout, RolloutGroup, Score, Turn

NUMBERS = [[1.0, 0.0, 0.0, 0.0], [0.3, -0.2, 0.9], [2.0, 2.0]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_values_against_statistics(scale):
    flat_std = statistics.stdev(reward for group in NUMBERS for reward in group)
    for rewards, advantages in zip(NUMBERS, group_advantages(NUMBERS, scale=scale), strict=True):
        divisor = {"group": statistics.stdev(rewards) + 1e-4, "batch": flat_std + 1e-4, "none": 1.0}[scale]
        assert advantages == pytest.approx([(reward - statistics.fmean(rewards)) / divisor for reward in rewards])


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


REWARDS = [[1.0, 0.0, 0.25, 0.0], [0.3, -0.2, 0.9], [2.0, 2.0]]
LENGTHS = [[3, 1, 4, 2], [2, 5, 1], [2, 3]]
OF_VERL = {
    "rloo": "0.916666666667 -0.416666666667 -0.083333333333 -0.416666666667 -0.05 -0.8 0.85 0 0",
    "reinforce_baseline": "1.891789687615 -0.652102900930 -0.016129753794 -0.652102900930 0.058067113372 "
    "-1.213879180900 1.584402666499 0.142863532990 0.142863532990",
    "passk": "1.584808282556 0 0 0 0 0 1.089407580785 0 0",
}


def rollout(length: int, reward: float = 0.0, is_correct: bool = False, turns: tuple[Turn, ...] = (), **parts: float):
    score = Score(sum(parts.values()) if parts else reward, is_correct, parts)
    return replace(make_rollout([4], [3] * length), score=score, turns=turns)


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(None, rollouts)


def advantages(component, groups):
    return component(groups, build_batch([each for own in groups for each in own.rollouts]))


GROUPS = [
    group(*(rollout(length, reward) for length, reward in zip(*pair, strict=True)))
    for pair in zip(LENGTHS, REWARDS, strict=True)
]


@pytest.mark.parametrize(
    ("name", "component"), [("rloo", RLOO()), ("reinforce_baseline", ReinforceBaseline()), ("passk", PassK(None))]
)
def test_values_of_verl(name, component):
    found = [each for own in advantages(component, GROUPS) for each in own]
    assert found == pytest.approx([float(number) for number in OF_VERL[name].split()], rel=0, abs=1e-9)
    assert [component.is_silent(own) for own in GROUPS] == [False, False, True]


@pytest.mark.parametrize("k", [2, 3, 5, 6])
def test_pass_at_k_is_what_a_completion_adds_to_the_best_of_k(k):
    rewards = [0.5, 0.0, 1.0, 1.0, 0.25, -1.0]
    [found] = advantages(PassK(k), [group(*(rollout(2, reward) for reward in rewards))])
    for index, reward in enumerate(rewards):
        others = rewards[:index] + rewards[index + 1 :]
        gains = [max(reward, *rest) - max(rest) for rest in combinations(others, k - 1)]
        assert found[index] == pytest.approx(sum(gains) / len(gains) / (stdev(rewards) + 1e-6), abs=1e-12)


def test_two_best_of_k_equal_completions_leave_no_signal():
    tied = group(*(rollout(2, reward) for reward in (1.0, 1.0, 0.0)))
    assert PassK(None).is_silent(tied)
    assert not PassK(2).is_silent(tied)


def test_a_rare_right_answer_counts_by_its_rarity():
    once, never = ([rollout(2, 0.1, is_correct=right) for right in own] for own in ([True] + [False] * 3, [False] * 4))
    assert advantages(MaxRL(), [group(*once), group(*never)]) == [[3.0, -1.0, -1.0, -1.0], [0.0] * 4]
    assert [MaxRL().is_silent(group(*own)) for own in (once, never)] == [False, True]


SIZES = [0.1, 1 / 3, -0.7, 123456.7, 1e9 + 0.1, 1e10 / 3, 1e10, 1e15 + 0.3, -1e18 / 7, 1e23 / 3, -1e30]
OF_REWARDS = sorted(  # the others have a teacher's numbers, or those of the source
    path for path in (CONF / "train/advantage").glob("*.yaml") if path.stem not in ("distill", "per_token")
)


@pytest.mark.parametrize("option", OF_REWARDS, ids=lambda path: path.stem)
def test_equal_rewards_of_any_size_give_exactly_nothing_and_almost_equal_ones_what_they_should(option):
    component = build(yaml.safe_load(option.read_text()), key="train.advantage", protocol=Advantage)

    def of(*rewards: float) -> RolloutGroup:
        scored = ({"a": 0.0, "b": reward} for reward in rewards)
        return group(*(rollout(2, is_correct=True, turns=(Turn(1, 2), Turn(2, 3)), **parts) for parts in scored))

    def last_tokens(*groups: RolloutGroup) -> list[list[float]]:
        found = advantages(component, groups)
        return [[each[-1] if isinstance(each, list) else each for each in own] for own in found]

    for count in (1, 2, 3, 7, 8, 11):
        for reward in SIZES:
            equal = of(*[reward] * count)
            assert component.is_silent(equal)
            assert last_tokens(equal) == [[0.0] * count], reward
            if option.stem != "reinforce_baseline":  # which subtracts the mean of all tokens, too
                assert last_tokens(of(1.0, 0.3, 0.0), equal, of(0.7, 0.7))[1] == [0.0] * count, reward
    for reward in (1e10, 1e15, -1e15, 1e29):
        [[*worse, best]] = last_tokens(of(reward, reward, reward, reward + abs(reward) * 1e-14))
        if option.stem == "maxrl":  # right and wrong alone
            assert best == 0.0
        else:
            expected = [0.0] * 3 if option.stem == "passk" else [-best / 3] * 3
            assert best > 0
            assert worse == pytest.approx(expected)


def test_a_part_that_no_rollout_of_an_iteration_has_contributes_nothing_to_it(caplog):
    both = [group(rollout(2, a=1.0, b=0.5), rollout(2, a=0.0, b=0.5), rollout(2, a=0.0, b=0.0))]
    one = [group(rollout(2, a=1.0), rollout(2, a=0.0), rollout(2, a=0.0))]
    component = GDPO({"a": 2.0, "b": 1.0})
    before = advantages(component, both)
    [alone] = advantages(component, one)
    assert not caplog.text
    normalised = [(each - 1 / 3) / (stdev([1, 0, 0]) + 1e-4) for each in (1, 0, 0)]
    sums = [2.0 * each for each in normalised]
    assert alone == pytest.approx([each / (stdev(sums) + 1e-4) for each in sums])
    assert advantages(component, both) == before
    advantages(GDPO({"a": 2.0, "c": 1.0}), both)
    advantages(GDPO(None), one)
    assert [record.args for record in caplog.records] == [("a, b",), ("a",)]


def test_gdpo_counts_what_a_mixture_and_penalties_of_the_source_may_add():
    def task(**parts: float) -> SimpleNamespace:
        return SimpleNamespace(
            scores_safely=True, problems=lambda split: [None], score=lambda problem, text: Score(0.0, False, parts)
        )

    def check(component: GDPO, one: SimpleNamespace, **settings: object) -> None:
        loss = SimpleNamespace(loss={})
        config = SimpleNamespace(source=Source, rollouts=settings, task={}, train=loss)
        component.check(config, one, [])  # type: ignore[arg-type]

    mixture = task(a=1.0)
    mixture.tasks = {"one": task(a=1.0), "other": task(b=1.0)}
    check(GDPO({"b": 2.0}), mixture)
    check(GDPO({"overlong": 2.0}), task(a=1.0), soft_overlong_tokens=4)
    check(GDPO({"length": 2.0}), task(a=1.0), penalize_length_if_solved=True)
    for settings in ({}, {"soft_overlong_tokens": None, "penalize_length_if_solved": False}):
        with pytest.raises(ConfigError, match="gdpo: adds up several parts of the reward, which has a; use group_std"):
            check(GDPO(None), task(a=1.0), **settings)
    with pytest.raises(ConfigError, match=r"weights={'c': 1}: the reward's parts are a, b"):
        check(GDPO({"c": 1}), task(a=1.0, b=0.0))


def test_parts_that_cancel_are_signal_for_gdpo_alone():
    cancelling = group(rollout(2, a=1.0, b=0.0), rollout(2, a=0.0, b=1.0))
    assert (RLOO().is_silent(cancelling), GDPO(None).is_silent(cancelling)) == (True, False)
    assert GDPO(None).is_silent(group(*[rollout(2, a=0.1 + 0.2, b=1.0), rollout(2, a=0.3, b=1.0)]))


def test_each_turn_gets_what_is_still_to_come():
    first = rollout(6, 3.0, turns=(Turn(1, 3, 1.0), Turn(4, 7, 2.0)))  # to come: 3, 2
    second = rollout(3, 1.0, turns=(Turn(1, 2, 1.0), Turn(3, 4)))  # 1, 0
    third = rollout(2, 2.0, turns=(Turn(1, 3),))  # 2
    [found] = advantages(PerTurn(), [group(first, second, third)])
    one, half = 1 / (1 + 1e-4), 1 / (2**0.5 + 1e-4)
    assert found[0] == pytest.approx([0, one, one, 0, half, half, half])
    assert found[1] == pytest.approx([0, -one, 0, -half])
    assert found[2] == pytest.approx([0, 0, 0])
    assert not PerTurn().is_silent(group(first, second))
    assert PerTurn().is_silent(group(third, third))
    with pytest.raises(ConfigError, match="do not tell their turns apart"):
        advantages(PerTurn(), GROUPS)


def test_a_sources_own_numbers_are_taken_as_they_are():
    rows = ((0.0, 1.0, 2.0), (0.0, -3.0))
    given = RolloutGroup(None, (rollout(2), rollout(1)), rows)
    assert advantages(PerToken(), [given]) == [rows]
    with pytest.raises(ConfigError, match="without advantages of its own"):
        advantages(PerToken(), GROUPS)


@pytest.mark.parametrize(
    ("component", "changes", "told"),
    [
        (PassK(9), {"rollouts": {"group_size": 8}}, r"^train\.advantage\.k=9: must be from 2 to .*_problem=8"),
        (PassK(1), {}, r"^train\.advantage\.k=1: must be from 2"),
        (GDPO(None), {"source": Atropos}, r"^train/advantage=gdpo: needs the parts"),
        (GDPO(None), {"train": {"kl_placement": "reward"}}, r"^train\.loss\.kl_placement=reward"),
        (GDPO(None), {"task": {"reward": [{"fn": "m:a", "weight": 2}, "m:b"]}}, r"weights=null: normalising removes"),
        (MaxRL(), {"train": {"kl_placement": "reward"}}, r"^train\.loss\.kl_placement=reward"),
        (PerTurn(), {"source": OnPolicy}, r"^train/advantage=per_turn: this task has no turns"),
        (PerToken(), {"source": Asynchronous}, r"^train/advantage=per_token: this source gives"),
    ],
)
def test_what_the_run_does_not_have_is_refused(component, changes, told):
    config = SimpleNamespace(
        **{"source": Source, "rollouts": {}, "task": {}}
        | changes
        | {"train": SimpleNamespace(loss=changes.get("train", {}))}
    )
    with pytest.raises(ConfigError, match=told):
        component.check(config, object(), [])


def test_what_a_record_does_not_have_is_refused(tmp_path):
    path = str(write_store(tmp_path))
    plain = SimpleNamespace(source=Replay, rollouts={}, task={}, train=SimpleNamespace(loss={}))
    groups = Replay.recorded(SimpleNamespace(rollouts={"path": path, "rescore": False}))
    for component, told in (
        (GDPO(None), r"^train/advantage=gdpo: .*, which has correct; use group_std"),
        (PassK(4), r"^train\.advantage\.k=4: must be from 2 to 3"),
        (PerTurn(), r"^train/advantage=per_turn: "),
        (PerToken(), r"^train/advantage=per_token: "),
        (Distill(teacher=None, weight=1.0, base=None), r"^train\.advantage\.teacher=null: 6 of 6 rollouts"),
        (Distill(teacher="x", weight=1.0, base=PassK(4)), r"^train\.advantage\.k=4: "),
    ):
        with pytest.raises(ConfigError, match=told):
            component.check(plain, object(), groups)
    PassK(3).check(plain, object(), groups)
    Distill(teacher="x", weight=1.0, base=None).check(plain, object(), groups)
    GDPO(None).check(plain, object(), Replay.recorded(SimpleNamespace(rollouts={"path": path, "rescore": True})))
    with pytest.raises(ConfigError, match="gdpo: adds up"):
        words = ("rollouts=replay", f"rollouts.path={path}", "train/advantage=gdpo")
        check_settings(make_plan(typed(compose_config(*words))))
