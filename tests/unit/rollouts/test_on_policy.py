"""Dynamic sampling and the soft overlong penalty, on a client whose completions are a function of their seeds."""

import json
import random
from dataclasses import replace

import pytest
from dialogues import PROBLEMS, on_policy
from factories import make_rollout

from offline_grpo.rollouts.curriculum import problem_key
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.types import Completion, FinishReason, RolloutGroup, Score


class Client:
    """Completions of one to eight tokens, by their seeds."""

    def generate(self, requests, sampling):
        for index, request in enumerate(requests):
            draws = (random.Random(request.seed + j) for j in range(request.num_completions))
            ids = [tuple(draw.choices(range(9), k=draw.randint(1, 8))) for draw in draws]
            yield index, [Completion(row, (0.0,) * len(row), FinishReason.STOP, (0,) * len(row)) for row in ids]


class Rare:
    """Right if the first token is 0: most groups have no right answer."""

    def problems(self, split):
        return PROBLEMS

    def score(self, problem, text):
        return Score(float(text[0] == "0"), text[0] == "0", {"right": float(text[0] == "0")})


def source(rank=0, world_size=1, **settings):
    given = {"client": Client(), "task": Rare(), "resample_zero_signal": True, "rank": rank, "world_size": world_size}
    return OnPolicy(**on_policy(**given | settings))


def silent(groups):
    return [len({r.score.reward for r in group.rollouts}) == 1 for group in groups]


