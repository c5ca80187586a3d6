"""`rollouts=atropos` with the real Atropos API (`run-api`) in a child process."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from atropos_parts import RunApi, as_json, group, make_source, pair
from factories import compose_config
from runs import SMALL, metrics_of, printed, run_in_children, wait_until
from safetensors.torch import load_file

from offline_grpo.engine.streaming import in_background
from offline_grpo.errors import ConfigError
from offline_grpo.rollouts import atropos
from offline_grpo.rollouts.atropos import Atropos
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.run import train
from offline_grpo.types import RolloutGroup


@pytest.fixture(scope="module")
def shared_api() -> Iterator[RunApi]:
    with RunApi() as api:
        yield api


@pytest.fixture
def api(shared_api: RunApi) -> RunApi:
    """Without a trainer, environments or groups."""
    shared_api.get("/reset_data")
    return shared_api


def started(api: RunApi, **settings: Any) -> Atropos:
    source = make_source(api.url, **settings)
    source.start(0, None)
    return source


def after(seconds: float, *actions: Callable[[], object]) -> threading.Thread:
    def act() -> None:
        for action in actions:
            time.sleep(seconds)
            action()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def texts(groups: Any) -> list[str]:
    """Of the second sequence of each pair, which has its number."""
    return [str(group.rollouts[1].text) for group in groups]


def test_batches_that_were_formed_at_once_are_trained_oldest_first(api: RunApi) -> None:
    source = started(api)
    api.send(*(pair(number) for number in range(6)))
    assert [texts(source.next(i)) for i in range(2)] == [["8 0 2", "8 1 2"], ["8 2 2", "8 3 2"]]
    api.send(*(pair(number) for number in range(6, 10)))  # the third was taken before these came
    assert [texts(source.next(i)) for i in range(3)] == [["8 4 2", "8 5 2"], ["8 6 2", "8 7 2"], ["8 8 2", "8 9 2"]]


def test_a_second_trainer_is_refused(api: RunApi) -> None:
    first = started(api)
    name = first.state_dict()["registration"]
    with pytest.raises(ConfigError, match=rf"^rollouts.url={api.url}: another trainer owns this API .*{name}"):
        started(api)
    make_source(api.url).start(3, first.state_dict())  # the run that goes on from a checkpoint of the first
    with pytest.raises(ConfigError, match=r"another trainer owns .*batch_size=4.* this run is .*batch_size=8"):
        make_source(api.url, problems_per_iteration=4).start(3, first.state_dict())

    second = started(api, take_over=True)
    assert api.get("/wandb_info")["group"] == second.state_dict()["registration"] != name
    api.send(pair(1), pair(2))
    with pytest.raises(ConfigError, match="another trainer owns this API"):
        first.next(0)


def test_a_reset_or_a_restart_in_the_middle(caplog: pytest.LogCaptureFixture) -> None:
    with RunApi() as api:
        source = started(api)
        name = source.state_dict()["registration"]

        def environment(first: int) -> None:
            api.send(pair(first))  # before the trainer has come back, perhaps: it is lost then
            wait_until(lambda: api.get("/wandb_info")["group"] == name, 60)
            api.send(pair(first + 1), pair(first + 2))

        after(0.2, lambda: api.get("/reset_data"), lambda: environment(0))
        assert texts(source.next(0))[-1] in ("8 1 2", "8 2 2")
        assert "it was started anew or reset; registering again" in caplog.text
        after(0.1, api.kill, api.start, lambda: environment(3))
        assert texts(source.next(1))[-1] in ("8 4 2", "8 5 2")
        assert "Waiting for it for up to 60 s" in caplog.text


def test_a_reset_that_a_group_follows_before_the_next_poll(
    api: RunApi, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API answers then as if a batch would come."""
    monkeypatch.setattr(atropos, "HEALTH_INTERVAL_S", 0.1)
    source = started(api)
    name = source.state_dict()["registration"]
    api.get("/reset_data")
    api.send(pair(0))
    batch = in_background(lambda: source.next(0))
    wait_until(lambda: api.get("/wandb_info")["group"] == name, 60)
    api.send(pair(1), pair(2))
    assert texts(batch.result(20)) == ["8 1 2", "8 2 2"]
    assert "it was started anew or reset; registering again" in caplog.text


def test_a_batch_that_the_api_lost(api: RunApi, caplog: pytest.LogCaptureFixture) -> None:
    """It answers with status 500 where a group has a NaN in it."""
    source = started(api)
    api.send_bytes(b'{"tokens":[[1,2],[1,3]],"masks":[[-100,2],[-100,3]],"scores":[NaN,1]}')
    api.send(pair(1), pair(2), pair(3))
    assert texts(source.next(0)) == ["8 2 2", "8 3 2"]
    assert source.metrics()["rollouts/num_lost_batches"] == 1
    assert "lost a batch, and go on" in caplog.text
    assert "/batch: status 500" in caplog.text


