"""Dynamic sampling and the soft overlong penalty, on a client whose completions are a function of their seeds."""

import json
import random
from dataclasses import replace

import pytest
from run_folders import made_groups, write_groups

from offline_grpo.errors import ConfigError
from offline_grpo.rollouts.curriculum import problem_key
from offline_grpo.rollouts.on_policy import OnPolicy, overlong_penalty
from offline_grpo.train.advantage import GroupStd
from offline_grpo.types import Completion, FinishReason, Problem, SamplingParams, Score

PROBLEMS = [Problem(f"p{i}", ({"role": "user", "content": str(i)},), str(i)) for i in range(40)]


class Client:
    """Completions of one to eight tokens, by their seeds."""

    def generate(self, requests, sampling):
        for index, request in enumerate(requests):
            draws = (random.Random(request.seed + j) for j in range(request.num_completions))
            ids = [tuple(draw.choices(range(9), k=draw.randint(1, 8))) for draw in draws]
            yield index, [Completion(row, (0.0,) * len(row), FinishReason.STOP, (0,) * len(row)) for row in ids]


class Codec:
    def encode(self, messages, tools=()):
        return [1]

    def judged(self, token_ids, sampling):
        return "".join(map(str, token_ids))


class Rare:
    """Right if the first token is 0: most groups have no right answer."""

    def problems(self, split):
        return PROBLEMS

    def score(self, problem, text):
        return Score(float(text[0] == "0"), text[0] == "0", {"right": float(text[0] == "0")})


def source(rank=0, world_size=1, **settings):
    defaults = {"resample_zero_signal": True, "max_resamples": 3, "pass_rate": None, "pass_rate_from": None}
    defaults |= {"pass_rate_decay": 0.5}
    defaults |= {"soft_overlong_tokens": None, "penalize_length_if_solved": False}
    return OnPolicy(
        problems_per_iteration=8,
        group_size=4,
        shuffle=True,
        seed=5,
        client=Client(),
        task=settings.pop("task", Rare()),
        problems=settings.pop("problems", PROBLEMS),
        codec=Codec(),
        sampling=SamplingParams(8),
        advantage=GroupStd(),
        on_failure="exclude",
        rank=rank,
        world_size=world_size,
        **defaults | settings,
    )


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


# L_max = 10, L_cache = 4, by hand: (L_max - L_cache - length) / L_cache between 6 and 10
def test_the_soft_overlong_penalty_is_dapos():
    assert [overlong_penalty(length, 10, 4) for length in (1, 6, 7, 9, 10, 99)] == [0, 0, -0.25, -0.75, -1, -1]


def test_the_penalty_is_a_part_of_the_reward():
    plain = source(resample_zero_signal=False).next(0)
    for group, other in zip(plain, source(resample_zero_signal=False, soft_overlong_tokens=4).next(0), strict=True):
        for before, after in zip(group.rollouts, other.rollouts, strict=True):
            penalty = {5: -0.25, 6: -0.5, 7: -0.75, 8: -1.0}.get(before.num_sampled, 0.0)
            parts = {**before.score.parts, "overlong": penalty}
            expected = replace(before.score, reward=before.score.reward + penalty, parts=parts)
            assert after == replace(before, score=expected)


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
            penalty = {5: -0.25, 6: -0.5, 7: -0.75, 8: -1.0}.get(one.num_sampled, 0.0)
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


def test_problems_outside_the_band_are_passed_over_and_those_not_seen_are_kept(caplog):
    one, tally = graded(resample_zero_signal=False), {}
    one.start(0, None)
    for iteration in range(12):
        groups = one.next(iteration)
        one.sampled(iteration, groups)
        metrics = one.metrics()
        rates = [right / total for right, total in map(tally.get, numbers(groups)) if total] if iteration > 4 else []
        outside = sum(not BAND[0] <= rate <= BAND[1] for rate in rates)
        assert (outside, len(groups)) == (metrics["curriculum/num_outside"], 8)
        for group in groups:
            scores = [rollout.score for rollout in group.rollouts if rollout.score.is_scored]
            right, total = tally.get(int(group.problem.answer), (0, 0))
            tally[int(group.problem.answer)] = (right + sum(s.is_correct for s in scores), total + len(scores))
    assert sum(total > 4 for number, (_, total) in tally.items() if number < 20) <= 2
    assert sum(total > 8 for number, (_, total) in tally.items() if number >= 20) > 8
    narrow = graded(resample_zero_signal=False, pass_rate=[0.5, 0.5])
    groups = played(narrow, range(9))[-1]
    assert len(set(numbers(groups))) == 8
    assert narrow.metrics()["curriculum/num_outside"] > 0
    assert "data.pass_rate=[0.5, 0.5]: only" in caplog.text


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


@pytest.mark.parametrize(("decay", "num_outside"), [(0.5, 0), (0.8, 8)])
def test_a_problem_comes_again_when_less_than_one_completion_is_left_of_it(decay, num_outside):
    """Three iterations later, 0.5 ** 3 of four completions are 0.5, and 0.8 ** 3 are 2.05."""
    one = graded(problems=PROBLEMS[:24], resample_zero_signal=False, pass_rate_decay=decay, task=Sure())
    drawn = [{*numbers(groups)} for groups in played(one, range(4))]
    assert drawn[0] | drawn[1] | drawn[2] == set(range(24))
    assert one.metrics()["curriculum/num_outside"] == num_outside
    assert (drawn[3] == drawn[0]) == (num_outside == 0)


class Sure:
    def score(self, problem, text):
        return Score(float(int(problem.answer) < 10), int(problem.answer) < 10, {})


def test_a_record_says_which_problems_are_in_the_band(tmp_path, caplog):
    """There p0 and p1 are right in a third of the completions."""
    groups = [replace(group, problem=each) for group, each in zip(made_groups(0), PROBLEMS[:2], strict=True)]
    store = write_groups(tmp_path / "run", groups)
    one = graded(pass_rate_from=store, resample_zero_signal=False, pass_rate=[0.4, 1.0])
    one.start(0, None)
    drawn = [number for groups in played(one, range(10)) for number in numbers(groups)]
    assert not {0, 1} & {*drawn}
    assert drawn.count(10) > 1, "what this run gets right and wrong does not count"
    state = one.state_dict()
    one = graded(pass_rate_from=store, resample_zero_signal=False, pass_rate=[0.3, 0.4])
    one.start(10, state)
    assert {0, 1} <= {number for groups in played(one, range(10, 20)) for number in numbers(groups)}
    others = graded(pass_rate_from=store, problems=PROBLEMS[2:])
    with pytest.raises(ConfigError, match=r"data.pass_rate_from=.*run: has 0 of the 38 training problems.* 2 others"):
        others.start(0, None)
    with pytest.raises(ConfigError, match=r"data.pass_rate=\[0.4, 1.0\]: none of the 2 problems has a pass rate in it"):
        graded(pass_rate_from=store, pass_rate=[0.4, 1.0], problems=PROBLEMS[:2]).start(0, None)
