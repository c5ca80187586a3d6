"""Agents with clients of OpenAI's API: what they are answered, and which tokens become a rollout."""

from __future__ import annotations

import json
import random
import resource
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import worlds
from dialogues import EOS, Server, ids, isolated, problem_of, sampled
from openai import OpenAI
from runs import wait_until

from offline_grpo.generation import proxy as proxies
from offline_grpo.generation.dialogue import Dialogue
from offline_grpo.generation.proxy import Proxy
from offline_grpo.types import FinishReason, Reply, Rollout

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
    assert (rollout.score.reward, len(rollout.turns)) == (0.5, 10)
    said = [[*rollout.token_ids[turn.start : turn.end]] for turn in rollout.turns]
    assert all(each[-1] == EOS for each in said)
    bounds = [*rollout.starts, len(rollout.token_ids)]
    sequences = [[*rollout.token_ids[start:end]] for start, end in pairwise(bounds)]
    last = [*ids("2+2="), *said[-2], *ids("1+1="), *said[-1]]
    [long] = [each for each in sequences if each[-len(last) :] == last]
    others = [each for each in sequences if each is not long]
    assert sorted([*others, long[: -len(last)]]) == sorted([*ids("<bos>1+1="), *each] for each in said[:8])
    assert rollout.num_sampled == sum(map(len, said))


def call(**function: Any) -> list[Any]:
    """A history with a call."""
    return [*ASK, {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]


DEEP = "[" * 600 + "]" * 600
REFUSED: list[tuple[Any, str]] = [
    ({"n": 2}, "n: "),
    ({"tool_choice": "required"}, "tool_choice: "),
    ({"response_format": {"type": "json_object"}}, "response_format: "),
    ({"logit_bias": {"5": 1}}, "logit_bias: "),
    ({"stop": ["x"]}, "stop: "),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs: "),
    ({"guided_json": {}, "guided_regex": "a+"}, "guided_regex: "),
    ({"messages": []}, "messages: "),
    ({"messages": ["hello"]}, "messages.0: "),
    ({"messages": [{"role": "robot", "content": "?"}]}, "messages.0.role: "),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content.str: "),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "image_url: only data URLs",
    ),
    ({"messages": [{"role": "user", "content": "?", "images": ["x"]}]}, "images: "),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls.0.function: "),
    ({"messages": call(arguments="{}")}, "messages.1.tool_calls.0.function.name: "),
    ({"messages": call(name="f", arguments=[1])}, "messages.1.tool_calls.0.function.arguments.str: "),
    ({"max_tokens": "many"}, "max_tokens: "),
    ({"max_tokens": -1}, "max_tokens: "),
    ({"stream": "yes"}, "stream: "),
    ({"tools": {"name": "f"}}, "tools: "),
    ({"tools": [{"type": "function"}]}, "tools.0.function: "),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "none"}}]}, "tools.0.function.parameters"),
    (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "the body is not JSON"),
    (f'{{"messages": {DEEP}}}'.encode(), "the body is not JSON"),
    (b'{"messages": ' + b"9" * 5000 + b"}", "the body is not JSON"),
    (b"[]", "the body: "),
    (b"", "the body is not JSON"),
]


