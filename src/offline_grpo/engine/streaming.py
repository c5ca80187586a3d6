"""Many calls at a time: in daemon threads, which never keep the process from ending; how a client takes requests from
an iterable, sends them, and yields the answers; and how requests are spread over several clients.

The public side is synchronous. Requests run in an event loop on a thread of their own, so that a signal to the main
thread interrupts the wait at once, and connections outlive a call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from functools import partial
from itertools import count, islice
from queue import Empty, SimpleQueue
from typing import ClassVar, TypeVar

from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.types import Completion, CompletionStream, Metrics, SamplingParams, SamplingRequest, ServedWeights

log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

NEXT_S = 0.01  # how often requests are looked for that were not there yet
SERVING_S = 0.1  # how often a server is looked for where none serves
CLOSED = "the client was closed while it waited"


# Calls in threads


def in_background(call: Callable[[], T]) -> Future[T]:
    """The future result of `call`, which runs in a thread of its own."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # nobody can cancel it

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # it belongs to the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def at_once(call: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """The results of `call` for all items, at the same time. The first error is raised when all calls have ended."""
    if len(items) == 1:
        return [call(items[0])]
    outcomes = started(call, items)
    wait(outcomes)
    return [outcome.result() for outcome in outcomes]


def started(call: Callable[[S], T], items: Sequence[S]) -> list[Future[T]]:
    """The future results of `call` for all items, at the same time."""
    return [in_background(partial(call, item)) for item in items]


# Requests to one server


