"""An engine that is a server: requests for samples, retried where that is safe, calls that control it, and its life."""

from __future__ import annotations

import asyncio
import logging
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import httpx

from offline_grpo.engine.engine import Engine, ServedBits
from offline_grpo.engine.http import SAFE_TO_RETRY_STATUS, Refused, checked, connection, describe, read, reason
from offline_grpo.engine.server import GRACE_S, Server
from offline_grpo.engine.streaming import Streaming
from offline_grpo.errors import ConfigError, EngineError, require
from offline_grpo.types import Completion, FinishReason, SamplingParams, SamplingRequest, ServedWeights

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""Between the attempts of a request; see `ServerEngine`."""
LOOK_S = 5.0
"""How often a request that waits for its answer checks that the server is alive."""
END_LOOK_S = 0.25
"""The same after a request that has failed, because the server may be ending."""
LOWEST_LOGPROB = -9999.0
"""Servers send this or a lower value for minus infinity, which JSON cannot represent."""

Choice = tuple[Sequence[int], Sequence[float], str]
"""A completion as parsed from an answer: token ids, their logprobs in nats, and the server's finish reason."""


class ServerEngine(Streaming, Engine):
    """Asks a server over HTTP: token ids in, token ids and logprobs out. Each subclass implements one server's API.

    Generation is a pure function of weights, prompt and seed, so a request that failed on the way is sent again: after
    a refused or broken connection, a truncated answer, or a status that asks for it (429, 502, 503, 504). Any other
    status is an error at once. See `Server.watched` for what calls that control the server raise.

    Args:
        server: what to ask. Its death is noticed between attempts, and every few seconds while an answer is awaited.
        eos_ids: tokens that end a completion.
        vocab_size: ids that the trained model can embed and score; a completion with another one is refused.
        sampling: how the run draws; a proof of the weights uses the same temperature.
        is_corrected: training allows for other probabilities than the trainer's, such as those of quantised weights.
        batch_size: requests in flight; each asks for all completions of one prompt.
        timeout_s: for one request, from sending it to the last byte of its answer.
        max_retries: further attempts of a request; the pauses between them double, from half a second to at most ten.

    Attributes:
        num_asked: this process's requests that are under way, by the name of the weights that they ask for.
        path: the endpoint for completions.
        oldest, newest: versions that are supported.
    """

    name: ClassVar[str] = "a server"
    is_local: ClassVar[bool] = False
    path: str
    oldest: ClassVar[tuple[int, ...]]
    newest: ClassVar[tuple[int, ...]]
    pause_modes: ClassVar[tuple[str, ...]] = ("abort",)

    def __init__(
        self,
        *,
        server: Server,
        eos_ids: Sequence[int],
        vocab_size: int,
        batch_size: int,
        timeout_s: float,
        max_retries: int,
        sampling: SamplingParams = SamplingParams(1),  # noqa: B008 - it is frozen
        is_corrected: bool = True,
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
        self.sampling = sampling
        self.is_corrected = is_corrected
        self._idle: list[httpx.AsyncClient] = []  # a connection each: to find one in a pool of 64 takes httpx 9 ms

    # Its life

    def begin(self, model: str, args: Mapping[str, object]) -> None:
        self.server.begin(model, args=args)

    def start(self, model: str, args: Mapping[str, object]) -> None:
        self.server.start(model, args=args)
        log.info("connected to %s %s at %s", self.name, self.check_version(), self.server.base_url)

    def follow(self, base_url: str, pid: int | None) -> None:
        """Ask and watch the server that another process of the run has started. In a Ray cluster it may have moved."""
        if base_url != self.server.base_url:
            self.close()
            self.server.move_to(base_url)
        self.server.watched_pid = pid

    def stop(self) -> None:
        """See `Engine.stop`. A server that was found keeps running."""
        self.close()
        self.server.stop()

    def check_alive(self) -> None:
        self.server.check_alive()

    @property
    def gpus(self) -> Sequence[int] | None:
        return self.server.gpus

    @property
    def found_at(self) -> str | None:
        return None if self.server.is_managed else self.server.base_url

    @property
    def has_lost_weights(self) -> bool:
        """Whether a server that the run started has ended, or a server that was found was started anew since its
        weights were tagged.
        """
        if self.server.is_managed:
            return self.server.has_ended
        try:
            return self.served_tag() is None
        except Refused:  # it notes no tags, because it takes adapters alone: these are loaded anew whatever it has
            return False

    # Control

    def get(self, path: str) -> httpx.Response:
        """GET `path`, see `ServerApi.get`."""
        return self.server.watched(lambda: self.server.api.get(path), changes=False)

    def post(self, path: str, body: Any = None, *, changes: bool = True, **arguments: Any) -> httpx.Response:
        """POST `path`, see `ServerApi.post`. `changes`: it does more than to read."""
        return self.server.watched(lambda: self.server.api.post(path, body, **arguments), changes=changes)

    def check_version(self) -> str:
        """The server's version; raises ConfigError if it is not from `oldest` to `newest`."""
        version = self.version()
        numbers = re.match(r"\.".join([r"(\d{1,9})"] * len(self.oldest)), version)
        if numbers is None or not self.oldest <= tuple(map(int, numbers.groups())) <= self.newest:
            oldest, newest = (".".join(map(str, limit)) for limit in (self.oldest, self.newest))
            key = "engine.python" if self.server.is_managed else self.server.key
            raise ConfigError(
                f"{self.server.base_url}: {self.name} {version[:40]} answers there, and versions {oldest} to {newest} "
                f"are supported; see {key}"
            )
        return version

    def check_logprobs(self) -> None:
        """See `Engine.check_logprobs`; also raises it for quantised weights, where nothing corrects for them."""
        quantization = None if self.is_corrected else self.quantization()
        fix = f"{self.server.base_url} has {quantization} weights, so other probabilities; use token_truncate"
        require(quantization is None, "train.loss.importance_correction", "none", fix)
        if not self.sampling.is_filtered:
            return
        mode = self.logprobs_mode()
        fix = "top_p, top_k, min_p and penalties need processed_logprobs; start the server so"
        key = "engine.args.logprobs_mode" if self.server.is_managed else f"logprobs_mode of {self.server.key}"
        require(mode in (None, "processed_logprobs"), key, mode, fix)

    @classmethod
    @abstractmethod
    def start_words(cls, model: str, args: Mapping[str, Any], server_args: Mapping[str, Any]) -> list[str]:
        """What people start such a server with, after `python -m`.

        Args:
            args: what every server is started with. `server_args`: what weight sync adds.
        """

    @abstractmethod
    def version(self) -> str:
        """The server's version."""

    @abstractmethod
    def lacks(self, moves: str) -> str | None:
        """What this already running server lacks for the run, as a phrase for the error message; None if nothing.

        Args:
            moves: what weight sync brings, see `SyncRequirements`.
        """

    @abstractmethod
    def load_weights(self, folder: str, *, tag: str, pause_mode: str) -> None:
        """Load the weights of a folder in place of those being served, and note their tag. The server is paused
        meanwhile. After an error it stays paused: it must not serve half-written weights.
        """

    @abstractmethod
    def set_tag(self, tag: str) -> None:
        """Note which weights are being served, once everything written so far has arrived."""

    @abstractmethod
    def served_tag(self) -> str | None:
        """The tag that was noted last; None since the server's start, "" if weights were loaded without a tag."""

    def served_bits(self) -> ServedBits | None:
        """Fingerprints of the weights being served; None from a kind of server that cannot compute them."""
        return None

    def logprobs_mode(self) -> str | None:
        """Of which distribution it returns logprobs; None from a server that does not say so."""
        return None

    def quantization(self) -> str | None:
        """In which format it computes with the weights that it gets, such as fp8; None for their own."""
        return None

    def other_numbers(self, sums: Mapping[str, str]) -> list[str]:
        """Of parameters with other fingerprints, those that do not just have the same numbers in another order, as some
        architectures are served.

        Args:
            sums: see `offline_grpo_fingerprint.sums`.
        """
        return list(sums)

    # Samples

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
