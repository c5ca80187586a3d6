"""A client against a server that misbehaves: each fault is retried or named, and never becomes a rollout."""

from __future__ import annotations

import base64
import math
import re
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest
from engines import CLIENT, MortalEngine
from factories import generate
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.engine import server_engine
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.types import Completion, FinishReason, SamplingParams, SamplingRequest, ServedWeights

PROMPT = [7, 8, 9]
SAMPLING = SamplingParams(max_new_tokens=4)
TWO = [([5, 2], [-0.5, -0.25], "stop"), ([6, 7, 8, 9], [-1.0, -2.0, -3.0, -4.0], "length")]
"""Two completions of PROMPT, as the tests write them: token ids, logprobs, why it ended."""

Script = Callable[[Request], Reply]


def tokens_answer(completions: Sequence[Any], prompt: Sequence[int] = PROMPT) -> dict[str, Any]:
    """What our middleware answers at /generate_tokens."""
    choices = [
        {"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason} for tokens, logprobs, reason in completions
    ]
    return {"prompt_token_ids": list(prompt), "choices": choices}


@dataclass
class Lab:
    """A scripted server and a client of it."""

    server: ScriptedServer
    client: MortalEngine

    def set_script(self, script: Script) -> None:
        self.server.script = script

    def answers(self, completions: Sequence[Any] = TWO, **changes: Any) -> None:
        self.set_script(lambda _: Reply(tokens_answer(completions, **changes)))

    def ask(self, *, num_prompts: int = 1, group_size: int = 2) -> list[list[Completion]]:
        """Completions of prompts that start with their number."""
        prompts = [[number, 8, 9] for number in range(num_prompts)] if num_prompts > 1 else [PROMPT]
        return generate(self.client, prompts, SAMPLING, group_size=group_size, seeds=range(num_prompts))

    def echo(self, request: Request) -> Reply:
        """A completion that tells which prompt it is of."""
        prompt = request.body["prompt"]["prompt_token_ids"]
        return Reply(tokens_answer([([prompt[0], 2], [-1.0, -1.0], "stop")], prompt=prompt))

    def error(self, kind: type[EngineError] = EngineError, **ask: Any) -> str:
        """The message of the error that asking gives; it names the URL."""
        with pytest.raises(EngineError) as raised:
            self.ask(**ask)
        assert isinstance(raised.value, EngineDied) == (kind is EngineDied)
        assert kind is EngineDied or f"{self.server.base_url}{self.client.path}" in str(raised.value)
        return str(raised.value)


def make_client(base_url: str, *, batch_size: int = 4) -> MortalEngine:
    how = {**CLIENT, "batch_size": batch_size, "timeout_s": 5.0, "max_retries": 3}
    return MortalEngine(**how, base_url=base_url)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(server_engine, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(server_engine, "GRACE_S", 0.0)
    with ScriptedServer(lambda _: Reply(tokens_answer(TWO))) as server:
        client = make_client(server.base_url)
        yield Lab(server, client)
        client.close()


# What works


def test_completions_are_what_the_server_said(lab: Lab) -> None:
    lab.client.weights = ServedWeights(3)
    assert lab.ask() == [
        [
            Completion((5, 2), (-0.5, -0.25), FinishReason.STOP, (3, 3)),
            Completion((6, 7, 8, 9), (-1.0, -2.0, -3.0, -4.0), FinishReason.LENGTH, (3, 3, 3, 3)),
        ]
    ]
    assert generate(lab.client, [], SAMPLING, group_size=2, seeds=[]) == []


ABORTED = [([5], [-0.5], "abort"), ([], [], "abort")]


def test_what_the_server_aborts_is_asked_for_again(lab: Lab) -> None:
    """Part of a completion must not be judged as a whole one."""
    replies = iter([ABORTED, [TWO[0], ABORTED[1]], TWO])
    lab.set_script(lambda _: Reply(tokens_answer(next(replies))))
    [completions] = lab.ask()
    assert {completion.finish_reason for completion in completions} == {FinishReason.STOP, FinishReason.LENGTH}
    first, *others = [request.body for request in lab.server.requests]
    assert others == [first, first]


def test_what_a_push_aborts_waits_for_the_push_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was in flight comes back at once, from a server that might be ending, and is computed again when the
    push has ended.
    """
    monkeypatch.setattr(server_engine, "GRACE_S", 60.0)
    new, all_in_flight = ServedWeights(4), threading.Barrier(8)

    def script(_: Request) -> Reply:
        if lab.client.weights is new:
            return Reply(tokens_answer(TWO))
        if all_in_flight.wait(10) == 0:
            threading.Timer(0.5, lambda: setattr(lab.client, "weights", new)).start()
        return Reply(tokens_answer(ABORTED))

    lab.set_script(script)
    lab.client.close()
    lab.client = make_client(lab.server.base_url, batch_size=8)
    started = time.monotonic()
    groups = generate(lab.client, [PROMPT] * 8, SAMPLING, group_size=2, seeds=range(8))
    assert {version for group in groups for completion in group for version in completion.versions} == {4}
    assert time.monotonic() - started < 30
    assert len(lab.server.requests) == 16


def test_every_sampling_setting_is_sent_under_its_name(lab: Lab) -> None:
    sampling = SamplingParams(
        17, temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2, stop=("\n", "END")
    )
    generate(lab.client, [PROMPT], sampling, group_size=2, seeds=[5])
    body = lab.server.requests[0].body
    unsent = ("skip_special_tokens", "include_stop_str_in_output")  # of text that nobody reads
    unsent += ("needs_alternatives", "needs_routes")  # which have other names
    for field in (field for field in fields(SamplingParams) if field.name not in unsent):
        value, name = getattr(sampling, field.name), {"max_new_tokens": "max_tokens"}.get(field.name, field.name)
        assert body[name] == (list(value) if field.name == "stop" else value)
    assert body["stop_token_ids"] == [2]
    assert body["prompt"]["prompt_token_ids"] == PROMPT


def test_a_stock_server_is_asked_as_stock_servers_are(caplog: pytest.LogCaptureFixture) -> None:
    """All requests that were in flight find out by themselves; later ones know."""

    def script(request: Request) -> Reply:
        if request.path == VllmEngine.path:
            server.wait_until(lambda: server.max_active == 4)
            return Reply({"detail": "Not Found"}, status=404)
        choice = {"index": 0, "token_ids": [7], "finish_reason": "stop", "prompt_token_ids": request.body["prompt"]}
        return Reply({"choices": [{**choice, "logprobs": {"token_logprobs": [-1.0]}}]})

    with ScriptedServer(script) as server, caplog.at_level("INFO"):
        client = make_client(server.base_url)
        assert {index for index, _ in client.generate(requests(9), SAMPLING)} == set(range(9))
        paths = [request.path for request in server.requests]
        assert (paths.count(VllmEngine.path), paths.count("/v1/completions")) == (4, 9)
        assert caplog.text.count("has no POST /generate_tokens") == 1
        client.close()


def requests(num_prompts: int) -> list[SamplingRequest]:
    """One completion of each prompt; the prompts start with their number."""
    return [SamplingRequest((number, 8, 9), 1, number) for number in range(num_prompts)]


# What is tried again


@pytest.mark.parametrize(
    "first",
    [Reply({"error": "later"}, status=503), Reply(TWO, cut="close"), Reply(TWO, cut="silence")],
)
def test_what_is_tried_again(lab: Lab, first: Reply) -> None:
    lab.set_script(lambda request: first if request.number < 2 else Reply(tokens_answer(TWO)))
    assert lab.ask()[0][0].token_ids == (5, 2)
    assert lab.server.requests[0].body == lab.server.requests[2].body
    lab.set_script(lambda _: first)
    assert "after 4 attempts" in lab.error()


# What is an error at once


GOOD = ([6], [-1.0], "length")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Reply({"detail": "Not Found"}, status=404), r"status 404: .*Not Found"),
        (Reply({"error": {"message": "prompt too long"}}, status=400), r"status 400: prompt too long"),
        (Reply(b'{"choices": [', 200), r"malformed answer"),
        (Reply(tokens_answer(TWO, prompt=PROMPT[1:])), "malformed answer.*prompt came back changed"),
        ([GOOD], "1 completions where 2 were asked for"),
        ([GOOD, ([5], [math.nan], "stop")], "the logprob of token 0 is nan"),
        ([GOOD, ([5, 6], [-1.0, -9999.0], "stop")], "the logprob of token 1 is -9999.0"),
        ([GOOD, ([5, 6], [-1.0], "stop")], r"malformed answer.*1 logprobs for 2 tokens"),
        ([GOOD, ([], [], "stop")], r"malformed answer.*0 tokens where 1 to 4"),
        ([GOOD, ([1000], [-1.0], "stop")], r"malformed answer.*has id 1000"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for(lab: Lab, answer: Any, expected: str) -> None:
    reply = answer if isinstance(answer, Reply) else Reply(tokens_answer(answer))
    lab.set_script(lambda _: reply)
    assert re.search(expected, lab.error())
    assert len(lab.server.requests) == (2 if reply.status == 404 else 1)  # as a stock server is asked


@pytest.mark.parametrize(
    ("alternatives", "expected"),
    [
        (None, "alternatives of 0 tokens for 2"),
        ([[]], "alternatives of 1 tokens for 2"),
        ([[], [1000]], "a token has id 1000"),
        ([[], [-2]], "a token has id -2"),
    ],
)
def test_alternatives_that_cannot_be(lab: Lab, alternatives: Any, expected: str) -> None:
    choice: dict[str, Any] = {"token_ids": [6, 5], "logprobs": [-1.0, -1.0], "finish_reason": "stop"}
    if alternatives is not None:
        ids = array("i", [one for own in alternatives for one in (*own, -1)]).tobytes()
        choice["alternatives"] = base64.b64encode(ids).decode()
    lab.set_script(lambda _: Reply({"prompt_token_ids": PROMPT, "choices": [choice]}))
    with pytest.raises(EngineError, match=f"malformed answer.*{expected}"):
        generate(lab.client, [PROMPT], SamplingParams(4, top_k=3, needs_alternatives=True), group_size=1, seeds=[0])
    assert lab.server.requests[0].body["alternatives"] is True


def test_more_ties_than_were_asked_for_are_no_set(lab: Lab) -> None:
    ids = base64.b64encode(array("i", [*range(100, 167), -1]).tobytes()).decode()
    choice = {"token_ids": [6], "logprobs": [-1.0], "finish_reason": "stop", "alternatives": ids}
    lab.set_script(lambda _: Reply({"prompt_token_ids": PROMPT, "choices": [choice]}))
    with pytest.raises(EngineError, match=r"drawn from 68, or more .* as the last one of generation.top_k=3; lower it"):
        generate(lab.client, [PROMPT], SamplingParams(4, top_k=3, needs_alternatives=True), group_size=1, seeds=[0])


def test_a_server_that_is_too_slow_is_not_asked_again(lab: Lab) -> None:
    lab.set_script(lambda _: Reply(tokens_answer(TWO), byte_pause_s=0.1))
    lab.client.timeout_s = 0.5
    assert "no answer after 0.5 s; raise generation.timeout_s" in lab.error()
    assert len(lab.server.requests) == 1


def test_a_server_of_our_own_that_hangs_has_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise EngineDied("the server was unhealthy and was stopped")

    monkeypatch.setattr(lab.client, "check_healthy", stop)
    lab.set_script(lambda _: Reply(tokens_answer(TWO), byte_pause_s=0.1))
    lab.client.timeout_s = 0.2
    assert "was stopped" in lab.error(EngineDied)


# A server of our own that ends


@pytest.mark.parametrize("reply", [Reply({"error": "engine dead"}, status=500), Reply({}, cut="reset")])
def test_the_death_of_our_own_server_is_told(lab: Lab, reply: Reply, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(_: Request) -> Reply:
        lab.client.is_dead = True
        return reply

    monkeypatch.setattr(server_engine, "GRACE_S", 60.0)
    lab.set_script(script)
    assert "has ended" in lab.error(EngineDied)
    assert len(lab.server.requests) == 1


# Interruption


class Interrupted(Exception):
    """Raised by a signal handler, as on Ctrl-C."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("alarm")
def test_an_interruption_leaves_no_request_and_a_client_that_works(lab: Lab) -> None:
    def script(request: Request) -> Reply:
        if request.number == 3:  # of several that see all four, the slowest would send a second signal later on
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        lab.server.hold(request)
        return Reply()

    lab.set_script(script)
    started = time.monotonic()
    with pytest.raises(Interrupted):
        lab.ask(num_prompts=9, group_size=1)
    lab.server.wait_until(lambda: lab.server.num_active == 0)
    assert time.monotonic() - started < 3
    assert len(lab.server.requests) == 4  # those that waited for a place were not sent afterwards
    lab.answers()
    assert len(lab.ask()[0]) == 2
