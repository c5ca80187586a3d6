"""What clients of inference servers share: retries where they are safe, and checks of what would be silently wrong."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import httpx

from offline_grpo.engine.engine import ServerControl
from offline_grpo.engine.http import SAFE_TO_RETRY_STATUS, Refused, checked, connection, describe, read, reason
from offline_grpo.engine.server import GRACE_S, Server
from offline_grpo.errors import EngineError
from offline_grpo.generation.streaming import Streaming
from offline_grpo.types import Completion, FinishReason, SamplingParams, SamplingRequest, ServedWeights

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""Between the attempts of a request; see `ServerClient`."""
LOOK_S = 5.0
"""How often a request that waits for its answer checks that the server is alive."""
END_LOOK_S = 0.25
"""The same after a request that has failed, because the server may be ending."""
LOWEST_LOGPROB = -9999.0
"""Servers send this or a lower value for minus infinity, which JSON cannot represent."""

Choice = tuple[Sequence[int], Sequence[float], str]
"""A completion as parsed from an answer: token ids, their logprobs in nats, and the server's finish reason."""


class ServerClient(Streaming):
    """A `RolloutClient` that asks a server over HTTP: token ids in, token ids and logprobs out. Each subclass
    implements one server's API: `path` is its endpoint for completions, `engine_name` the kind of server.

    Generation is a pure function of weights, prompt and seed, so a request that failed on the way is sent again: after
    a refused or broken connection, a truncated answer, or a status that asks for it (429, 502, 503, 504). Any other
    status is an error at once.

    Args:
        server: what to ask. Its death is noticed between attempts, and every few seconds while an answer is awaited.
        eos_ids: tokens that end a completion.
        vocab_size: ids that the trained model can embed and score; a completion with another one is refused.
        batch_size: requests in flight; each asks for all completions of one prompt.
        timeout_s: for one request, from sending it to the last byte of its answer.
        max_retries: further attempts of a request; the pauses between them double, from half a second to at most ten.

    Attributes:
        num_asked: this process's requests that are under way, by the name of the weights that they ask for.
    """

    engine_name: ClassVar[str | None]
    control: ClassVar[type[ServerControl]]
    """Of a server as it is now: a new one after each start."""
    path: str

    def __init__(
        self,
        *,
        server: Server,
        eos_ids: Sequence[int],
        vocab_size: int,
        batch_size: int,
        timeout_s: float,
        max_retries: int,
    ) -> None:
        super().__init__(server.base_url, batch_size)
        self.weights = ServedWeights()
        self.num_asked: Counter[str] = Counter()
        self.server = server
        self._eos_ids = list(eos_ids)
        self._ids = range(vocab_size)
        self.batch_size = batch_size
        self.timeout_s = timeout_s
        self.max_retries = max_retries
        self._idle: list[httpx.AsyncClient] = []  # a connection each: to find one in a pool of 64 takes httpx 9 ms

    def sampler_settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """Those that all servers call alike. Defaults of a server are none of ours. Nobody reads its text, in which it
        looks for stop strings.
        """
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": self._eos_ids,
            "skip_special_tokens": False,
        }

    @abstractmethod
    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        """The JSON that asks `weights` for the request's completions, the j-th drawn with `seed + j`."""

    @abstractmethod
    def choices(self, answer: Any, request: SamplingRequest) -> list[Choice]:
        """The completions in the server's answer, in order. May raise what `http.read` expects."""

    async def disconnect(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()

    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        if self._idle:
            http = self._idle.pop()
        else:
            http = httpx.AsyncClient(**connection(self.server.base_url, self.server.api_key), timeout=None)
        if request.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=request.max_new_tokens)
        try:
            return await self._complete(http, request, sampling)
        finally:
            self._idle.append(http)

    async def _complete(
        self, http: httpx.AsyncClient, request: SamplingRequest, sampling: SamplingParams
    ) -> list[Completion]:
        """Sends a request again that the server aborted: a partial completion is useless. One that a push has aborted
        is no failed attempt.
        """
        num_aborted = 0
        while num_aborted <= self.max_retries:
            weights = self.weights  # read once: a push may replace them while the request is open
            self.num_asked[weights.name] += 1
            try:
                answer = await self._post(http, self.body(request, sampling, weights))
            except Refused:
                if self.weights is weights:
                    raise
                continue  # a push came between, and the adapter that the request named is no more
            finally:
                self.num_asked -= Counter([weights.name])  # and without those that are 0
            completions = read(
                answer, lambda parsed, version=weights.version: self._completions(parsed, request, sampling, version)
            )
            if all(completion.finish_reason is not FinishReason.ABORT for completion in completions):
                return completions
            await self._look(weights)  # the push that aborted it is not over
            num_aborted += self.weights is weights
        times = f"{self.max_retries + 1} times"
        raise EngineError(f"{self._url}: the server aborted the request, {times}; does another client pause it?")

    async def _post(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> httpx.Response:
        failure = ""
        for attempt in range(self.max_retries + 1):
            if attempt > 0:
                await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))
                await asyncio.to_thread(self.server.check_alive)
            try:
                answer = await self._exchange(http, body)
            except TimeoutError as error:
                group = self.server.key.partition(".")[0]
                fix = f"raise {group}.timeout_s, or look at the server"
                await asyncio.to_thread(self.server.check_healthy)
                raise EngineError(f"{self._url}: no answer after {self.timeout_s:g} s; {fix}") from error
            except httpx.HTTPError as error:
                failure = describe(error)
                continue
            if answer.status_code in SAFE_TO_RETRY_STATUS:
                failure = f"status {answer.status_code} ({reason(answer)})"
                continue
            if answer.status_code >= 500:
                await self._look(self.weights)
            return checked(answer)
        await self._look(self.weights)
        await asyncio.to_thread(self.server.check_healthy)
        fix = f"is the server running, and {self.server.key} its address?"
        raise EngineError(f"{self._url}: {failure}, after {self.max_retries + 1} attempts; {fix}")

    async def _exchange(self, http: httpx.AsyncClient, body: Mapping[str, Any]) -> httpx.Response:
        """The response; EngineDied where the server ends first: a machine that is lost closes no connection."""
        async with asyncio.timeout(self.timeout_s):
            task = asyncio.create_task(http.post(self.path, json=body))
            try:
                while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                    await asyncio.to_thread(self.server.check_alive)
                return task.result()
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait([task])

    async def _look(self, weights: ServedWeights) -> None:
        """Raise EngineDied where a failure was the first sign of the server's death. A push that has replaced `weights`
        meanwhile explains it.
        """
        for _ in range(round(GRACE_S / END_LOOK_S)):
            await asyncio.to_thread(self.server.check_alive)
            if self.weights is not weights:
                return
            await asyncio.sleep(END_LOOK_S)

    @property
    def _url(self) -> str:
        return f"{self.server.base_url}{self.path}"

    def _completions(
        self, parsed: Any, request: SamplingRequest, sampling: SamplingParams, version: int
    ) -> list[Completion]:
        choices = self.choices(parsed, request)
        if len(choices) != request.num_completions:
            raise ValueError(f"{len(choices)} completions where {request.num_completions} were asked for")
        return [self._completion(*choice, sampling.max_new_tokens, version) for choice in choices]

    def _completion(
        self, token_ids: Sequence[int], logprobs: Sequence[float], reason: str, max_new_tokens: int, version: int
    ) -> Completion:
        finish = FinishReason(reason)
        if not (finish is not FinishReason.ABORT) <= len(token_ids) <= max_new_tokens:
            raise ValueError(f"{len(token_ids)} tokens where 1 to {max_new_tokens} were asked for")
        if len(logprobs) != len(token_ids):
            raise ValueError(f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
        wrong = [token for token in (min(token_ids, default=0), max(token_ids, default=0)) if token not in self._ids]
        if wrong:
            raise ValueError(f"a token has id {wrong[0]}, and the model that is trained has {len(self._ids)}")
        for position, logprob in enumerate(logprobs):
            if not LOWEST_LOGPROB < logprob <= 1e-3:  # NaN fails this too; the 1e-3 is room for rounding
                cause = "the served weights, or their activations, are probably not finite"
                raise ValueError(f"the logprob of token {position} is {logprob} (weights version {version}): {cause}")
        return Completion(tuple(token_ids), tuple(map(float, logprobs)), finish, (version,) * len(token_ids))
