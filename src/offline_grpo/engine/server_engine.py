"""An engine that is a server, in the order of its life: settings, start, watch and stop, calls that control it, and
requests for samples, retried where that is safe.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import httpx
import numpy as np
import psutil

from offline_grpo import progress
from offline_grpo.disk import OwnFolder
from offline_grpo.engine.engine import Engine, ServedBits
from offline_grpo.engine.http import (
    HEALTH_TIMEOUT_S,
    RELEASE_S,
    SAFE_TO_RETRY_STATUS,
    Refused,
    ServerApi,
    checked,
    choose_port,
    connection,
    is_loopback,
    plain_url,
    reachable,
    read,
    reason,
)
from offline_grpo.engine.ray_actor import RemoteChild, Room
from offline_grpo.engine.spawn import Child, Lost, Scratch, kept_compiled, visible, without_launch_variables
from offline_grpo.engine.streaming import Streaming, in_background
from offline_grpo.errors import ConfigError, EngineDied, EngineError, require
from offline_grpo.installed import install_command
from offline_grpo.types import (
    LOGPROB_ROUNDING,
    Completion,
    FinishReason,
    SamplingParams,
    SamplingRequest,
    ServedWeights,
)

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # between the attempts of a request; see `ServerEngine`
LOOK_S = 5.0  # how often a request that waits for its answer checks that the server is alive
END_LOOK_S = 0.25  # the same after a request that has failed, because the server may be ending
GRACE_S = 5.0  # how long a dying server may take to exit after a failed request
HEALTH_INTERVAL_S = 2.0  # interval of a server's health checks during a control call
PATIENCE_S = 30.0  # health-check timeout: vLLM's server has one thread, which long responses also keep busy
START_POLL_S, START_SAYS_S = 0.25, 30.0
"""How often a server that starts is looked at, and how often a log says for how long it has been waited for."""
LOWEST_LOGPROB = -9999.0  # servers send this or a lower value for minus infinity, which JSON cannot represent
SHARED_PREFIX = ".weights-"
LONGEST_SOCKET_FOLDER = 107 - len("/") - 36
"""Bytes of a folder in which a socket may have a UUID for its name: the kernel allows 107 for the whole path."""

ELSEWHERE = {
    "host": "engine.host",
    "port": "engine.port",
    "api_key": "engine.api_key",
    "model": "model.train_id",
    "model_path": "model.train_id",
    "worker_extension_cls": "nothing: the run needs its own",
    "middleware": "engine.api_key, whose check it is",
}
"""Options that `engine.args` must not set, and the setting that controls each."""


class Choice(NamedTuple):
    """A completion as parsed from an answer."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]  # nats
    finish_reason: str
    alternatives: Sequence[array[int]] | None = None  # where `SamplingParams.needs_alternatives` has asked for them
    routes: np.ndarray[Any, np.dtype[Any]] | None = None  # the same, see `Completion`


