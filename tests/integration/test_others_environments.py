"""Environments that others wrote: packages in a class of a few lines, verifiers, and servers of OpenEnv."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from dialogues import Scripted, codec_of, model_of
from runs import SMALL, metrics_of, printed, run_in_child
from websockets.sync.client import connect
from worlds import environment

from offline_grpo.engine.http import choose_port
from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.generation.sample import sample_in_order
from offline_grpo.rollouts.rows import group_rows, groups_of
from offline_grpo.task.openenv import OpenEnv
from offline_grpo.task.rows import Row
from offline_grpo.types import Problem, Rollout, SamplingParams, Split

FAKES = Path(__file__).parents[1] / "fakes"
CODEC = codec_of("qwen3")
LIMITS: dict[str, Any] = {
    "max_turns": 8,
    "max_turn_tokens": None,
    "max_environment_tokens": 5000,
    "episode_timeout_s": 60.0,
    "correct_threshold": 0.6,
}

pytestmark = pytest.mark.slow


def said(text: str) -> list[int]:
    return [*CODEC.tokenizer.encode(text, add_special_tokens=False), CODEC.end_ids[0]]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(task: Any, problem: Problem, *replies: str) -> Rollout:
    """One episode in which the policy says this, token for token."""
    draws, sampling = [(problem, 0)], SamplingParams(max_new_tokens=1000)
    [group] = sample_in_order(Scripted([said(each) for each in replies]), task, CODEC, draws, sampling, group_size=1)
    [rollout] = group.rollouts
    turns = [list(rollout.token_ids[turn.start : turn.end]) for turn in rollout.turns]
    assert turns == [said(each) for each in replies[: len(turns)]]
    assert sum(rollout.is_sampled) == sum(map(len, turns))
    return rollout


def row(task: Any, **fields: Any) -> Problem:
    return task.problem_of("train-0", Row("row 1", 0, fields))


@pytest.mark.parametrize(
    ("game", "seed", "replies", "reward"),
    [
        ("GuessTheNumber-v0", 3, ["[10]", "[5]", "[7]", "[6]", "[8]"], 1),
        ("FrozenLake-v0", 5, ["right it is", "[right]", "[down]"], 1 / 3),
        ("TowerOfHanoi-v0", 0, ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"], 1),
    ],
)
def test_games_of_textarena_pay_their_own_rewards(game: str, seed: int, replies: list[str], reward: float) -> None:
    task = environment("gyms:TextArena", max_environment_tokens=5000, max_result_chars=5000)
    rollout = played(task, row(task, game=game, seed=seed), *replies)
    assert (rollout.score.reward, len(rollout.turns)) == (reward, len(replies))


def test_the_environments_of_aviary_and_skyrl_do() -> None:
    task = environment("gyms:Aviary", max_environment_tokens=5000)
    calls = call("cast_float", x="3"), call("cast_float", x="three"), call("print_story", story="The end of it all.")
    rollout = played(task, row(task), *calls, "never said")
    assert (rollout.score.reward, len(rollout.turns), rollout.score.measured["calls"]) == (1, 3, 3)
    assert "3.0" in rollout.text
    task = environment("gyms:SkyRL", max_environment_tokens=5000)
    assert [played(task, row(task, answer="7"), text).score.reward for text in ("#### 7", "#### 8")] == [1, 0]


def verifiers(taskset: dict[str, Any], **env: Any) -> Any:
    from offline_grpo.task.verifiers import Verifiers  # which takes seconds

    own = {"eval_verifiers": {"seed": 1}, "eval_frac": 0.1, "env": env, "max_tasks": 20}
    return Verifiers(verifiers=taskset, **own, **LIMITS)


def test_a_taskset_of_verifiers_with_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKES))  # for the server of the tool
    task = verifiers({"id": "sums-taskset", "task": {"has_tool": True}})
    problem = task.problems(Split.TRAIN)[3]
    assert problem.messages == ({"role": "user", "content": "12+9="},)
    assert [len(task.problems(split)) for split in Split] == [20, 20]
    rollout = played(task, problem, call("calculator_add", x=12, y=9), call("add", x=1, y=1), "It is 21")
    assert "[tool] 21\n" in rollout.text
    assert "[tool] Tool add not found." in rollout.text
    assert (rollout.score.parts, rollout.score.is_correct) == ({"right": 0.5, "short": 1 / 9}, True)
    assert rollout.score.measured["replies"] == rollout.score.measured["turns"] == 3


def test_a_taskset_runs_programs_in_the_runtime_that_is_asked_for() -> None:
    """In a process of this machine; and in Docker, which here has no daemon, so that the episode says so."""
    taskset = {"id": "sums-taskset", "task": {"runs": True}}
    task = verifiers(taskset)
    assert played(task, task.problems(Split.TRAIN)[3], "It is 21").score.measured["ran"] == 21
    in_docker = verifiers(taskset, agent={"runtime": {"type": "docker"}})
    with pytest.raises(ScoreError, match=r"(?i)docker"):
        played(in_docker, in_docker.problems(Split.TRAIN)[3], "It is 21")


def test_a_taskset_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.verifiers=.*no-such.*cannot be loaded: taskset 'no-such' not found"):
        verifiers({"id": "no-such"})


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The URLs of two, in an environment of their own: openenv wants another mcp than verifiers."""
    folder = tmp_path_factory.mktemp("openenv")
    python = folder / "env" / "bin" / "python"
    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(folder / "env")], check=True)
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), "openenv==0.10.0"], check=True)
    command = [str(python), str(FAKES / "openenv_servers.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield [f"http://127.0.0.1:{port}" for port in process.stdout.readline().split()]
        process.kill()


def openenv(url: str, text_field: str | None = None, **reset: Any) -> OpenEnv:
    settings = {"url": url, "text_field": text_field, "reset": reset}
    own: dict[str, Any] = {"prompt": "Go. ", "system_prompt": None, "num_train": 9, "num_eval": 3}
    return OpenEnv(openenv=settings, max_result_chars=1000, **own, **LIMITS)


def test_tools_of_an_mcp_environment(servers: list[str]) -> None:
    """The sum of its steps' rewards; done after two calls, of which one may be a mistake."""
    task = openenv(servers[0])
    problem = task.problems(Split.TRAIN)[5]
    assert [tool["function"]["name"] for tool in task.tools] == ["echo_message"]
    rollout = played(
        task, problem, call("echo_message", message="four"), call("echo_message", message="of it"), "never"
    )
    assert rollout.score.parts == {"episode": 0, "turns": pytest.approx(0.4 + 0.5)}
    assert [turn.reward for turn in rollout.turns] == [0.4, 0.5]
    assert rollout.conversation[0]["content"] == "Go. Ready, 5."
    assert rollout.conversation[2]["content"] == "four"
    rollout = played(task, problem, call("echo_message", text="a"), call("nothing"), "never")
    assert (rollout.score.reward, rollout.score.measured["tool_errors"]) == (0, 2)
    assert "Unknown tool" in rollout.text or "validation error" in rollout.text
    assert played(task, problem, "no call").score.reward == 0


def test_actions_of_another_environment(servers: list[str]) -> None:
    """As calls, and as texts; what its step raises is an answer."""
    number = 4  # random.Random(3).randint(1, 9)
    task = openenv(servers[1])
    problem = task.problems(Split.TRAIN)[3]
    rollout = played(task, problem, call("take_action", number="9"), call("take_action", number=str(number)), "never")
    assert [round(turn.reward, 3) for turn in rollout.turns] == [-0.1, 0.9]
    assert "lower" in rollout.text
    task = openenv(servers[1], "number", most=20)
    rollout = played(task, task.problems(Split.EVAL)[0], "what?", "1", "2", "never")
    assert len(rollout.turns) == 3
    assert "[user] invalid literal for int() with base 10: 'what?'" in rollout.text
    assert rollout.conversation[0]["content"] == "Go. A number from 1 to 20?"
    assert task.problems(Split.EVAL)[0].fields == {"most": 20, "seed": 1_000_000}
    with pytest.raises(ConfigError, match=r"task\.openenv\.text_field=text: an action has number"):
        openenv(servers[1], "text").problems(Split.TRAIN)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random one whose replies end often, without a bias, which Llama's file format has not."""
    folder = tmp_path_factory.mktemp("model")
    model = model_of(CODEC, context=8192)
    with torch.no_grad():
        model.lm_head.bias = None
        model.model.embed_tokens.weight[:, 0] = 6.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[list(CODEC.end_ids), 0] = 1.2
    model.save_pretrained(folder)
    CODEC.tokenizer.save_pretrained(folder)
    return folder


def test_all_of_them_in_one_run_that_reaches_no_other_machine(servers: list[str], model: Path, tmp_path: Path) -> None:
    """Beside a server with two sessions."""
    games = ("GuessTheNumber-v0", "FrozenLake-v0", "TowerOfHanoi-v0")
    rows = [{"prompt": "Play. ", "game": game, "seed": seed} for game in games for seed in range(8)]
    tasks = {"TextArena": rows, "Aviary": [{"n": n} for n in range(9)], "SkyRL": [{"answer": n} for n in "123456789"]}
    settings = {"verifiers.verifiers.id": "sums-taskset"}
    settings |= {"openenv.openenv.url": servers[1], "openenv.openenv.text_field": "number", "openenv.prompt": "Go. "}
    for name, own in tasks.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in own))
        settings |= {f"{name}.environment": f"gyms:{name}", f"{name}.path": tmp_path / f"{name}.jsonl"}
    kinds = dict.fromkeys(tasks, "environment") | {"verifiers": "verifiers", "openenv": "openenv"}
    for name in kinds:
        settings |= {f"{name}.max_environment_tokens": 4000, f"{name}.max_turn_tokens": 20}
    words = [each for each in SMALL if not each.startswith(("model.", "task."))]
    words += ["task=mixture", *(f"+task@task.tasks.{name}={kind}" for name, kind in kinds.items())]
    words += [f"task.tasks.{key}={value}" for key, value in settings.items()]
    words += [f"model.train_id={model}", "model.device=cpu", "checkpoint.enabled=false", "eval.enabled=false"]
    words += ["train.iterations=3", "data.num_train_seeds=null", "generation.max_new_tokens=60", "scoring.workers=2"]
    words += ["scoring.episodes=2", "data.problems_per_iteration=10", "data.rollouts_per_problem=2"]
    words += ["data.shuffle=false"]  # two problems of each task
    run = tmp_path / "run"
    assert run_in_child(run, *words) == 0, printed(run)
    for metrics in (metrics_of(run)[f"train_iter_00{i}.json"] for i in range(3)):
        assert metrics.get("scoring/num_failed", 0) == 0, printed(run)
        assert abs(metrics["mismatch/kl_k1"]) < 1e-5  # every trained token is one that was drawn
        assert metrics["num_updates"] > 0

    table = pq.read_table(run / "rollouts" / "iter_000.parquet")
    found: dict[str, list[tuple[Problem, Rollout]]] = {name: [] for name in kinds}
    for group in groups_of(table, group_rows(table).values(), {}.__getitem__):
        assert group.problem is not None
        found[group.problem.task] += [(group.problem, rollout) for rollout in group.rollouts]
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys(kinds, 4)
    for names in (tasks, ["openenv"]):
        assert max(len(rollout.turns) for name in names for _, rollout in found[name]) > 1
    for problem, rollout in found["verifiers"]:
        reply, data = rollout.conversation[-1]["content"], problem.fields["data"]
        right = 0.5 * (str(data["a"] + data["b"]) in reply)
        assert rollout.score.parts == {"right": right, "short": pytest.approx(1 / (1 + len(reply.strip())))}
        assert rollout.score.measured["replies"] == 1
        assert sum(rollout.is_sampled) == rollout.turns[0].end - rollout.turns[0].start
    for _, rollout in found["openenv"]:
        assert rollout.score.reward >= -0.1 * len(rollout.turns)


def test_a_server_without_room_or_that_is_gone(servers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offline_grpo.task.openenv.ROOM_S", 0.3)
    url, gone = servers[1], f"http://127.0.0.1:{choose_port('127.0.0.1', None, key='-')}"
    task = openenv(url, "number")
    problem = task.problems(Split.TRAIN)[3]
    place = f"{url.replace('http', 'ws')}/ws"
    with connect(place), connect(place), pytest.raises(ScoreError, match=r"no room.*2/2.*set scoring\.episodes"):
        played(task, problem, "1")
    with pytest.raises(ScoreError, match="the OpenEnv server does not answer"):
        played(openenv(gone, "number"), problem, "1")
    with pytest.raises(ConfigError, match=r"task\.openenv\.url=.*is no OpenEnv server that answers"):
        openenv(gone).problems(Split.TRAIN)
