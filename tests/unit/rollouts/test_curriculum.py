"""Which problems a curriculum takes, against a simulation that looks at all of them; and pass rates on record."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_rollout
from run_folders import write_groups

from offline_grpo.errors import ConfigError
from offline_grpo.rollouts.curriculum import Curriculum, problem_key, recorded
from offline_grpo.rollouts.on_policy import permutation
from offline_grpo.types import Problem, RolloutGroup, Rules, Score, Turn


def problem(number: int, problem_id: str = "", **fields: object) -> Problem:
    message = {"role": "user", "content": f"What is {number}?"}
    return Problem(problem_id or f"train-{number}", (message,), str(number), fields)


def curriculum(problems: list[Problem], *, seed: int | None = None, **settings: object) -> Curriculum:
    """In the order of the problems, or with a seed in another order in each pass."""

    def index_at(position: int) -> int:
        epoch, offset = divmod(position, len(problems))
        return offset if seed is None else permutation(len(problems), seed + epoch)[offset]

    defaults = {"count": 4, "band": [0.0, 1.0], "decay": 1.0, "store": None}
    return Curriculum(problems=problems, index_at=index_at, **defaults | settings)  # type: ignore[arg-type]


def group(of: Problem, num_right: int, total: int, turns: tuple[Turn, ...] = ()) -> RolloutGroup:
    scores = [Score(float(is_right), is_right, {}) for is_right in (i < num_right for i in range(total))]
    return RolloutGroup(of, tuple(replace(make_rollout([4], [3]), score=score, turns=turns) for score in scores))


def test_an_iteration_has_no_problem_twice_and_none_outside_the_band_while_enough_are_inside() -> None:
    rng, num_crossed, num_short = random.Random(0), 0, 0
    for trial in range(120):
        problems = [problem(i) for i in range(rng.randint(1, 30))]
        count, decay = rng.randint(1, 12), rng.choice([1.0, 0.9, 0.5])
        band = sorted(rng.choices([0.0, 0.25, 0.5, 0.75, 1.0], k=2))
        settings = {"seed": rng.choice([None, trial]), "count": count, "band": band, "decay": decay}
        skill = [rng.choice([0.0, 0.25, 0.5, 0.75, 1.0]) for _ in problems]
        seen: list[list[tuple[int, int]]] = [[] for _ in problems]  # of each problem, when and how many of 4 were right
        one = curriculum(problems, **settings)
        one.start(0, None)
        for iteration in range(10):
            inside = set()
            for index, own in enumerate(seen):
                right, total = (sum(decay ** (iteration - at) * of(n) for at, n in own) for of in (int, lambda _: 4))
                if total < 1 or band[0] - 1e-9 <= right / total <= band[1] + 1e-9:
                    inside.add(index)
            if iteration == 5:  # a resumed run
                one, state = curriculum(problems, **settings), json.loads(json.dumps(one.state_dict()))
                one.start(iteration, state)
            chosen = one.choose(iteration)
            assert len(chosen) == count
            assert len({*chosen}) == min(count, len(problems))
            assert len(inside & {*chosen}) == min(count, len(inside))
            num_short += len(inside) < count
            num_crossed += iteration * count // len(problems) != (iteration + 1) * count // len(problems)
            outcomes = {index: sum(rng.random() < skill[index] for _ in range(4)) for index in {*chosen}}
            one.sampled(iteration, [group(problems[index], right, 4) for index, right in outcomes.items()])
            for index, right in outcomes.items():
                seen[index].append((iteration, right))
    assert min(num_crossed, num_short) > 200


def test_a_problem_has_its_own_pass_rate_wherever_its_row_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = write_groups(tmp_path, [group(problem(i, f"train-{i}", level=i), int(i < 5) * 2, 2) for i in range(10)])
    rows = [problem(i, f"train-{place}", level="another") for place, i in enumerate((9, 3, 12, 0, 7, 4))]
    one = curriculum(rows, store=store, band=[0.5, 1.0], count=6)
    caplog.set_level("INFO")
    one.start(0, None)
    assert [one.keeps(index, 0) for index in range(6)] == [False, True, True, True, False, True]
    assert "leaves 4, with those not on record, which has 5 of the 6 training problems, by prompt and" in caplog.text
    other_answer = [replace(each, answer="?") for each in rows[:4]]
    curriculum([*rows[3:], *other_answer[:3]], store=store).start(0, None)
    with pytest.raises(ConfigError, match=r"^data\.pass_rate_from=.*: has 2 of the 5 training problems, by .*8 others"):
        curriculum([*rows[:2], *other_answer[:3]], store=store).start(0, None)
    with pytest.raises(ConfigError, match=r"^data\.pass_rate=\[0\.3, 0\.4\]: none of the 4 problems"):
        curriculum(rows[:2] + rows[3:5], store=store, band=[0.3, 0.4]).start(0, None)
    one.choose(0)
    one.sampled(0, [group(rows[1], 0, 4)])
    assert one.keeps(1, 1), "what this run gets wrong does not count"


def test_episodes_are_known_by_their_rows(tmp_path: Path) -> None:
    """Which an environment makes its question of; the prompts are equal."""
    rules = Rules(max_turns=2, max_turn_tokens=None, max_environment_tokens=9, timeout_s=1.0)
    asked = ({"role": "user", "content": "Play."},)
    episodes = [Problem(f"train-{i}", asked, "", {"level": i, "name": "é"}, rules) for i in range(4)]
    store = write_groups(tmp_path, [group(each, i, 4, (Turn(1, 2),)) for i, each in enumerate(episodes)])
    found = recorded(store)
    assert [found[problem_key(each)] for each in episodes] == [(i, 4, 0) for i in range(4)]
