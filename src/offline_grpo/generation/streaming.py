"""Many requests at a time: how a client takes them from an iterable, sends them, and hands out what is answered.

The public side is synchronous. Requests run in an event loop on a thread of their own, so that a signal to the main thread interrupts
the wait at once, and connections outlive a call.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import islice
from queue import Empty, SimpleQueue

from offline_grpo.engine.background import start_loop
from offline_grpo.errors import EngineError
from offline_grpo.types import Completion, CompletionStream, SamplingParams, SamplingRequest

CLOSED_S = 1.0
"""How often a wait for answers looks whether the client was closed meanwhile."""


class Streaming(ABC):
    """`RolloutClient.generate` for a client that says how one request is asked.

    Args:
        name: what is asked, for messages and the thread.
        num_at_once: requests of a call that are in flight.
    """

    def __init__(self, name: str, num_at_once: int) -> None:
        self._name = name
        self._num_at_once = num_at_once
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changing_loop = threading.RLock()  # several threads may ask at once, and connections belong to one loop

    @abstractmethod
    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        """The request's completions. Runs in the client's own loop; raises what `generate` does."""

    async def disconnect(self) -> None:  # noqa: B027 - not every client has connections
        """Close connections; no request is open any more."""

    def generate(self, requests: Iterable[SamplingRequest], sampling: SamplingParams) -> CompletionStream:
        """See `RolloutClient.generate`. As many requests as are in flight wait behind them. Several threads may call it.

        Raises:
            EngineDied: the server, one that this run started, has ended.
            EngineError: it cannot be reached, refused, or answered something else than what was asked for.
        """
        loop = self._running_loop()
        slots = asyncio.Semaphore(self._num_at_once)
        numbered = enumerate(requests)
        unanswered: dict[int, Future[list[Completion]]] = {}
        answered: SimpleQueue[int] = SimpleQueue()
        try:
            while True:
                for index, request in islice(numbered, 2 * self._num_at_once - len(unanswered)):
                    future = asyncio.run_coroutine_threadsafe(self._ask_in_turn(slots, request, sampling), loop)
                    unanswered[index] = future
                    future.add_done_callback(lambda _, index=index: answered.put(index))
                if not unanswered:
                    return
                try:
                    index = answered.get(timeout=CLOSED_S)
                except Empty:
                    if self._loop is not loop:  # closed by another thread, perhaps before it knew of the newest request
                        raise EngineError(f"{self._name}: the client was closed while it waited") from None
                    continue
                yield index, unanswered.pop(index).result()
        finally:  # a failure, a signal, or a caller who closed the iterator: cancel what is still open
            for future in unanswered.values():
                future.cancel()

    def submit(self, request: SamplingRequest, sampling: SamplingParams) -> Future[list[Completion]]:
        """Ask at once, whatever else is in flight. Whoever cancels the future abandons the request."""
        with self._changing_loop:  # so that no request gets into a loop that has ended
            return asyncio.run_coroutine_threadsafe(self.ask(request, sampling), self._running_loop())

    def close(self) -> None:
        """Close the connections and end the thread; what other threads wait for is cancelled. The client can be used again afterwards."""
        with self._changing_loop:
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._changing_loop:
            if self._loop is None:
                self._loop = start_loop(f"requests to {self._name}")
            return self._loop

    async def _ask_in_turn(self, slots: asyncio.Semaphore, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        await slots.acquire()
        completions = await self.ask(request, sampling)
        slots.release()  # not after a failure: what waits must not be sent while the caller learns of it
        return completions

    async def _cancel_all(self) -> None:
        interrupted = asyncio.all_tasks() - {asyncio.current_task()}
        for task in interrupted:
            task.cancel()
        await asyncio.gather(*interrupted, return_exceptions=True)
        await self.disconnect()
