"""Requests to several servers: each goes where the fewest are open, and what a dead one leaves to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import pytest
from engines import CLIENT, MortalEngine
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.engine import server_engine
from offline_grpo.engine.streaming import SpreadClient, in_background
from offline_grpo.errors import EngineError
from offline_grpo.types import SamplingParams, SamplingRequest

SAMPLING = SamplingParams(max_new_tokens=4)
BATCH_SIZE = 4


@dataclass
class Lab:
    """Three scripted servers and the client over them."""

    webs: list[ScriptedServer]
    clients: list[MortalEngine]
    spread: SpreadClient

    def script(self, *scripts: Callable[[Request], Reply]) -> None:
        for web, script in zip(self.webs, scripts, strict=True):
            web.script = script

    def die(self, i: int) -> None:
        """From now on, whatever is asked or has been asked gets no answer."""
        self.clients[i].is_dead = True
        self.webs[i].script = lambda _: Reply(cut="silence")

    def hold(self, i: int) -> Callable[[Request], Reply]:
        """Answers nothing until the client gives up."""

        def script(request: Request) -> Reply:
            self.webs[i].hold(request)
            return Reply()

        return script

    @property
    def num_asked(self) -> list[int]:
        return [len(web.requests) for web in self.webs]

    def all(self, num_requests: int) -> dict[int, int]:
        """Index of each request -> the first token of its answer, which is the number in the prompt. None is answered
        twice.
        """
        answers = [
            (index, completions[0].token_ids[0])
            for index, completions in self.spread.generate(requests(num_requests), SAMPLING)
        ]
        assert len(dict(answers)) == len(answers)
        return dict(answers)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(server_engine, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(server_engine, "GRACE_S", 0.0)
    webs = [ScriptedServer(echo) for _ in range(3)]
    clients = [MortalEngine(**{**CLIENT, "batch_size": BATCH_SIZE}, base_url=web.base_url) for web in webs]
    lab = Lab(webs, clients, SpreadClient(clients))
    yield lab
    for client in (lab.spread, *clients):
        client.close()
    for web in webs:
        web.close()


def requests(number: int) -> list[SamplingRequest]:
    return [SamplingRequest((i, 8, 9), 2, i) for i in range(number)]


def echo(request: Request) -> Reply:
    """Two completions that tell which prompt they are of."""
    prompt = request.body["prompt"]["prompt_token_ids"]
    choice = {"token_ids": [prompt[0], 2], "logprobs": [-1.0, -1.0], "finish_reason": "stop"}
    return Reply({"prompt_token_ids": prompt, "choices": [choice] * request.body["n"]})


def test_every_request_is_answered_once_and_all_servers_are_busy(lab: Lab) -> None:
    def once_all_are_busy(request: Request) -> Reply:
        for web in lab.webs:
            web.wait_until(lambda web=web: web.max_active == BATCH_SIZE)
        return echo(request)

    lab.script(*[once_all_are_busy] * 3)
    assert lab.all(60) == {i: i for i in range(60)}
    assert sum(lab.num_asked) == 60  # both completions of a prompt in one request


def test_an_episode_stays_with_its_server(lab: Lab) -> None:
    for _ in range(3):
        for episode in (5, 3, 1, 0, 2, 4):
            [_] = lab.spread.generate([SamplingRequest((1, episode), 1, 0, None, episode)], SAMPLING)
    asked = [[tuple(request.body["prompt"]["prompt_token_ids"]) for request in web.requests] for web in lab.webs]
    assert asked == [[(1, 3), (1, 0)] * 3, [(1, 1), (1, 4)] * 3, [(1, 5), (1, 2)] * 3]


def test_closing_abandons_what_is_open_everywhere(lab: Lab) -> None:
    lab.script(lambda request: echo(request) if request.number == 0 else lab.hold(0)(request), lab.hold(1), lab.hold(2))
    answers = lab.spread.generate(requests(60), SAMPLING)
    next(answers)
    waiting = in_background(lambda: next(answers))
    for web in lab.webs:
        web.wait_until(lambda web=web: web.num_active == BATCH_SIZE)
    lab.spread.close()
    with pytest.raises(EngineError, match="the client was closed while it waited"):
        waiting.result(10)
    for web in lab.webs:
        web.wait_until(lambda web=web: web.num_active == 0)
    assert lab.num_asked == [BATCH_SIZE + 1, BATCH_SIZE, BATCH_SIZE]
    lab.script(echo, echo, echo)
    assert lab.all(9) == {i: i for i in range(9)}


@pytest.mark.parametrize("seed", range(2))
def test_whoever_dies_and_comes_back_nothing_is_lost_or_answered_twice(seed: int, lab: Lab) -> None:
    """One server always lives; the others die at random requests, and are taken in again with new connections."""
    draw = Random(seed)

    def frail(i: int) -> Callable[[Request], Reply]:
        def script(request: Request) -> Reply:
            if lab.clients[i].is_dead or draw.random() < 0.1:
                lab.clients[i].is_dead = True
                return Reply(cut="silence")
            return echo(request)

        return script

    lab.script(echo, frail(1), frail(2))
    answers = []
    for index, [completion, _] in lab.spread.generate(requests(200), SAMPLING):
        answers.append((index, completion.token_ids[0]))
        for i in (1, 2):
            if lab.clients[i] not in lab.spread.serving and draw.random() < 0.3:
                lab.clients[i].close()
                lab.clients[i].is_dead = False
                lab.spread.serving = [*lab.spread.serving, lab.clients[i]]
    assert sorted(answers) == [(i, i) for i in range(200)]
    assert sum(lab.num_asked) > 200  # some were asked twice
