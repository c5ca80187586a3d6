"""Dynamic sampling and the soft overlong penalty, on a client whose completions are a function of their seeds."""

import random
from dataclasses import replace

import pytest

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
    def encode(self, messages):
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
    defaults = {"resample_zero_signal": True, "max_resamples": 3}
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