def test_a_group_of_which_no_batch_can_be_made_is_explained(api: RunApi, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STUCK_S", "HEALTH_INTERVAL_S"):
        monkeypatch.setattr(atropos, name, 0.1)
    source = started(api)
    env_id = api.register_environment(8)
    api.send(*(group(*[([1], [2])] * 8, env_id=env_id) for _ in range(4)))
    with pytest.raises(ConfigError, match=r"has a group of 8 sequences, and no batch of 4 .* can be made"):
        source.next(0)


def test_a_batch_is_filled_up_where_groups_are_dropped(api: RunApi, caplog: pytest.LogCaptureFixture) -> None:
    source = started(api)
    long, foreign = group(([5] * 31, [6, 7]), ([5], [6])), group(([5], [31]), ([5], [6]))
    api.send(pair(1, scores=[0.0]), pair(2, env_id=3), pair(3), long, foreign, pair(4))
    assert texts(source.next(0)) == ["8 2 2", "8 3 2"]
    assert source.metrics()["rollouts/num_dropped_malformed"] == 1
    api.send(pair(5), pair(6))
    assert texts(source.next(1)) == ["8 4 2", "8 5 2"]
    dropped = {name: value for name, value in source.metrics().items() if name.startswith("rollouts/") and value}
    assert dropped == {"rollouts/num_dropped_vocabulary": 1}, "the long one was dropped for the first iteration"
    assert caplog.text.count("dropped a group") == 3


@dataclass(frozen=True)
class Recorded:
    """A run of `rollouts=on_policy`: its overrides, its folder, and the groups of each iteration."""

    overrides: list[str]
    folder: Path
    groups: list[list[RolloutGroup]]

    def send(self, api: RunApi) -> None:
        """Post all groups once the trainer is there."""

        def environment() -> None:
            wait_until(lambda: api.get("/info")["batch_size"] == 16)
            api.send(*(as_json(group) for groups in self.groups for group in groups))

        after(0.05, environment)

    def from_environments(self, api: RunApi) -> list[str]:
        return [*self.overrides, "rollouts=atropos", f"rollouts.url={api.url}", "rollouts.max_token_len=64"]


@pytest.fixture(scope="module")
def recorded(cache: str, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    groups: list[list[RolloutGroup]] = []
    sample = OnPolicy.next
    overrides = [*SMALL, cache, "eval.enabled=false", "train.lr=0.0001"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnPolicy, "next", lambda self, i: groups.append(sample(self, i)) or groups[-1])
        train(compose_config(*overrides), folder / "on_policy")
    return Recorded(overrides, folder / "on_policy", groups)


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "iter_003" / "model.safetensors")


def test_the_trajectory_is_that_of_the_run_whose_groups_it_gets(
    api: RunApi, recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: losses, gradient norms, and weights in the end."""
    recorded.send(api)
    train(compose_config(*recorded.from_environments(api)), tmp_path / "run")

    expected, found = metrics_of(recorded.folder), metrics_of(tmp_path / "run")
    assert found.keys() == expected.keys()
    for name, metrics in expected.items():
        same = (metrics.keys() & found[name].keys()) - {"success_rate"}
        assert {"grad_norm", "loss_total", "reward_mean", "mismatch/kl_k3"} <= same
        assert {key: found[name][key] for key in same} == {key: metrics[key] for key in same}
    assert expected["train_iter_003.json"]["grad_norm"] > 0
    weights, ours = last_weights(recorded.folder), last_weights(tmp_path / "run")
    assert weights.keys() == ours.keys()
    assert all(torch.equal(weights[name], ours[name]) for name in weights)
    glossary = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    in_glossary = glossary.partition("with rollouts=atropos\n")[2].partition("\n###")[0]
    recorded_names = json.loads((tmp_path / "run" / "metrics" / "train_iter_000.json").read_text()).keys()
    assert {name for name in recorded_names if "rollouts" in name} == set(
        re.findall(r"`([a-z]+/rollouts\w*|rollouts/\w+)`", in_glossary)
    )


@pytest.mark.slow
def test_two_processes_train_on_what_the_first_one_fetches(api: RunApi, recorded: Recorded, tmp_path: Path) -> None:
    recorded.send(api)
    assert run_in_children(2, tmp_path / "run", *recorded.from_environments(api)) == [0, 0], printed(tmp_path / "run")
    weights, ours = last_weights(recorded.folder), last_weights(tmp_path / "run")
    for name, tensor in weights.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=0)  # in another order of sums
