"""Rewards computed on all machines of a Ray cluster, with the results of this machine, whatever happens to one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import bad_rewards
import psutil
import pytest
import worlds
from dialogues import InProcess, isolated, problem_of, sampled
from engines import save_model
from factories import compose_config
from runs import CLUSTER_OF, assert_same, drawn, five, metrics_of, wait_until

from offline_grpo.config.compose import typed
from offline_grpo.config.parts import make_plan
from offline_grpo.engine.streaming import in_background
from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.generation.scoring import ClusterScorers, IsolatedTask
from offline_grpo.run import train
from offline_grpo.types import Rollout, Score

HOST = "offline_grpo.generation.scoring_worker"


def scored(task: IsolatedTask, kinds: Sequence[str]) -> list[Any]:
    scores = [judgement.scores()[0] for judgement in [bad_rewards.judge(task, kind) for kind in kinds]]
    return [score.failure.partition(":")[0] if score.failure else score.reward for score in scores]


def hosts() -> list[psutil.Process]:
    """The processes above those that score, of this process's cluster: other tests run at the same time."""
    found = [process for process in psutil.process_iter(["cmdline", "environ"]) if process.info["environ"]]
    ours = [process for process in found if process.info["environ"].get(CLUSTER_OF) == str(os.getpid())]
    return [process for process in ours if HOST in " ".join(process.info["cmdline"] or [])]


@pytest.mark.slow  # a cluster starts, loses a machine and gets another
def test_all_machines_score_also_when_one_is_lost_and_another_joins(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    before = {process.pid for process in hosts()}
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    import ray

    task = bad_rewards.on_cluster(cluster.address, "bad_rewards:where", timeout_s=100.0)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)], "Ray lets them be"
    try:
        assert len(set(scored(task, ["any"] * 24))) == 2
        under_way = [bad_rewards.judge(task, str(go)) for _ in range(12)]
        num_nodes = sum(node["Alive"] for node in ray.nodes())
        cluster.remove_node(cluster.machines.pop(), allow_graceful=False)
        wait_until(lambda: any("has gone" in line for line in caplog.messages))
        go.touch()  # not before: until then the lost machine might still answer
        assert len({each.scores()[0].reward for each in under_way}) == 1, "the other one answers all"
        assert sum("has gone" in line for line in caplog.messages) == 1
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == num_nodes - 1)
        cluster.machines.append(cluster.add_node(num_cpus=1))
        monkeypatch.setattr("offline_grpo.generation.scoring.LOOK_INTERVAL_S", 0.0)
        wait_until(lambda: len(set(scored(task, ["any"] * 24))) == 2)
        for process in hosts():
            if process.pid not in before:
                process.send_signal(signal.SIGKILL)
        with pytest.raises(ScoreError, match="the processes that score do not work"):
            scored(task, ["any"] * 8)
    finally:
        task.close()
    wait_until(lambda: {process.pid for process in hosts()} <= before, 20)


@pytest.mark.slow
def test_a_completion_that_costs_machines_does_not_cost_them_all(cluster: Any) -> None:
    """Here it kills what Ray runs on a machine, which then counts as lost."""
    task = bad_rewards.on_cluster(cluster.address, "bad_rewards:kills_ray_or_misbehaves")
    try:
        assert scored(task, ["any"]) == ["crashed"]
        assert scored(task, ["fine", "raises", "hangs"]) == [1.0, "raised", "timeout"]
    finally:
        task.close()


REWARD = ("task=dataset", "task.reward=bad_rewards:vowels")
GAME = ("task=environment", "task.environment=worlds:Talk", "task.max_environment_tokens=20")
GAME += ("generation.max_new_tokens=12", "task.max_turn_tokens=5")


@pytest.mark.slow  # a run of its own for each side
@pytest.mark.parametrize("task", [REWARD, GAME], ids=["reward", "episodes"])
def test_a_run_is_the_same_wherever_it_is_scored(task: tuple[str, ...], cluster: Any, tmp_path: Path) -> None:
    model, rows = save_model(tmp_path / "model"), tmp_path / "rows.jsonl"
    own = ({"prompt": f"{i} plus 1?", "answer": str(i + 1), "turns": 2} for i in range(40))
    rows.write_text("".join(json.dumps(row) + "\n" for row in own))
    words = [word for word in five(model) if not word.startswith("task.")]
    words += [*task, f"task.path={rows}", "data.num_train_seeds=null", "train.iterations=2", "scoring.workers=2"]
    train(compose_config(*words), tmp_path / "here")
    there = ("placement=ray", f"placement.address={cluster.address}", "placement.score_on_cluster=true")
    train(compose_config(*words, *there), tmp_path / "there")
    assert_same(metrics_of(tmp_path / "here"), metrics_of(tmp_path / "there"))
    assert drawn(tmp_path / "here") == drawn(tmp_path / "there")
    log = (tmp_path / "there" / "run.log").read_text()
    assert "scoring on 2 machines of the Ray cluster: " in log