class Streaming(ABC):
    """`RolloutClient.generate` for a client that implements one request. Several threads may use it.

    Args:
        base_url: of what is asked.
        batch_size: requests in flight, of all calls together: those of an earlier call go first.
    """

    def __init__(self, base_url: str, batch_size: int) -> None:
        self.base_url = base_url
        self.batch_size = batch_size
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore  # of the loop, and made with it; first come, first served
        self._changing_loop = threading.RLock()  # connections belong to one loop: no request may get into an old one

    @abstractmethod
    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        """The request's completions. Runs in the client's own loop; raises what `generate` does."""

    async def disconnect(self) -> None:  # noqa: B027 - not every client has connections
        """Close connections; no request is open any more."""

    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        """Takes up to twice as many requests as may be in flight. Raises EngineDied if a server that this run started
        has ended; EngineError if it cannot be reached, refuses, or answers something that was not asked for.
        """
        loop, indices = self._running_loop(), count()
        coming, failed = iter(requests), threading.Event()
        unanswered: dict[int, Future[list[Completion]]] = {}
        answered: SimpleQueue[int] = SimpleQueue()
        try:
            while True:
                # With as many waiting as are in flight, a free slot never waits for this thread. None stands for a
                # request that is not there yet.
                none_yet = False
                for request in islice(coming, 2 * self.batch_size - len(unanswered)):
                    if none_yet := request is None:
                        break
                    index = next(indices)
                    with self._changing_loop:
                        if self._loop is not loop:
                            raise EngineError(f"{self.base_url}: {CLOSED}")
                        future = asyncio.run_coroutine_threadsafe(self._ask_in_turn(failed, request, sampling), loop)
                    unanswered[index] = future
                    future.add_done_callback(lambda _, index=index: answered.put(index))
                if not unanswered and not none_yet:
                    return

                # Whatever is answered first is handed out first.
                with suppress(Empty):  # of answers, while there may be another request
                    index = answered.get(timeout=(NEXT_S if unanswered else 0.0) if none_yet else None)
                    yield index, self._result(unanswered.pop(index))
        finally:  # a failure, a signal, or a caller who closed the iterator: cancel what is still open
            for future in unanswered.values():
                future.cancel()

    def submit(self, request: SamplingRequest, sampling: SamplingParams) -> Future[list[Completion]]:
        """Ask at once, whatever else is in flight. To cancel the future abandons the request."""
        with self._changing_loop:
            return asyncio.run_coroutine_threadsafe(self.ask(request, sampling), self._running_loop())

    def generate_now(self, requests: Sequence[SamplingRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """The completions of a few requests, in their order, asked at once, whatever else is in flight or waits. Raises
        as `generate`.
        """
        answers = [self.submit(request, sampling) for request in requests]
        try:
            return [self._result(answer) for answer in answers]
        finally:
            for answer in answers:
                answer.cancel()

    def close(self) -> None:
        """Close the connections and end the thread; what other threads wait for is cancelled. The client can be used
        again afterwards.
        """
        with self._changing_loop:
            if self._loop is None:
                return

            # What is open ends before its connections do, and the loop after both.
            async def cancel_all() -> None:
                interrupted = asyncio.all_tasks() - {asyncio.current_task()}
                for task in interrupted:
                    task.cancel()
                await asyncio.gather(*interrupted, return_exceptions=True)
                await self.disconnect()

            asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _result(self, answer: Future[list[Completion]]) -> list[Completion]:
        try:
            return answer.result()
        except CancelledError:
            raise EngineError(f"{self.base_url}: {CLOSED}") from None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._changing_loop:
            if self._loop is None:
                self._loop, self._slots = asyncio.new_event_loop(), asyncio.Semaphore(self.batch_size)

                def run(loop: asyncio.AbstractEventLoop) -> None:
                    loop.run_forever()
                    loop.close()

                name = f"requests to {self.base_url}"
                threading.Thread(target=run, args=[self._loop], name=name, daemon=True).start()
            return self._loop

    async def _ask_in_turn(
        self, failed: threading.Event, request: SamplingRequest, sampling: SamplingParams
    ) -> list[Completion]:
        """Ask when there is a slot; after a failure, send none of the same call's waiting requests."""
        async with self._slots:
            if failed.is_set():
                raise asyncio.CancelledError
            try:
                return await self.ask(request, sampling)
            except BaseException:
                failed.set()
                raise


# Requests to several


class SpreadClient(Streaming):
    """A `RolloutClient` over the clients of several servers that serve the same weights.

    All completions of a prompt come from one server, which computes the prompt once; so do the turns of an episode,
    unless that server has more than twice the load of another. Which one it is changes no sample, because seeds belong
    to the requests. What was open at a server that died is asked of the others.

    Args:
        clients: at least one. Each is asked for its own `batch_size` at once; more where others have died.
    """

    is_local: ClassVar[bool] = False

    def __init__(self, clients: Sequence[Streaming]) -> None:
        names = ", ".join(client.base_url for client in clients)
        super().__init__(names, sum(client.batch_size for client in clients))
        self.serving = list(clients)
        """Those that are asked; replaced as a whole, by the thread of the requests too. Empty where the last one has
        died while another one gets the weights: requests wait for that one.
        """
        self.weights = ServedWeights()
        self._num_open = dict.fromkeys(clients, 0)
        self._num_tokens = dict.fromkeys(clients, 0)  # since the last `metrics`

    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        """Raises EngineDied when all servers have."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            # The server with the fewest open requests; an episode's own, unless that has much more to do.
            while not (serving := self.serving):
                await asyncio.sleep(SERVING_S)
            client = min(serving, key=lambda client: (self._num_open[client], self._num_tokens[client]))
            if request.episode is not None:
                own = serving[request.episode % len(serving)]
                client = own if self._num_open[own] <= 2 * self._num_open[client] + 4 else client

            # Where it dies or is started again, whatever was open is asked of the others.
            self._num_open[client] += 1
            try:
                completions = await asyncio.wrap_future(client.submit(request, sampling))
            except EngineDied as death:
                before, others = self.serving, [other for other in self.serving if other is not client]
                if not others:
                    raise
                self.serving = others
                if client in before:
                    log.warning("sampling continues with %d of the servers: %s", len(others), death)
            except EngineError:
                if client in self.serving:
                    raise  # else its server has died, and is being started again
            except asyncio.CancelledError:
                if task.cancelling():
                    raise  # else the client was closed, because its server is started again
            else:
                self._num_tokens[client] += sum(len(completion.token_ids) for completion in completions)
                return completions
            finally:
                self._num_open[client] -= 1

    def metrics(self) -> Metrics:
        """How evenly the tokens sampled since the last call are spread: those of the busiest server over the mean."""
        num_tokens = list(self._num_tokens.values())
        self._num_tokens = dict.fromkeys(self._num_tokens, 0)
        mean = sum(num_tokens) / len(num_tokens)
        imbalance = max(num_tokens) / mean if mean else 1.0
        return {"engines/num_serving": float(len(self.serving)), "engines/imbalance": imbalance}