def test_groups_without_signal_are_replaced_and_counted():
    plain = source(resample_zero_signal=False).next(0)
    assert sum(silent(plain)) >= 3
    assert all(group.num_replaced == 0 for group in plain)
    once, thrice = source(max_resamples=1).next(0), source().next(0)
    assert sum(silent(plain)) > sum(silent(once)) > sum(silent(thrice)) or not any(silent(once))
    for before, after, was_silent in zip(plain, thrice, silent(plain), strict=True):
        assert (after.num_replaced > 0) == was_silent
        if not was_silent:
            assert after == before
    for first, group in zip(plain, once, strict=True):
        assert group.num_discarded_tokens == (sum(r.num_sampled for r in first.rollouts) if group.num_replaced else 0)
    for group, is_silent in zip(thrice, silent(thrice), strict=True):
        assert not is_silent or group.num_replaced == 3
    used = [group.problem.problem_id for group in [*plain, *(g for g in thrice if g.num_replaced)]]
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("iteration", [0, 3])
def test_it_depends_on_the_iteration_alone_and_not_on_the_number_of_processes(iteration):
    alone = source()
    alone.next(iteration + 1)
    assert alone.next(iteration) == source().next(iteration)
    shares = [source(rank, 3).next(iteration) for rank in range(3)]
    assert [shares[i % 3][i // 3] for i in range(8)] == alone.next(iteration)
    assert alone.state_dict() == {}


def test_the_same_problems_are_sampled_with_other_seeds_in_the_next_iteration():
    one = source(problems=PROBLEMS[:8], resample_zero_signal=False)
    first, second = ({g.problem.problem_id: [r.text for r in g.rollouts] for g in one.next(i)} for i in (0, 1))
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in first)


# L_max = 8, L_cache = 4, by hand: (L_max - L_cache - length) / L_cache between 4 and 8
PENALTIES = {5: -0.25, 6: -0.5, 7: -0.75, 8: -1.0}


def test_the_soft_overlong_penalty_is_dapos():
    plain = source(resample_zero_signal=False).next(0)
    for group, other in zip(plain, source(resample_zero_signal=False, soft_overlong_tokens=4).next(0), strict=True):
        for before, after in zip(group.rollouts, other.rollouts, strict=True):
            penalty = PENALTIES.get(before.num_sampled, 0.0)
            parts = {**before.score.parts, "overlong": penalty}
            expected = replace(before.score, reward=before.score.reward + penalty, parts=parts)
            assert after == replace(before, score=expected)


def test_each_sequence_of_an_episode_has_the_limit_for_itself():
    one = make_rollout([1], [3] * 7)
    fork = replace(one, is_sampled=(False, *[True] * 3, False, *[True] * 3), starts=(0, 4))
    found = source(soft_overlong_tokens=4)._with_penalties(RolloutGroup(None, (one, fork)), "overlong", 4)
    assert [rollout.score.reward for rollout in found.rollouts] == [-0.75, 0.0]


class Easy(Rare):
    """Right unless the first token is 0: some groups have right answers alone."""

    def score(self, problem, text):
        return Score(float(text[0] != "0"), text[0] != "0", {"right": float(text[0] != "0")})


def test_length_costs_where_all_answers_are_right():
    """As Atropos has it: of eight tokens, 4 and fewer cost nothing, and each more a quarter."""
    plain, penalized = (
        source(task=Easy(), resample_zero_signal=False, penalize_length_if_solved=on).next(0) for on in (False, True)
    )
    are_solved = [all(r.score.is_correct for r in group.rollouts) for group in plain]
    assert 0 < sum(are_solved) < len(plain)
    for before, after, is_solved in zip(plain, penalized, are_solved, strict=True):
        assert is_solved or after == before
        for one, other in zip(before.rollouts, after.rollouts, strict=True) if is_solved else ():
            penalty = PENALTIES.get(one.num_sampled, 0.0)
            assert other.score == replace(one.score, reward=1 + penalty, parts={"right": 1.0, "length": penalty})


class Graded:
    """Problems 0 to 9 are always right, 10 to 19 never, the others now and then; a few scores fail."""

    def score(self, problem, text):
        number = int(problem.answer)
        if text[0] == "8":
            return Score.unscored("raised")
        is_right = number < 10 or (number >= 20 and int(text[0]) % 2 == 0)
        return Score(float(is_right), is_right, {})


BAND = [0.2, 0.8]


def graded(rank=0, world_size=1, **settings):
    return source(rank, world_size, **{"task": Graded(), "pass_rate": BAND, "pass_rate_decay": 1.0} | settings)


def played(one, iterations):
    """What is drawn, as the loop does it."""
    drawn = []
    for iteration in iterations:
        drawn.append(one.next(iteration))
        one.sampled(iteration, drawn[-1])
    return drawn


def numbers(groups):
    return [int(group.problem.answer) for group in groups]


@pytest.mark.parametrize("resample", [False, True])
def test_a_curriculum_goes_on_as_if_the_run_had_not_stopped_in_any_number_of_processes(resample):
    settings = {"resample_zero_signal": resample, "pass_rate_decay": 0.9}
    whole = graded(**settings)
    expected = played(whole, range(10))
    stopped, again = graded(**settings), graded(**settings)
    played(stopped, range(6))
    again.start(6, json.loads(json.dumps(stopped.state_dict())))
    drawn = played(again, range(6, 10))
    assert list(map(str, drawn)) == list(map(str, expected[6:]))  # a reward that is not a number equals none
    assert again.state_dict() == whole.state_dict()
    ranks = [graded(rank, 3, **settings) for rank in range(3)]
    for iteration in range(10):
        shares = [one.next(iteration) for one in ranks]
        groups = [shares[i % 3][i // 3] for i in range(8)]
        assert str(groups) == str(expected[iteration])
        for one in ranks:
            one.sampled(iteration, groups)


def test_dynamic_sampling_draws_from_the_band_and_what_it_replaced_is_known():
    one = graded()
    [first] = played(one, [0])
    replaced = [name for group in first for name, _, _ in group.discarded]
    assert replaced
    seen = one.state_dict()["curriculum"]["seen"]
    assert {*replaced} <= seen.keys()
    later = [number for groups in played(one, range(1, 8)) for number in numbers(groups)]
    known = {int(each.answer): seen.get(problem_key(each), (1, 2, 0)) for each in PROBLEMS}
    silent_ones = {number for number, (right, total, _) in known.items() if total and right in (0, total)}
    assert silent_ones
    assert not silent_ones & {*later[:16]}