def on_cluster(cluster: Any, make: Callable[[], Any], preload: tuple[str, ...] = (), **settings: Any) -> IsolatedTask:
    config = bad_rewards.scoring_config(
        **{"workers": 6, "episodes": 6, "timeout_s": 10.0, "memory_mib": 1024, **settings}
    )
    setup = bad_rewards.setup_of(make, config, preload=preload)
    return IsolatedTask(make(), ClusterScorers(cluster.address, {}, setup), config, 6)


@pytest.mark.slow
def test_episodes_are_the_same_on_a_cluster(cluster: Any) -> None:
    """Those of environments, also where they misbehave, and of agents, which ask this machine by its own address. What
    they have started ends with the run.
    """
    before = {process.pid for process in hosts()}
    for make, timeout_s, hows in (
        (partial(worlds.environment, "worlds:Bad"), 5.0, ("", "raise", "kill", "fork", "sleep")),
        (partial(worlds.agent, "worlds:chats", max_turns=2), 60.0, ("",) * 3),
    ):
        problems, found = [problem_of(make(), turns=2, how=how) for how in hows], []
        how_each: Any = {"timeout_s": timeout_s, "preload": ("worlds", "openai")}
        for task in (isolated(make, memory_mib=1024, **how_each), on_cluster(cluster, make, **how_each)):
            try:
                found.append(sampled(InProcess(), task, problems))
            finally:
                task.close()
        here, there = ([replace(each, score=told(each)) for own in sides for each in own] for sides in found)
        assert here == there
        assert {r.score.failure for r in here} == (
            {None, "raised", "crashed", "timeout"} if hows[0] != hows[1] else {None}
        )
    assert {process.pid for process in hosts()} <= before


def told(rollout: Rollout) -> Score:
    """Without the words of a failure, which name places in the code; nan is not equal to itself."""
    score = rollout.score
    failure = None if score.failure is None else score.failure.partition(":")[0]
    return replace(score, failure=failure, reward=score.reward if score.is_scored else 0.0)


@pytest.mark.slow  # a machine is lost, and another one comes
def test_a_lost_machine_costs_the_episodes_that_it_plays(cluster: Any, tmp_path: Path) -> None:
    go, places, before = tmp_path / "go", tmp_path / "places", {process.pid for process in hosts()}
    places.mkdir()
    task = on_cluster(cluster, partial(worlds.environment, "worlds:Waits"), timeout_s=60.0)
    try:
        problems = [problem_of(worlds.environment("worlds:Waits"), go=str(go), places=str(places))] * 3
        import ray

        num_nodes = sum(node["Alive"] for node in ray.nodes())
        playing = in_background(lambda: sampled(InProcess(), task, problems, group_size=2))
        wait_until(lambda: playing.done() or len(list(places.iterdir())) == 6)
        cluster.remove_node(cluster.machines.pop(), allow_graceful=False)
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == num_nodes - 1)
        go.touch()  # not before: until then the lost machine might still answer
        rollouts = [each for own in playing.result() for each in own]
        assert sorted(str(r.score.failure).partition(":")[0] for r in rollouts) == ["None"] * 3 + ["crashed"] * 3
        assert {each.score.reward for own in sampled(InProcess(), task, problems) for each in own} == {1.0}
        for process in hosts():
            if process.pid not in before:
                process.kill()
        sampled(InProcess(), task, problems)  # whose workers may just have died
        assert {each.score.reward for own in sampled(InProcess(), task, problems) for each in own} == {1.0}
    finally:
        task.close()
        cluster.machines.append(cluster.add_node(num_cpus=1))


@pytest.mark.slow
def test_a_killed_trainer_leaves_nothing_that_scores(cluster: Any) -> None:
    before = {process.pid for process in hosts()}
    program = (
        "import bad_rewards\n"
        f"task = bad_rewards.on_cluster({cluster.address!r}, 'bad_rewards:where')\n"
        "judgements = [bad_rewards.judge(task, 'any') for _ in range(24)]\n"
        "print([judgement.scores()[0] for judgement in judgements], flush=True)\n"
        "input()"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        assert {process.pid for process in hosts()} - before
        trainer.kill()
    wait_until(lambda: {process.pid for process in hosts()} <= before, 30)


def test_what_would_not_be_scored_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}?", "answer": "1"}}\n' for i in range(40)))
    words = ["placement=ray", "placement.score_on_cluster=true", "data.num_train_seeds=null", "scoring.workers=0"]
    with pytest.raises(ConfigError, match=r"^scoring.workers=0: placement.score"):
        make_plan(typed(compose_config(*words, "task=dataset", f"task.path={tmp_path / 'rows.jsonl'}")))
