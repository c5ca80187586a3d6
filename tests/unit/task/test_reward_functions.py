import http.server
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.generation.judging import Judgement
from offline_grpo.task.rewards import load_rewards
from offline_grpo.types import Problem, Score

MINE = """
import asyncio
def exact(completion, answer): return completion == answer
def may(completion, answer="none", **fields): return {answer: 1.0, "others": "answer" in fields}
def short(prompt, completion, level, **fields): return {"brief": len(completion) < 5, "level": level}
async def judge(completion, messages):
    await asyncio.sleep(0.01)
    return len(messages) * 0.5
def fails(completion): return 1 / 0
def nan(completion): return float("nan")
def parts(completion): return {"a": 0.1, "b": 0.7}
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


GROUP = """
def right(completion): return None if completion == "?" else float(completion == "4")
def rank(completions, answers, level):
    assert answers == ["4"] * len(completions) and level == [2] * len(completions)
    return [len(text) for text in completions]
async def judge(prompts, completions, **columns): return [None if text == "4" else 0.5 for text in completions]
def short(completions): return [1.0]
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module beside the working directory, with a name of its own for each test."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MINE)
    (tmp_path / f"group_{name}.py").write_text(GROUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def scored(setting, threshold=1.0):
    rewards = load_rewards(setting, threshold)
    rewards.check(PROBLEM)
    return rewards


def test_functions_are_weighted_and_added_up(mine):
    setting = [f"{mine}:exact", {"fn": f"{mine}:short", "weight": 0.5}, {"fn": f"{mine}:judge", "weight": 2}]
    score = Judgement(scored(setting, threshold=3.4), PROBLEM, ["4"]).scores()[0]
    assert score.parts == {"exact": 1.0, "short/brief": 0.5, "short/level": 1.0, "judge": 1.0}
    assert (score.reward, score.is_correct) == (3.5, True)
    assert not Judgement(scored(setting, threshold=3.6), PROBLEM, ["4"]).scores()[0].is_correct


def test_parts_that_miss_the_threshold_by_rounding_alone_are_correct(mine):
    assert scored(f"{mine}:parts", 0.8).score(PROBLEM, "").is_correct  # 0.1 + 0.7 is a little less
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
            r"ZeroDivisionError: division by zero \(mine_.*, line 9, in fails\); problem train-3, completion 'hm'",
        ),
        ("nan", r":nan returned nan; .*; problem train-3"),
    ],
)
def test_a_function_that_fails_is_named(mine, name, message):
    with pytest.raises(ScoreError, match=message) as error:
        Judgement(scored(f"{mine}:{name}"), PROBLEM, ["hm"]).scores()[0]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["task.reward", "task.group_reward"])
def test_rows_without_an_answer_are_no_empty_answers(mine, key):
    nothing = Problem("train-3", PROBLEM.messages, "", {"level": 2})
    module, name = (mine, "answer") if key == "task.reward" else (f"group_{mine}", "answers")
    rewards = load_rewards(f"{module}:exact" if key == "task.reward" else f"{module}:rank", 1.0, key)
    rewards.check(PROBLEM)
    with pytest.raises(ConfigError, match=rf"no value for its parameter '{name}' in problem train-3; .*answer=None"):
        rewards.check(nothing)
    optional = load_rewards(f"{mine}:may", 1.0)
    optional.check(nothing)
    assert optional.score(nothing, "").parts == {"may/none": 1.0, "may/others": 0.0}
    assert optional.score(PROBLEM, "").parts == {"may/4": 1.0, "may/others": 0.0}
    own = Problem("train-3", PROBLEM.messages, "", {"answer": "5"})  # task.answer_field=null, and such a column
    assert optional.score(own, "").parts == {"may/5": 1.0, "may/others": 0.0}


class Grouped:
    """A task with both kinds of rewards."""

    rewards_groups = True

    def __init__(self, own, of_group):
        self.score = load_rewards(own, 1.0).score
        self.score_group = load_rewards(of_group, 1.0, "task.group_reward").score_group


def test_rewards_of_the_group_are_added_and_what_does_not_apply_is_left_out(mine):
    module = f"group_{mine}"
    task = Grouped(f"{module}:right", [f"{module}:judge", {"fn": f"{module}:rank", "weight": 0.25}])
    texts = ["4", "?", "5"]
    found = Judgement(task, PROBLEM, texts).scores()
    assert [score.parts for score in found] == [
        {"right": 1.0, "rank": 0.25},
        {"judge": 0.5, "rank": 0.25},
        {"right": 0.0, "judge": 0.5, "rank": 0.25},
    ]
    assert [(score.reward, score.is_correct) for score in found] == [(1.25, True), (0.75, False), (0.75, False)]
    task = Grouped(f"{module}:right", f"{module}:judge")
    nothing = Judgement(task, PROBLEM, ["4", "?"]).scores()
    assert [score.reward for score in nothing] == [1.0, 0.5]
    with pytest.raises(
        ScoreError, match=r"task.group_reward=.*:short returned \[1.0\] for 3 completions; .*train-3, comp"
    ):
        Judgement(Grouped(f"{module}:right", f"{module}:short"), PROBLEM, texts).scores()


def test_a_completion_to_which_no_reward_applies_is_unscored(mine):
    rewards = load_rewards(f"group_{mine}:right", 1.0)
    assert rewards.score(PROBLEM, "?").failure == "none"
    both = load_rewards([f"group_{mine}:right", f"{mine}:judge"], 1.0)
    assert Judgement(both, PROBLEM, ["?"]).scores()[0].parts == {"judge": 0.5}


def test_the_judges_of_the_docs_ask_again_and_may_fail(tmp_path, monkeypatch):
    """At a server that is busy at first, and in the end for good."""
    asked = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):  # the name that the standard library calls
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            is_group = "[number]" in asked[-1]["messages"][0]["content"]
            reply = {"choices": [{"message": {"content": "[0] 3\n[1] 10" if is_group else " 7"}}]}
            body = json.dumps(reply).encode()
            self.send_response(200 if len(asked) in (2, 3) else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    readme, page = ((Path(__file__).parents[3] / name).read_text() for name in ("README.md", "docs/rewards.md"))
    code = readme.partition("# my_judge.py\n")[2].partition("```")[0].replace("(0, 1, 4)", "(0, 0.01)")
    code += page.rpartition("```python\n")[2].partition("```")[0]
    (tmp_path / "judges_of_the_docs.py").write_text(code.replace("127.0.0.1:9001", f"127.0.0.1:{server.server_port}"))
    monkeypatch.syspath_prepend(str(tmp_path))
    task = load_rewards("judges_of_the_docs:judge", 1.0)
    group = load_rewards("judges_of_the_docs:rank", 1.0, "task.group_reward").score_group
    try:
        assert Judgement(task, PROBLEM, ["4"]).scores()[0].reward == 0.7
        ranked = SimpleNamespace(score=lambda *_: Score.unscored(), score_group=group, rewards_groups=True)
        scores = Judgement(ranked, PROBLEM, ["3", "4", "5"]).scores()
        assert [score.failure or score.reward for score in scores] == [0.3, 1.0, "none"]
        with pytest.raises(ScoreError, match="503 Service Unavailable"):
            Judgement(task, PROBLEM, ["5"]).scores()[0]
    finally:
        server.shutdown()
        server.server_close()
    assert len(asked) == 5
    assert "2+2=" in asked[1]["messages"][0]["content"]
