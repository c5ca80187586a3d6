"""Many requests at a time: how a client takes them from an iterable, sends them, and yields what is answered.

The public side is synchronous. Requests run in an event loop on a thread of their own, so that a signal to the main
thread interrupts the wait at once, and connections outlive a call.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from itertools import count, islice
from queue import Empty, SimpleQueue

from offline_grpo.errors import EngineError
from offline_grpo.types import Completion, CompletionStream, SamplingParams, SamplingRequest

LOOK_S = 0.01
"""How often requests are looked for that were not there yet."""


class Streaming(ABC):
    """`RolloutClient.generate` for a client that implements one request. Several threads may use it.

    Args:
        name: of what is asked, for messages and the thread.
        num_at_once: requests in flight, of all calls together: those of an earlier call go first.
    """

    def __init__(self, name: str, num_at_once: int) -> None:
        self._name = name
        self._num_at_once = num_at_once
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: asyncio.Semaphore  # of the loop, and made with it; first come, first served
        self._changing_loop = threading.RLock()  # connections belong to one loop: no request may get into an old one

    @abstractmethod
    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        """The request's completions. Runs in the client's own loop; raises what `generate` does."""

    async def disconnect(self) -> None:  # noqa: B027 - not every client has connections
        """Close connections; no request is open any more."""

    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        """See `RolloutClient.generate`. As many requests as may be in flight wait behind them.

        Raises:
            EngineDied: the server, one that this run started, has ended.
            EngineError: it cannot be reached, refused, or answered something else than what was asked for.
        """
        loop, indices = self._running_loop(), count()
        coming, failed = iter(requests), threading.Event()
        unanswered: dict[int, Future[list[Completion]]] = {}
        answered: SimpleQueue[int] = SimpleQueue()
        try:
            while True:
                none_yet = False
                for request in islice(coming, 2 * self._num_at_once - len(unanswered)):
                    if none_yet := request is None:
                        break
                    index = next(indices)
                    with self._changing_loop:
                        if self._loop is not loop:
                            raise self._closed()
                        future = asyncio.run_coroutine_threadsafe(self._ask_in_turn(failed, request, sampling), loop)
                    unanswered[index] = future
                    future.add_done_callback(lambda _, index=index: answered.put(index))
                if not unanswered and not none_yet:
                    return
                try:
                    index = answered.get(timeout=(LOOK_S if unanswered else 0.0) if none_yet else None)
                except Empty:
                    continue
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
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _closed(self) -> EngineError:
        return EngineError(f"{self._name}: the client was closed while it waited")

    def _result(self, answer: Future[list[Completion]]) -> list[Completion]:
        try:
            return answer.result()
        except CancelledError:
            raise self._closed() from None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._changing_loop:
            if self._loop is None:
                self._loop, self._slots = asyncio.new_event_loop(), asyncio.Semaphore(self._num_at_once)
                threading.Thread(target=_run, args=[self._loop], name=f"requests to {self._name}", daemon=True).start()
            return self._loop

    async def _ask_in_turn(
        self, failed: threading.Event, request: SamplingRequest, sampling: SamplingParams
    ) -> list[Completion]:
        """Ask when there is a slot. After a failure, what waits of the same call is not sent any more."""
        async with self._slots:
            if failed.is_set():
                raise asyncio.CancelledError
            try:
                return await self.ask(request, sampling)
            except BaseException:
                failed.set()
                raise

    async def _cancel_all(self) -> None:
        interrupted = asyncio.all_tasks() - {asyncio.current_task()}
        for task in interrupted:
            task.cancel()
        await asyncio.gather(*interrupted, return_exceptions=True)
        await self.disconnect()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
