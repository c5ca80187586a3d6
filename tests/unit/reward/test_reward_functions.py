import pytest

from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.generation.judging import Judgement
from offline_grpo.reward.functions import load_rewards
from offline_grpo.types import Problem

MINE = """
import asyncio
def exact(completion, answer): return completion == answer
def short(prompt, completion, level, **fields): return {"brief": len(completion) < 5, "level": level}
async def judge(completion, messages):
    await asyncio.sleep(0.01)
    return len(messages) * 0.5
def fails(completion): return 1 / 0
def nan(completion): return float("nan")
def trl(completions): return [0.0]
def parts(completion): return {"a": 0.7, "b": 0.2, "c": 0.1}
def most(completion): return 0.999999
def grows(seen, messages):
    seen["texts"].append("more")
    messages[0]["content"] += "?"
    return len(seen["texts"]) + len(messages[0]["content"])
def grows_too(**fields):
    fields["seen"]["texts"].append("more")
    return len(fields["seen"]["texts"])
"""
PROBLEM = Problem("train-3", ({"role": "user", "content": "2+2="},), "4", {"level": 2})


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module beside the working directory, with a name of its own for each test."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MINE)
    (tmp_path / "ends_the_program.py").write_text("def f(completion): return 1\nraise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def scored(setting, threshold=1.0):
    rewards = load_rewards(setting, threshold)
    rewards.check(PROBLEM)
    return rewards


def test_functions_are_weighted_and_added_up(mine):
    setting = [f"{mine}:exact", {"fn": f"{mine}:short", "weight": 0.5}, {"fn": f"{mine}:judge", "weight": 2}]
    score = Judgement(scored(setting, threshold=3.4), PROBLEM, "4").result()
    assert score.parts == {"exact": 1.0, "short/brief": 0.5, "short/level": 1.0, "judge": 1.0}
    assert (score.reward, score.is_correct) == (3.5, True)
    assert not Judgement(scored(setting, threshold=3.6), PROBLEM, "4").result().is_correct


def test_parts_that_miss_the_threshold_by_rounding_alone_are_correct(mine):
    assert scored(f"{mine}:parts", 1.0).score(PROBLEM, "").is_correct  # 0.7 + 0.2 + 0.1
    assert not scored(f"{mine}:most", 1.0).score(PROBLEM, "").is_correct


def test_a_function_that_changes_what_it_gets_changes_it_for_no_other_call(mine):
    problem = Problem("train-3", ({"role": "user", "content": "2+2="},), "4", {"seen": {"texts": []}})
    rewards = load_rewards([f"{mine}:grows", f"{mine}:grows_too"], 1.0)
    assert [rewards.score(problem, "").parts for _ in range(2)] == [{"grows": 6.0, "grows_too": 1.0}] * 2
    assert (problem.fields, problem.messages[0]["content"]) == ({"seen": {"texts": []}}, "2+2=")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fails",
            r"ZeroDivisionError: division by zero \(mine_.*, line 8, in fails\); problem train-3, completion 'hm'",
        ),
        ("nan", r":nan returned nan; .*; problem train-3"),
    ],
)
def test_a_function_that_fails_is_named(mine, name, message):
    with pytest.raises(ScoreError, match=message) as error:
        Judgement(scored(f"{mine}:{name}"), PROBLEM, "hm").result()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("@:trl", r"there is no value for its parameter 'completions' in problem train-3; .* prompt, completion"),
        ("nowhere_at_all:f", r"cannot be imported \(ModuleNotFoundError: .*\); nowhere_at_all was looked for in"),
        ("ends_the_program:f", r"cannot be imported \(SystemExit \(ends_the_program.py, line 2, in <module>\)\)"),
        (["@:exact", "@:exact"], r"two functions have the same name"),
        ([{"fn": "@:exact", "weight": "much"}], r"write my_module:my_function, or \{fn:"),
    ],
)
def test_what_cannot_be_called_is_refused(mine, setting, message):
    def named(item):
        return {**item, "fn": named(item["fn"])} if isinstance(item, dict) else item.replace("@", mine)

    with pytest.raises(ConfigError, match=message):
        scored([named(item) for item in setting] if isinstance(setting, list) else named(setting))
