"""Several calls of one client share what may be in flight, as sampling ahead and evaluation do; calls in threads."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from offline_grpo.engine.streaming import Streaming, at_once
from offline_grpo.errors import EngineError
from offline_grpo.types import Completion, SamplingParams, SamplingRequest

SAMPLING = SamplingParams(max_new_tokens=1, temperature=1.0)
REQUEST = SamplingRequest(prompt_ids=[1], num_completions=1, seed=0)


class Slow(Streaming):
    """Notes what is asked, and answers after a few turns of the loop, or fails."""

    def __init__(self, num_at_once: int, fails: Callable[[int], bool] = lambda _: False) -> None:
        super().__init__("a slow server", num_at_once)
        self.fails = fails
        self.asked: list[int] = []
        self.num_open, self.most_open, self.num_sent = 0, 0, 0
        self.may_answer = threading.Event()

    async def _ask_in_turn(
        self, failed: threading.Event, request: SamplingRequest, sampling: SamplingParams
    ) -> list[Completion]:
        self.num_sent += 1
        return await super()._ask_in_turn(failed, request, sampling)

    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        self.asked.append(request.seed)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            while not self.may_answer.is_set():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.002)
            if self.fails(request.seed):
                raise EngineError(f"request {request.seed} failed")
            return []
        finally:
            self.num_open -= 1

    def ask_for(self, seeds: range, told: list[object]) -> threading.Thread:
        def call() -> None:
            try:
                told.append(
                    [index for index, _ in self.generate((replace(REQUEST, seed=seed) for seed in seeds), SAMPLING)]
                )
            except EngineError as error:
                told.append(error)

        before, thread = self.num_sent, threading.Thread(target=call)
        thread.start()
        while self.num_sent - before < min(len(seeds), 2 * self.batch_size):  # as much is sent before an answer
            thread.join(0.001)
        return thread


def answers_of_two_calls(client: Slow) -> list[object]:
    """Of one that asks for twice what may be in flight, and then of one that asks for four: indices, or the error."""
    told: list[object] = []
    threads = [client.ask_for(range(2 * client.batch_size), told), client.ask_for(range(100, 104), told)]
    client.may_answer.set()
    for thread in threads:
        thread.join(10)
    return told


def test_a_call_that_fails_leaves_its_slots_to_the_others() -> None:
    client = Slow(num_at_once := 3, fails=lambda seed: seed < 3)
    told = answers_of_two_calls(client)
    failures = [each for each in told if isinstance(each, EngineError)]
    assert len(failures) == 1
    assert str(failures[0]) in {f"request {seed} failed" for seed in range(num_at_once)}  # whichever was answered first
    assert set(range(100, 104)) <= set(client.asked)
    assert client.most_open == num_at_once
    assert not set(range(num_at_once, 2 * num_at_once)) & set(client.asked)  # what waited was not sent any more
    assert [index for index, _ in client.generate([replace(REQUEST, seed=200)], SAMPLING)] == [0]
    client.close()


def test_what_is_asked_now_does_not_wait() -> None:
    client = Slow(num_at_once := 3)
    told: list[object] = []
    told_now: list[object] = []
    thread = client.ask_for(range(3 * num_at_once), told)
    now = threading.Thread(target=lambda: told_now.append(client.generate_now([replace(REQUEST, seed=100)], SAMPLING)))
    now.start()
    deadline = time.monotonic() + 10
    while client.num_open <= num_at_once and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sorted(client.asked) == [*range(num_at_once), 100]
    client.may_answer.set()
    now.join(10)
    thread.join(10)
    assert told_now == [[[]]]
    assert [sorted(indices) for indices in told] == [[*range(3 * num_at_once)]]  # type: ignore[call-overload]
    client.close()


# Calls in threads


def test_calls_overlap_and_keep_their_order() -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(number: int) -> int:
        both.wait()
        return number

    assert at_once(meet, [2, 1]) == [2, 1]


def test_an_error_is_raised_when_all_have_ended() -> None:
    ended = []

    def work(number: int) -> None:
        if number < 2:
            raise ValueError(number)
        time.sleep(0.2)
        ended.append(number)

    with pytest.raises(ValueError, match=r"^0$"):
        at_once(work, range(4))
    assert sorted(ended) == [2, 3]