@dataclass(frozen=True, kw_only=True)
class Launcher(ABC):
    """The group `engine`: settings of a server that the run starts, on this machine or another one, and the command
    line that they make. Without `api_key` it asks for none; a run makes one up, see `training_engine`.
    """

    python: str | None
    host: str
    port: int | None
    api_key: str | None = field(repr=False)
    start_timeout_s: float
    args: Any
    env: Any

    name: ClassVar[str]
    package: ClassVar[str]
    variables: ClassVar[Mapping[str, str]]
    """Environment variables that the server needs."""
    tells_of_memory: ClassVar[bool] = False
    """Whether the server makes the file OFFLINE_GRPO_HAS_MEMORY of its environment; see `wait_for_memory`."""

    def __post_init__(self) -> None:
        port_fix = "must be from 1 to 65535, or null for a free one"
        require(self.port is None or 0 < self.port < 65536, "engine.port", self.port, port_fix)
        require(self.start_timeout_s > 0, "engine.start_timeout_s", self.start_timeout_s, "must be above 0")
        python_fix = "no such interpreter; null takes the one that runs this"
        require(self.python is None or os.access(self.python, os.X_OK), "engine.python", self.python, python_fix)
        for name, value in self.args.items():
            instead = ELSEWHERE.get(name.replace("-", "_"))
            require(instead is None, f"engine.args.{name}", value, f"is decided elsewhere; set {instead}")
        key_fix = "on that address others could control the server; set engine.api_key, or engine.host=127.0.0.1"
        require(self.api_key is not None or is_loopback(self.host), "engine.host", self.host, key_fix)

    @abstractmethod
    def command(self, model: str, port: int, args: Mapping[str, object]) -> list[str]:
        """The command line that serves `model`, with `args` of this start on top of the configured ones."""

    def environment(self, env: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
        """The whole environment of the command: `env`, over which `engine.env` wins, and the GPUs that it may see; None
        for those that we see.
        """
        chosen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": visible(gpus)}
        given = {name: str(value) for name, value in self.env.items()}
        return {**without_launch_variables(os.environ), **chosen, **self.variables, **env, **given}

    def key_args(self, folder: Path) -> list[str]:
        """Options for a key, which must not stand on the command line: other users can read that. May write to the
        private `folder`.
        """
        return []

    def check_installed(self) -> None:
        """Raise ConfigError if the server's package is certainly missing. Another interpreter is not looked into."""
        if self.python is None and "PYTHONPATH" not in self.env and find_spec(self.package) is None:
            extra = f"install it by `{install_command('vllm')}`, or " if self.package == "vllm" else ""
            fix = f"name an interpreter that has {self.name}, or the generation.base_url of a server that is running"
            raise ConfigError(f"engine.python=null: {self.name} is not installed in this environment; {extra}{fix}")

    def expecting(self, num_sequences: int) -> Self:
        """The same engine, ready for as many sequences at once."""
        return self

    def spawn(
        self,
        model: str,
        args: Mapping[str, object],
        port: int,
        gpus: Sequence[int] | None,
        log_path: Path,
        scratch: Path,
    ) -> Child:
        """Start the server on this machine, and do not wait. `scratch` goes away with it."""
        # What an earlier start has said of its memory is not about this one.
        for file in scratch.glob("has_memory*"):
            file.unlink()
        ours = {"OFFLINE_GRPO_HAS_MEMORY": str(scratch / "has_memory")}

        # Its sockets and temporary files go away with the scratch folder, and its compiled kernels stay. On a machine
        # without /dev/shm the folder's path may be too long for a socket.
        folder = scratch / "tmp"
        if len(os.fsencode(folder)) <= LONGEST_SOCKET_FOLDER:
            folder.mkdir(exist_ok=True)
            ours |= {"TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder), **kept_compiled()}
        command = self.command(model, port, args) + self.key_args(scratch)
        return Child(command, env=self.environment(ours, gpus), log_path=log_path, remove=scratch)


def num_told(top_k: int) -> int:
    """Of how many tokens a server is asked, so that all that top-k keeps are among them. It keeps more than k if others
    are as probable as the k-th, which happens in 16 bits, the more often the larger k is.
    """
    return top_k + top_k // 2 + 64


def flags(settings: Mapping[str, object]) -> list[str]:
    """`{"max_model_len": 512, "enable_lora": True, "seed": None}` as `--max-model-len 512 --enable-lora`."""
    words = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


class ServerEngine(Streaming, Engine):
    """Asks a server over HTTP: token ids in, token ids and logprobs out. Each subclass implements one server's API. The
    server is one that the run starts, watches and stops, or one that is found at a URL.

    Generation is a pure function of weights, prompt and seed, so a request that failed on the way is sent again: after
    a refused or broken connection, a truncated answer, or a status that asks for it (429, 502, 503, 504). Any other
    status is an error at once. The server's death is noticed between attempts, and every few seconds while an answer is
    awaited.

    Args:
        batch_size: requests in flight; each asks for all completions of one prompt.
        timeout_s: for one request, from sending it to the last byte of its answer.
        max_retries: further attempts of a request; the pauses between them double, from half a second to at most ten.
        eos_ids: tokens that end a completion. These five are known once the model is loaded.
        banned_ids: tokens that are never sampled, with pictures those in whose place their features come.
        vocab_size: ids that the trained model can embed and score; a completion with another one is refused.
        sampling: how the run draws; a proof of the weights uses the same temperature.
        is_corrected: training allows for other probabilities than the trainer's, such as those of quantised weights.
        base_url, api_key: of a server that is found. `url_key`: the setting that `base_url` comes from, for messages.
        launcher: starts a server. `number`: of several; the port is the configured one plus this.
        log_dir, log_numbers: output goes to `server_N.log` there, N from numbers that servers of one folder share.
        gpus: that a server of the run may see; None: all, or none.
        room: of the Ray cluster, where the server is started; None for this machine.

    Attributes:
        num_asked: this process's requests that are under way, by the name of the weights that they ask for.
        path: the endpoint for completions.
        oldest, newest: versions that are supported.
        watched_pid: of a server that another process of the run started; its exit is detected.
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
        batch_size: int,
        timeout_s: float,
        max_retries: int,
        eos_ids: Sequence[int] = (),
        banned_ids: Sequence[int] = (),
        vocab_size: int = 0,
        sampling: SamplingParams = SamplingParams(1),  # noqa: B008 - it is frozen
        is_corrected: bool = True,
        base_url: str | None = None,
        api_key: str | None = None,
        url_key: str = "generation.base_url",
        launcher: Launcher | None = None,
        log_dir: Path = Path(),
        number: int = 0,
        log_numbers: Iterator[int] | None = None,
        gpus: Sequence[int] | None = None,
        room: Room | None = None,
    ) -> None:
        self.timeout_s, self.max_retries, self.banned_ids = timeout_s, max_retries, banned_ids
        self.eos_ids, self.vocab_size, self.sampling, self.is_corrected = eos_ids, vocab_size, sampling, is_corrected
        self.url_key, self.launcher, self.log_dir, self.number, self.gpus = url_key, launcher, log_dir, number, gpus
        self._log_numbers, self._room, self.api_key = log_numbers or count(), room, api_key
        self.is_managed = launcher is not None
        self.weights = ServedWeights()
        self.num_asked: Counter[str] = Counter()
        self._child: Child | RemoteChild | None = None
        self._scratch: OwnFolder | None = None
        self._began_s: float | None = None  # set from `begin` until the server is ready
        self._idle: list[httpx.AsyncClient] = []  # a connection each: to find one in a pool of 64 takes httpx 9 ms

        # The address is decided now, because other processes of the run are told it before the server is there. In a
        # cluster it is known once a machine has room.
        if launcher is not None:
            self.api_key, self._port = launcher.api_key, None if launcher.port is None else launcher.port + number
            base_url = "http://a-machine-of-the-cluster"
            if room is None:
                self._port = choose_port(launcher.host, self._port, key="engine.port")
                base_url = f"http://{reachable(launcher.host)}:{self._port}"
        assert base_url is not None, "a server is either found or started"
        super().__init__("", batch_size)
        self.follow(base_url)

    # It starts

    def begin(self, model: str, args: Mapping[str, object]) -> None:
        """Does not wait for room in a cluster either. Raises ConfigError if the port is taken."""
        if self.launcher is None or self._began_s is not None:
            return
        log_path = self.log_dir / f"server_{next(self._log_numbers)}.log"
        if self._room is not None:
            words = self.launcher, model, args, self._port, log_path.absolute()
            self._child = RemoteChild(self._room, self.number, words, self.follow)
        else:
            # The processes of one that was killed may still have the port.
            port = choose_port(self.launcher.host, self._port, key="engine.port", wait_s=RELEASE_S)
            log.info("starting %s; command and output in %s", self.launcher.name, log_path)
            self._child = self.launcher.spawn(model, args, port, self.gpus, log_path, self.scratch)
        self._began_s = time.monotonic()

    def start(self, model: str, args: Mapping[str, object]) -> None:
        """Wait until the server is ready, or see that one that is found is healthy; then check its version."""
        if self.launcher is None:
            try:
                self.api.get("/health", timeout_s=HEALTH_TIMEOUT_S)
            except EngineError as error:
                raise EngineError(f"{self.url_key}={self.base_url}: no healthy server answers ({error})") from error
        else:
            # Where the machine of a server is lost before it is ready, it starts on another one.
            self.begin(model, args)
            began_s = self._began_s
            assert began_s is not None
            while self._began_s is not None:
                try:
                    self._wait()
                    self._began_s = None
                except Lost as loss:
                    log.warning("%s It is started elsewhere.", loss)
                    self._began_s = None
                    self.begin(model, args)
            seconds = time.monotonic() - began_s
            log.info("%s is ready at %s after %.0f s", self.launcher.name, self.base_url, seconds)

        # Other versions may take the same requests and mean something else by them.
        version = self.version()
        numbers = re.match(r"\.".join([r"(\d{1,9})"] * len(self.oldest)), version)
        if numbers is None or not self.oldest <= tuple(map(int, numbers.groups())) <= self.newest:
            oldest, newest = (".".join(map(str, limit)) for limit in (self.oldest, self.newest))
            key = "engine.python" if self.is_managed else self.url_key
            raise ConfigError(
                f"{self.base_url}: {self.name} {version[:40]} answers there, and versions {oldest} to {newest} "
                f"are supported; see {key}"
            )
        log.info("connected to %s %s at %s", self.name, version, self.base_url)

    def wait_for_memory(self) -> None:
        """Wait until a server that `begin` started has taken its GPU's memory. Until then it profiles free memory: it
        counts others' allocations as its own, and exits if they free any. Raises like `start`.
        """
        if self._began_s is not None:
            self._wait(self.scratch / "has_memory")

    def _wait(self, file: Path | None = None) -> None:
        """Wait until a server that has begun is healthy, or has made `file`. Raises like `start`."""
        launcher, child, began_s, said_s = self.launcher, self._child, self._began_s, time.monotonic()
        assert launcher is not None
        assert child is not None
        assert began_s is not None
        with progress.phase("start server"):
            while True:
                # It may have ended, wait for room in a cluster, or be ready.
                self.check_alive()
                if child.is_placed:
                    if file is not None and file.exists():
                        return
                    with suppress(EngineError):  # it does not answer yet
                        self.api.get("/health", timeout_s=HEALTH_TIMEOUT_S)
                        return

                # A person hears of it every half a minute, and it has not forever.
                now, what = time.monotonic(), f"{launcher.name} at {self.base_url}"
                if now - began_s > launcher.start_timeout_s:
                    child.stop()
                    limit = f"{launcher.start_timeout_s:g} s (engine.start_timeout_s)"
                    raise EngineError(f"{what} was not ready after {limit} and {child.how_it_ended()}")
                if now - said_s >= START_SAYS_S:
                    said_s = now  # in the log alone: the screen has the phase
                    log.info("waiting for %s: %.0f s", what, now - began_s, extra=progress.LOG_ALONE)
                time.sleep(START_POLL_S)

    def follow(self, base_url: str, pid: int | None = None) -> None:
        """Ask the server at this address; in a Ray cluster it may have moved. Watch the process `pid`, if another
        process of the run has started it.
        """
        if (url := plain_url(base_url)) != self.base_url:
            self.close()
            self.base_url, self.api = url, ServerApi(url, self.api_key)
        self.watched_pid = pid

    # It runs

    @property
    def pid(self) -> int | None:
        """Of what watches a server of the run on this machine; None for others, or one that is not running."""
        return None if self._child is None else self._child.pid

    @property
    def scratch(self) -> Path:
        """A folder for what the server reads from us: in shared memory, or for a server on another machine in the run's
        folder, which it must see. It is deleted with the server, for a found one by `stop` or the next run.
        """
        if self._scratch is None:
            self._scratch = Scratch() if self._room is None else OwnFolder(self.log_dir.absolute(), SHARED_PREFIX)
        if isinstance(self._child, RemoteChild) and not self._child.sees(self._scratch.path):
            raise ConfigError(
                f"hydra.run.dir={self.log_dir}: the server's machine has to read weights there, and does not see this "
                "folder; put it on a file system that all machines share, or use weight_sync=nccl"
            )
        return self._scratch.path

    def check_alive(self, *, grace_s: float = 0.0) -> None:
        """Raise EngineDied if a server that the run started has ended, or ends within `grace_s` seconds."""
        # A server of this process has a guardian, which knows how it ended; of another process's only the pid is known.
        deadline = time.monotonic() + grace_s
        while self._child is not None or self.watched_pid is not None:
            if self._child is not None:
                if (end := self._child.how_it_ended()) is not None:
                    raise EngineDied(f"the server {end}")
            else:
                is_running = False
                with suppress(psutil.NoSuchProcess):
                    is_running = psutil.Process(self.watched_pid).status() != psutil.STATUS_ZOMBIE
                if not is_running:
                    what = f"the server at {self.base_url}, which another process of this run started,"
                    raise EngineDied(f"{what} has ended.")
            if time.monotonic() >= deadline:
                return
            time.sleep(0.1)

    def check_healthy(self) -> None:
        """Raise EngineDied if a server of the run has ended or is unhealthy: after its engine dies, it exits only once
        requests end.
        """
        self.check_alive()
        if self._child is not None:
            try:
                self.api.get("/health", timeout_s=PATIENCE_S)
            except EngineError:
                self._give_up("the server was unhealthy")

    def _give_up(self, why: str) -> None:
        """Stop a server of the run, whose state is unknown. Raises EngineDied."""
        if self._child is not None:
            self._child.stop()
            why = f"{why} and {self._child.how_it_ended()}"
        raise EngineDied(why)

    @property
    def has_lost_weights(self) -> bool:  # type: ignore[override]
        """Whether a server that the run started has ended, or a server that was found was started anew since its
        weights were tagged.
        """
        if self.is_managed:
            with suppress(EngineDied):
                self.check_alive()
                return False
            return True
        with suppress(Refused):  # it notes no tags, as it takes adapters alone: these are loaded anew whatever it has
            return self.served_tag() is None
        return False

    def stop(self) -> None:
        """A server that was found keeps running."""
        self.close()
        if (child := self._child) is not None:
            # The log of a server that nobody has waited for does not say why the run ends.
            is_unasked = self._began_s is not None and isinstance(child, Child) and child.how_it_ended() is None
            child.stop()
            if is_unasked and isinstance(child, Child):
                child.log_path.unlink(missing_ok=True)
            self._child = self._began_s = None
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    # It is controlled

    def has(self, path: str) -> bool:
        """Whether there is a route for POST `path`; asked with GET, which such routes refuse with status 405."""
        return self.api.get(path, also=(404, 405)).status_code != 404

    def get(self, path: str) -> httpx.Response:
        """GET `path`, watched."""
        return self._watched(partial(self.api.get, path), changes=False)

    def post(self, path: str, body: object = None, *, changes: bool = True, **options: Any) -> httpx.Response:
        """POST `path`, watched; `options` are those of `ServerApi.call`. `changes`: it does more than to read."""
        return self._watched(partial(self.api.post, path, body, **options), changes=changes)

    def _watched(self, call: Callable[[], httpx.Response], *, changes: bool) -> httpx.Response:
        """Make a control call, and check meanwhile the health of a server of the run: if its engine has died, the call
        would block until its timeout. One that only reads is made once more where no answer came. Raises EngineDied
        where the server has ended, is unhealthy, or has not answered, and EngineError where it refused.
        """
        outcome = in_background(call)
        while True:
            try:
                return outcome.result(timeout=HEALTH_INTERVAL_S)
            except TimeoutError:
                self.check_healthy()
            except EngineError as error:
                # A refusal of a living server is an answer. Without one nobody knows how much of the call was done.
                self.check_alive(grace_s=GRACE_S)
                if isinstance(error, Refused):
                    raise
                if not changes:
                    return self._watched(call, changes=True)  # once
                self._give_up(str(error))

    def check_logprobs(self) -> None:
        """Also raises ConfigError for quantised weights that training does not correct for."""
        quantization = None if self.is_corrected else self.describe().get("quantization")
        fix = f"{self.base_url} has {quantization} weights, so other probabilities; use token_truncate"
        require(quantization is None, "train.loss.importance_correction", "none", fix)
        if self.sampling.is_filtered or self.banned_ids:
            mode = self.describe().get("logprobs_mode")
            fix = "top_p, top_k, min_p, penalties and pictures need processed_logprobs; start the server so"
            key = "engine.args.logprobs_mode" if self.is_managed else f"logprobs_mode of {self.url_key}"
            require(mode in (None, "processed_logprobs"), key, mode, fix)
        if self.sampling.needs_alternatives:
            most, needed = self.describe().get("max_logprobs", -1), min(num_told(self.sampling.top_k), self.vocab_size)
            fix = f"training with generation.top_k={self.sampling.top_k} asks for {needed} of each token; use as many"
            key = "engine.args.max_logprobs" if self.is_managed else f"max_logprobs of {self.url_key}"
            require(most == -1 or most >= needed, key, most, fix)

    # What each kind of server does in its own way

    @classmethod
    @abstractmethod
    def start_words(cls, model: str, args: Mapping[str, object], server_args: Mapping[str, Any]) -> list[str]:
        """What people start such a server with, after `python -m`: `args`, and `server_args` for weight sync."""

    @abstractmethod
    def version(self) -> str:
        """The server's version."""

    @abstractmethod
    def lacks(self, moves: str) -> str | None:
        """What this running server lacks for weight sync that `moves` something (see `SyncRequirements`), as a phrase
        for the error message; None if nothing.
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

    def describe(self) -> dict[str, Any]:
        """What it says of itself, if it does: `logprobs_mode`, of which distribution it returns logprobs;
        `max_logprobs`, of how many tokens (-1: all); `max_lora_rank`, of adapters that it has room for; and
        `quantization`, in which format it computes with the weights that it gets, such as fp8 (None: their own).
        """
        return {}

    def other_numbers(self, sums: Mapping[str, str]) -> list[str]:
        """Of parameters with other fingerprints, those whose numbers are not just in another order, as some
        architectures are served. `sums` are the trainer's, see `offline_grpo_weights.sums`.
        """
        return list(sums)

    @abstractmethod
    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        """The JSON that asks `weights` for the request's completions, the j-th drawn with `seed + j`."""

    @abstractmethod
    def choices(self, answer: Any, request: SamplingRequest) -> list[Choice]:
        """The completions in the server's answer, in order. May raise what `http.read` expects."""

    # It samples

    def sampler_settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """Settings that all servers call alike. All are given, so that no default of a server applies. Special tokens
        stay in its text, which only the server reads, to find stop strings.
        """
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": list(self.eos_ids),
            "skip_special_tokens": False,
        }

    async def disconnect(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()

    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        """Sends a request again that the server aborted: a partial completion is useless. An abort by a push is no
        failed attempt.
        """
        if request.max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=request.max_new_tokens)
        num_aborted = 0
        while num_aborted <= self.max_retries:
            # Ask for the newest weights. A push may replace them while the request is open.
            weights = self.weights
            self.num_asked[weights.name] += 1
            try:
                answer = await self._send(self.body(request, sampling, weights))
            except Refused:
                if self.weights is weights:
                    raise
                continue  # a push came between, and the adapter that the request named is no more
            finally:
                self.num_asked -= Counter([weights.name])  # and without those that are 0

            # Only what was asked for, and is complete, becomes a rollout.
            completions = read(
                answer, lambda parsed, version=weights.version: self._completions(parsed, request, sampling, version)
            )
            if all(completion.finish_reason is not FinishReason.ABORT for completion in completions):
                return completions

            # The push that aborted it is not over yet: it says when there are new weights.
            await self._raise_if_dying(weights)
            num_aborted += self.weights is weights
        what = f"the server aborted the request, {self.max_retries + 1} times; does another client pause it?"
        raise EngineError(f"{self.base_url}{self.path}: {what}")

    async def _send(self, body: Mapping[str, Any]) -> httpx.Response:
        """POST a request for samples, in up to `max_retries` + 1 attempts. Raises EngineDied or EngineError."""
        failure, url = "", f"{self.base_url}{self.path}"
        for attempt in range(self.max_retries + 1):
            # A server that has ended gets no further attempt.
            if attempt > 0:
                await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))
                await asyncio.to_thread(self.check_alive)

            # What went wrong on the way may go right the next time; what took too long would take so long again.
            try:
                answer = await self._attempt(body)
            except TimeoutError as error:
                fix = f"raise {self.url_key.partition('.')[0]}.timeout_s, or look at the server"
                await asyncio.to_thread(self.check_healthy)
                raise EngineError(f"{url}: no answer after {self.timeout_s:g} s; {fix}") from error
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__}: {error}"[:200]
                continue
            if answer.status_code in SAFE_TO_RETRY_STATUS:
                failure = f"status {answer.status_code} ({reason(answer)})"
                continue

            # Any other refusal is one for good, unless it is the first sign of the server's end.
            if answer.status_code >= 500:
                await self._raise_if_dying(self.weights)
            return checked(answer)
        await self._raise_if_dying(self.weights)
        await asyncio.to_thread(self.check_healthy)
        fix = f"is the server running, and {self.url_key} its address?"
        raise EngineError(f"{url}: {failure}, after {self.max_retries + 1} attempts; {fix}")

    async def _attempt(self, body: Mapping[str, Any]) -> httpx.Response:
        """One attempt. Looks every few seconds whether the server still runs, and raises EngineDied where it does not:
        a machine that is lost closes no connection.
        """
        # The connection goes back once nothing is under way on it, so that the next request finds it free.
        http = self._idle.pop() if self._idle else None
        http = http or httpx.AsyncClient(**connection(self.base_url, self.api_key), timeout=None)
        try:
            async with asyncio.timeout(self.timeout_s):
                task = asyncio.create_task(http.post(self.path, json=body))
                try:
                    while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                        await asyncio.to_thread(self.check_alive)
                    return task.result()
                finally:
                    if not task.done():
                        task.cancel()
                        await asyncio.wait([task])
        finally:
            self._idle.append(http)

    async def _raise_if_dying(self, weights: ServedWeights) -> None:
        """After a failure, wait up to `GRACE_S` for the server to end, and raise EngineDied if it does. Return at once
        when a push has replaced `weights`: that explains the failure.
        """
        for _ in range(round(GRACE_S / END_LOOK_S)):
            await asyncio.to_thread(self.check_alive)
            if self.weights is not weights:
                return
            await asyncio.sleep(END_LOOK_S)

    def _completions(
        self, parsed: Any, request: SamplingRequest, sampling: SamplingParams, version: int
    ) -> list[Completion]:
        """The parsed answer as completions. Raises what `http.read` expects unless they are what was asked for."""
        # Greedy completions of a prompt are all alike, so a server may be asked for one.
        choices = [Choice(*choice) for choice in self.choices(parsed, request)]  # a kind of one's own may give tuples
        if sampling.temperature == 0 and len(choices) == 1:
            choices = choices * request.num_completions
        if len(choices) != request.num_completions:
            raise ValueError(f"{len(choices)} completions where {request.num_completions} were asked for")

        # Of each: the number of tokens; alternatives; ids in the model's vocabulary; finite logprobs; then the routes.
        completions = []
        for token_ids, logprobs, why, beside, routes in choices:
            finish, most = FinishReason(why), sampling.max_new_tokens
            if not (finish is not FinishReason.ABORT) <= len(token_ids) <= most:
                raise ValueError(f"{len(token_ids)} tokens where 1 to {most} were asked for")
            if len(logprobs) != len(token_ids):
                raise ValueError(f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
            alternatives, extremes = None, [min(token_ids, default=0), max(token_ids, default=0)]
            if sampling.needs_alternatives:
                alternatives = tuple(beside or ())
                ids = np.frombuffer(b"".join(alternatives), np.int32)
                extremes += [ids.min(initial=0), ids.max(initial=0)]
                if len(alternatives) != len(token_ids):
                    raise ValueError(f"alternatives of {len(alternatives)} tokens for {len(token_ids)}")
                largest = 1 + max(map(len, alternatives), default=0)
                if num_told(sampling.top_k) <= largest < self.vocab_size:
                    fix = f"more tokens are as probable as the last one of generation.top_k={sampling.top_k}; lower it"
                    about = f"a token was drawn from {largest}, or more than it tells"
                    raise EngineError(f"{self.base_url}: {about}: {fix}")
            for token in extremes:
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"a token has id {token}, and the model that is trained has {self.vocab_size}")
            for position, logprob in enumerate(logprobs):
                if not LOWEST_LOGPROB < logprob <= LOGPROB_ROUNDING:  # NaN fails this too
                    cause = f"(weights version {version}): these, or activations, are probably not finite"
                    raise ValueError(f"the logprob of token {position} is {logprob} {cause}")
            num_tokens, num_routed = len(request.prompt_ids) + len(token_ids), 0 if routes is None else len(routes)
            if sampling.needs_routes and not num_tokens - 1 <= num_routed <= num_tokens:
                raise ValueError(f"routes of {num_routed} tokens for {num_tokens}")
            numbers, versions = tuple(map(float, logprobs)), (version,) * len(token_ids)
            completions.append(Completion(tuple(token_ids), numbers, finish, versions, alternatives, routes))
        return completions
