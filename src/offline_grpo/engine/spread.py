"""Samples from several servers at once: each request goes to the one that has the fewest open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import ClassVar

from offline_grpo.engine.server_engine import ServerEngine
from offline_grpo.engine.streaming import Streaming
from offline_grpo.errors import EngineDied, EngineError
from offline_grpo.types import Completion, Metrics, SamplingParams, SamplingRequest, ServedWeights

LOOK_S = 0.1

log = logging.getLogger(__name__)


class SpreadClient(Streaming):
    """A `RolloutClient` over the clients of several servers that serve the same weights.

    All completions of a prompt come from one server, which computes the prompt once; so do the turns of an episode,
    unless that server has more than twice the load of another. Which one it is changes no sample, because seeds belong
    to the requests. What was open at a server that died is asked of the others.

    Args:
        clients: at least one. Each is asked for its own `batch_size` at once; more where others have died.
    """

    is_local: ClassVar[bool] = False

    def __init__(self, clients: Sequence[ServerEngine]) -> None:
        names = ", ".join(client.server.base_url for client in clients)
        super().__init__(names, sum(client.batch_size for client in clients))
        self.serving = list(clients)
        """Those that are asked; replaced as a whole, by the thread of the requests too. Empty where the last one has
        died while another one gets the weights: requests wait for that one.
        """
        self.weights = ServedWeights()
        self._num_open = dict.fromkeys(clients, 0)
        self._num_tokens = dict.fromkeys(clients, 0)  # since the last `metrics`

    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        """See `Streaming.ask`. Raises EngineDied when all servers have."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            while not (serving := self.serving):
                await asyncio.sleep(LOOK_S)
            client = min(serving, key=lambda client: (self._num_open[client], self._num_tokens[client]))
            if request.episode is not None:
                own = serving[request.episode % len(serving)]
                client = own if self._num_open[own] <= 2 * self._num_open[client] + 4 else client
            self._num_open[client] += 1
            try:
                completions = await asyncio.wrap_future(client.submit(request, sampling))
            except EngineDied as death:
                self._continue_without(client, death)
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

    def _continue_without(self, client: ServerEngine, death: EngineDied) -> None:
        before, others = self.serving, [other for other in self.serving if other is not client]
        if not others:
            raise death
        self.serving = others
        if client in before:
            log.warning("sampling continues with %d of the servers: %s", len(others), death)
