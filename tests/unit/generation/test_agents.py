"""Agents with clients of OpenAI's API: what they are answered, and which tokens become a rollout."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import worlds
from openai import OpenAI
from players import EOS, Server, ids, isolated, problem_of, sampled

from offline_grpo.types import FinishReason, Rollout

ASK = [{"role": "user", "content": "1+1="}]


def run(monkeypatch: pytest.MonkeyPatch, act: Callable[[httpx.Client, str, str], Any]) -> Rollout:
    """One episode of this agent, in a thread."""

    def started(row: dict[str, Any], base_url: str, api_key: str) -> Any:
        with httpx.Client(timeout=20) as http:
            return act(http, base_url, api_key)

    monkeypatch.setattr(worlds, "act", started)
    task = worlds.agent()
    [[rollout]] = sampled(Server(), task, [problem_of(task)], group_size=1)
    return rollout


def test_episodes_with_one_seed_draw_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Python and of NumPy."""
    drawn: list[tuple[float, float]] = []

    def act(*_: Any) -> float:
        drawn.append((random.random(), np.random.rand()))
        return 0.0

    monkeypatch.setattr(worlds, "act", act)
    task = worlds.agent()
    for seed in (7, 7, 8):
        task.play(problem_of(task), SimpleNamespace(seed=seed, base_url="", api_key=""))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0]
    assert drawn[0][1] != drawn[2][1]


def post(http: httpx.Client, url: str, messages: Any, **other: Any) -> httpx.Response:
    return http.post(f"{url}/chat/completions", json={"messages": messages, **other})


def test_a_conversation_is_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the client retries, asks at once, leaves out what it need not say, or streams."""

    def act(http: httpx.Client, url: str, key: str) -> float:
        client: Any = OpenAI(base_url=url, api_key=key)
        assert [model.id for model in client.models.list()] == ["policy"]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: post(http, url, ASK).json(), range(8)))
        message = found[3]["choices"][0]["message"]
        said = [*ASK, {"tool_calls": None, "content": message["content"], "role": "assistant", "name": None}]
        parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]
        stream = client.chat.completions.create(
            model="policy", messages=[*said, {"role": "user", "content": parts}], stream=True, temperature=0
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        last = post(
            http, url, [*said, {"role": "user", "content": "2+2="}, {"role": "assistant", "content": text}, *ASK]
        )
        assert last.json()["choices"][0]["finish_reason"] == "stop"
        assert last.json()["usage"]["prompt_tokens"] > 10
        return 0.5

    rollout = run(monkeypatch, act)
    assert (rollout.score.reward, len(rollout.turns)) == (0.5, 3)
    one, two, three = ([*rollout.token_ids[turn.start : turn.end]] for turn in rollout.turns)
    assert [*rollout.token_ids] == [*ids("<bos>1+1="), *one, *ids("2+2="), *two, *ids("1+1="), *three]
    assert one[-1] == two[-1] == three[-1] == EOS
    assert rollout.score.measured["dropped_tokens"] >= 14


def test_a_history_that_was_rewritten_is_another_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(http: httpx.Client, url: str, key: str) -> float:
        first = post(http, url, ASK).json()["choices"][0]["message"]
        changed = {**first, "content": f"{first['content']}7"}
        post(http, url, [*ASK, changed, {"role": "user", "content": "2+2="}])
        return 0.0

    rollout = run(monkeypatch, act)
    assert len(rollout.turns) == 1
    assert rollout.score.measured["dropped_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"n": 2}, "n=2: an episode has one reply at a time"),
        ({"tool_choice": "required"}, "tool_choice: a forced call"),
        ({"response_format": {"type": "json_object"}}, "response_format: "),
        ({"logit_bias": {"5": 1}}, "logit_bias: it would change"),
        ({"stop": ["x"]}, "stop: set generation.stop"),
        ({"messages": []}, "the body must be an object with messages"),
        ({"messages": [{"role": "robot", "content": "?"}]}, "a message must have a role that is known"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a message's content must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "a call needs a function"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(
    body: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(http: httpx.Client, url: str, key: str) -> float:
        answer = post(http, url, **{"messages": ASK, **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(said)
        return 1.0

    assert run(monkeypatch, act).score.reward == 1.0


def test_wrong_addresses_large_bodies_and_asks_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []

    def act(http: httpx.Client, url: str, key: str) -> float:
        urls.append(url)
        assert post(http, url.replace(key, "0" * 32), ASK).status_code == 404
        assert http.post(f"{url}/embeddings", json={}).status_code == 404
        assert http.post(f"{url}/chat/completions", content=b"{").status_code == 400
        long = post(http, url, [{"role": "user", "content": "9" * 8_000_000}])
        assert long.json()["choices"][0]["finish_reason"] == "length"
        assert json.loads(post(http, url, ASK, max_tokens=1).content)["usage"]["completion_tokens"] == 1
        return 1.0

    rollout = run(monkeypatch, act)
    assert rollout.finish_reason is FinishReason.LENGTH
    assert post(httpx.Client(), urls[0], ASK).status_code == 404


@pytest.mark.slow
def test_agents_in_processes_of_their_own() -> None:
    make = partial(worlds.agent, "worlds:chats", max_turns=2)
    task = isolated(make, memory_mib=1024, timeout_s=60.0)
    try:
        found = sampled(Server(), task, [problem_of(make())] * 8, group_size=3)
        assert {(len(r.turns), r.score.reward, r.score.failure) for own in found for r in own} == {(2, 5.0, None)}
    finally:
        task.close()