def test_what_cannot_be_answered_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes after it, on the same connection, is answered."""

    def act(http: httpx.Client, url: str, key: str) -> float:
        for body, said in REFUSED:
            content = body if isinstance(body, bytes) else json.dumps({"messages": ASK, **body}).encode()
            answer = http.post(f"{url}/chat/completions", content=content)
            assert answer.status_code == 400, body
            assert answer.json()["error"]["message"].startswith(said), (body, answer.json())
        return float(post(http, url, ASK).status_code == 200)

    assert run(monkeypatch, act).score.reward == 1.0


def test_wishes_do_not_count_and_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wishes = {"temperature": 0.1, "top_k": 5, "metadata": {}, "user": None}
    fine = {"n": 1, "logprobs": False, "stop": [], "response_format": {"type": "text"}, "tool_choice": "auto"}

    def act(http: httpx.Client, url: str, key: str) -> float:
        said = [{**ASK[0], "name": "Ann", "mood": "good"}, {"role": "tool", "name": "f", "content": "1"}]
        return float(all(post(http, url, said, **wishes, **fine).status_code == 200 for _ in range(2)))

    assert run(monkeypatch, act).score.reward == 1.0
    wished, fields = caplog.messages
    assert wished.startswith("an agent asks for metadata, temperature, top_k of its own")
    assert fields.startswith("an agent's messages have mood, name;")


def test_the_runs_own_arguments_of_the_chat_template_are_fine() -> None:
    own = {"enable_thinking": False, "reasoning_effort": "low"}
    asked = {"messages": ASK, "chat_template_kwargs": own, "reasoning_effort": "low"}
    proxy = Proxy(own, set())
    url, _ = proxy.open(answered)
    changes = ({}, {"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"})
    found = [httpx.post(f"{url}/chat/completions", json={**asked, **other}).status_code for other in changes]
    proxy.close()
    assert found == [200, 400, 400]


def test_what_templates_and_readers_raise_is_of_one_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever they raise: at a request its client reads it; at a reply its episode has no score."""
    ask, answer = Dialogue.ask, Dialogue.answer

    def asks(self: Dialogue, messages: Any, *others: Any) -> Any:
        if messages[-1]["content"] == "raise":
            raise RecursionError("too deep")
        return ask(self, messages, *others)

    def answers(self: Dialogue, asked: Any, completion: Any) -> Any:
        if asked.messages[-1]["content"] == "9+9=":
            raise KeyError("parameters")
        return answer(self, asked, completion)

    monkeypatch.setattr(Dialogue, "ask", asks)
    monkeypatch.setattr(Dialogue, "answer", answers)

    def act(row: dict[str, Any], base_url: str, api_key: str) -> float:
        with httpx.Client(timeout=20) as http:
            refused = post(http, base_url, [{"role": "user", "content": "raise"}])
            assert refused.json()["error"]["message"].startswith("RecursionError: too deep")
            return float(refused.status_code == 400 and post(http, base_url, [user(row["say"])]).status_code == 200)

    monkeypatch.setattr(worlds, "act", act)
    task = worlds.agent()
    problems = [problem_of(task, say=say) for say in ("1+1=", "9+9=")]
    fine, bad = sampled(Server(), task, problems, group_size=2)
    assert [(rollout.score.reward, len(rollout.turns)) for rollout in fine] == [(1.0, 1)] * 2
    assert [rollout.num_sampled for rollout in bad] == [0, 0]
    for rollout in bad:
        assert str(rollout.score.failure).startswith("raised: a reply of the policy cannot be read, KeyError: 'param")
    [said] = [text for text in caplog.messages if "cannot be read" in text]
    assert said.startswith("problem train-0, a reply of the policy cannot be read, KeyError: 'parameters'")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_wrong_addresses_large_bodies_and_asks_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    urls: list[str] = []

    def act(http: httpx.Client, url: str, key: str) -> float:
        urls.append(url)
        assert post(http, url.replace(key, "0" * 32), ASK).status_code == 404
        assert http.post(f"{url}/embeddings", json={}).status_code == 404
        assert http.get(f"{url}/chat/completions").status_code == 405
        assert http.head(f"{url}/models").status_code == 200
        chunks = (b"9" * 2**20 for _ in range(65))
        assert http.post(f"{url}/chat/completions", content=chunks).status_code == 413
        for header in ({"content-encoding": "gzip"}, {"transfer-encoding": "chunked"}):
            assert httpx.post(f"{url}/chat/completions", content=b"junk", headers=header).status_code == 400
        long = post(http, url, [{"role": "user", "content": "9" * 8_000_000}])
        assert long.json()["choices"][0]["finish_reason"] == "length"
        assert json.loads(post(http, url, ASK, max_tokens=1).content)["usage"]["completion_tokens"] == 1
        return 1.0

    rollout = run(monkeypatch, act)
    assert rollout.finish_reason is FinishReason.LENGTH
    with pytest.raises(httpx.ConnectError):
        post(httpx.Client(), urls[0], ASK)


def answered(messages: Any, tools: Any, longest: int | None) -> Future[Reply]:
    reply: Future[Reply] = Future()
    reply.set_result(Reply("4", "4"))
    return reply


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(10)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_end_with_their_episode_and_those_of_strangers_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "STRANGER_S", 0.3)
    monkeypatch.setattr(proxies, "STRANGERS_FRAC", 20.5 / resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    proxy = Proxy({}, set())
    (url, key), (other, _) = proxy.open(answered), proxy.open(answered)
    place = url.split("/")[2].split(":")
    with httpx.Client() as http, httpx.Client() as more, ExitStack() as stack:
        assert post(http, url, ASK).status_code == post(more, other, ASK).status_code == 200
        lines = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n", b"\x16\x03\x01junk\r\n\r\n", b"", b"POST /v"
        silent = [stack.enter_context(socket.create_connection((place[0], int(place[1])))) for _ in range(40)]
        for number, connection in enumerate(silent[20:]):
            connection.sendall(lines[number % len(lines)])
        assert all(map(is_closed, silent[:20])), "they made room"
        assert post(http, url, ASK).status_code == 200
        answers = [connection.recv(12) for connection in silent[20:22]]
        assert answers == [b"HTTP/1.1 404", b"HTTP/1.0 400"]
        assert all(map(is_closed, silent[22:24])), "they said nothing for too long"
        busy = [stack.enter_context(httpx.Client()) for _ in range(30)]
        assert all(post(each, other, ASK).status_code == 200 for each in busy)
        assert sum(each.transport is not None for each in proxy.connections) < 25, "beyond some, none is kept alive"
        proxy.end(key)
        kept = http._transport._pool.connections  # type: ignore[attr-defined]
        assert wait_until(lambda: kept[0].has_expired()), "the connection of the episode is closed"
        assert post(more, other, ASK).status_code == 200
    proxy.close()


def test_idle_connections_and_bodies_that_do_not_come_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "IDLE_S", 0.2)
    proxy = Proxy({}, set())
    url, _ = proxy.open(answered)
    _, _, place, path = url.split("/", 3)
    address = place.split(":")[0], int(place.split(":")[1])
    with socket.create_connection(address) as idle, socket.create_connection(address) as slow:
        idle.sendall(f"GET /{path}/models HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        slow.sendall(f"POST /{path}/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{{".encode())
        assert slow.recv(12) == b"HTTP/1.1 400"
        assert idle.recv(12) == b"HTTP/1.1 200"
        idle.recv(9999)
        assert is_closed(idle)
    proxy.close()


@pytest.mark.slow
def test_agents_in_processes_of_their_own() -> None:
    make = partial(worlds.agent, "worlds:chats", max_turns=2)
    task = isolated(make, memory_mib=1024, timeout_s=60.0, preload=("worlds", "openai"))
    try:
        found = sampled(Server(), task, [problem_of(make())] * 8, group_size=3)
        assert {(len(r.turns), r.score.reward, r.score.failure) for own in found for r in own} == {(2, 5.0, None)}
    finally:
        task.close()
