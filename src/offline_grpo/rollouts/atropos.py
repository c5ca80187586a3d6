"""Rollouts that environments have sampled and scored elsewhere, from the queue of an Atropos API (`run-api`).

The API is a queue of groups in the memory of one process. What its answers do not say:

- It forms all batches that it has groups for at once, and hands out the newest first. The source takes them all and
  reverses the order: environments stop at three waiting batches, unless they are told otherwise. Batches that were
  taken and not trained on are lost with the run; environments sample more.
- A second registration changes nothing, so the first trainer's settings stay; the first `/batch` lets environments
  register.
- A reset, or groups that came before the registration, leave it without a trainer until it is reset and registered
  with again. A batch with NaN or an infinity in it is answered with status 500, and lost.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

import httpx
from pydantic_core import from_json

from offline_grpo import progress
from offline_grpo.disk import write_whole
from offline_grpo.engine.http import Refused, is_loopback, owner_of
from offline_grpo.engine.spawn import Child, Scratch, without_launch_variables
from offline_grpo.engine.vllm import SERVED_NAME
from offline_grpo.errors import ConfigError, EngineError, GrpoError, require
from offline_grpo.generation.judging import warn_once
from offline_grpo.installed import install_command
from offline_grpo.interfaces import RolloutClient, Source
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.rollouts.atropos_groups import GroupReader
from offline_grpo.settings import RunConfig, check_url
from offline_grpo.types import Metrics, RolloutGroup, SamplingParams, UnusableGroup

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # between two parts of an answer: the API does nothing else while it reads a large group
BATCH_TIMEOUT_S = 300.0
AWAY_STATUS = (429, 502, 503, 504)  # a proxy's answers for an API that is away
API_START_S = 120.0
FIRST_PAUSE_S = 0.05
HEALTH_INTERVAL_S, REPORT_INTERVAL_S = 2.0, 10.0
STUCK_S = 20.0  # how long groups may be in the queue and form no batch before their sizes are checked
MAX_RESETS = 10
SHORT_LIFE_S, MAX_SHORT_LIVES = 60.0, 3
"""A command that ends this often in a row, each time within `SHORT_LIFE_S` of its start, is not started again."""
FOREVER = 10**9
REASONS = ("malformed", "numbers", "vocabulary", "masks", "too_long", "too_many", "images")  # of `UnusableGroup`
QUEUE, POLLS = "perf/rollouts_queue", "perf/rollouts_polls"
METRICS = (
    *(f"rollouts/num_dropped_{reason}" for reason in REASONS),
    *("rollouts/num_lost_batches", "time/rollouts_wait_s", POLLS, QUEUE),
)


class Unreachable(EngineError):
    """The API does not answer."""


class Owner(NamedTuple):
    """The trainer that is registered; without one, `group` is None or `batch_size` negative."""

    group: str | None
    batch_size: int
    max_token_len: int


@dataclass(kw_only=True)
class Atropos(Source):
    """The trainer of an Atropos API. The first process asks it; the others contribute nothing.

    An iteration has the `problems_per_iteration * group_size` sequences of the API's batches; where groups were
    dropped, those of the next batch fill it up, as far as they are small enough. A resumed run trains on new groups.
    A restart or a reset of the API, and a batch that it lost, are survived.

    Args: see `conf/rollouts/atropos.yaml`; also
        context: the model's limit of tokens.
        run_folder: where environments are told to keep their state.
    """

    url: str
    problems_per_iteration: int
    group_size: int
    max_token_len: int
    correct_threshold: float | None
    num_steps: int
    save_checkpoint_interval: int
    wandb_project: str
    poll_s: float
    connect_timeout_s: float
    restart_timeout_s: float
    take_over: bool
    start_api: bool
    environment: str | None

    client: RolloutClient
    model_id: str
    codec: TokenizerCodec
    sampling: SamplingParams
    vocab_size: int
    context: int | None
    run_folder: Path
    rank: int

    _http: httpx.Client = field(init=False)
    _companions: list[Companion] = field(default_factory=list, init=False)  # the API, and the environment after it
    _ours: Owner = field(init=False)
    _registration: dict[str, Any] = field(init=False)  # what the API, and through it environments, are told
    _is_registered: bool = field(default=False, init=False)
    _step: int = field(default=0, init=False)  # batches formed, as the API counts them
    _batches: deque[list[Any]] = field(default_factory=deque, init=False)  # taken and not read yet, oldest first
    _groups: deque[RolloutGroup] = field(default_factory=deque, init=False)  # read and not handed out yet
    _began_s: float = field(default=0.0, init=False)  # of the present wait, as the next two
    _checked_s: float = field(default=0.0, init=False)
    _reported_s: float = field(default=0.0, init=False)
    _found: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)  # metrics
    _warned: set[str] = field(default_factory=set, init=False)

    needs_problems: ClassVar[bool] = False
    has_environments: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        limits = httpx.Limits(max_keepalive_connections=0)  # it closes a connection after an error
        self._http = httpx.Client(base_url=self.url, limits=limits, trust_env=False)
        longest = min(self.max_token_len, self.context or self.max_token_len)
        self._ours = Owner(None, self.problems_per_iteration * self.group_size, longest)

    @staticmethod
    def check(config: RunConfig) -> None:
        settings, environment = config.rollouts, config.rollouts["environment"]
        check_url("rollouts.url", settings["url"])
        positive = "problems_per_iteration group_size max_token_len poll_s connect_timeout_s restart_timeout_s"
        for name in positive.split():
            require(settings[name] > 0, f"rollouts.{name}", settings[name], "must be above 0")
        fix = "environments ask a server, and generation samples in this process; use generation=vllm_server"
        require(environment is None or config.engine is not None, "rollouts.environment", environment, fix)
        number, url = config.placement.num_engines, config.generation.get("base_url")
        require(number == 1, "placement.num_engines", number, "environments are told one server; leave it at 1")
        is_one = url is None or isinstance(url, str)
        require(is_one, "generation.base_url", url, "environments are told one server; name one")
        fix = "Atropos does not say which completions hit a length limit; use false"
        require(not config.train.mask_truncated, "train.mask_truncated", True, fix)

    def start(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        """Register, and poll, which lets environments register; start what the run is to start."""
        if self.rank != 0:
            return
        if self.client.is_local:
            fix = "generation samples in this process, so environments get no new weights; use generation=vllm_server"
            log.warning(fix)
        # 1. The name by which the run knows its own registration, also after a resume.
        folder = self.run_folder
        name = (state or {}).get("registration") or f"{folder.parent.name}-{folder.name}-{secrets.token_hex(4)}"[-128:]
        self._ours = self._ours._replace(group=name)
        self._registration = {
            "wandb_group": name,
            "wandb_project": self.wandb_project,
            "batch_size": self._ours.batch_size,  # in sequences
            "max_token_len": self._ours.max_token_len,
            "checkpoint_dir": str(folder),
            "save_checkpoint_interval": self.save_checkpoint_interval,
            "starting_step": iteration,
            "num_steps": self.num_steps,
        }
        # 2. An API on this machine is started where none answers.
        timeout_s = self.connect_timeout_s
        if self.start_api and is_loopback(urlsplit(self.url).hostname or "") and not self._answers():
            self._companions.append(run_api(self.url, folder))
            self._companions[0].keep_running()
            timeout_s = max(timeout_s, API_START_S)
        self._wait_for_api(timeout_s, "rollouts.connect_timeout_s")
        try:
            self._register(take_over=self.take_over)
            self._poll()
        except (EngineError, ValueError, LookupError) as error:
            raise ConfigError(f"rollouts.url={self.url}: no Atropos API that works ({error})") from error
        # 3. The environment comes last: it registers at its start.
        if self.environment is not None:
            server: Any = self.client  # `check` requires one
            told = {"server_url": server.base_url, "server_key": server.api_key or "", "model": self.model_id}
            sizes = {"group_size": self.group_size, "max_token_length": self.sampling.max_new_tokens}
            self._companions.append(environment_of(self.environment, self.url, folder, **told, sizes=sizes))
            self._companions[-1].keep_running()

    def next(self, iteration: int) -> list[RolloutGroup]:
        """Waits for groups as long as it takes."""
        if self.rank != 0:
            return []
        self._found = defaultdict(float, {QUEUE: self._found[QUEUE]})
        read = GroupReader(
            decode=self.codec.decode,
            vocab_size=self.vocab_size,
            max_members=self._ours.batch_size,
            max_token_len=self._ours.max_token_len,
            correct_threshold=self.correct_threshold,
        )
        # 1. Batches are read until there are enough sequences that something can be learnt from.
        while sum(len(group.rollouts) for group in self._groups) < self._ours.batch_size:
            began = time.perf_counter()
            self._wait_for_batch(iteration)
            self._found["time/rollouts_wait_s"] += time.perf_counter() - began
            for raw in self._batches.popleft():
                try:
                    self._groups.append(read(raw))
                except UnusableGroup as error:
                    counter = f"rollouts/num_dropped_{error.reason}"
                    self._found[counter] += 1
                    text = f"dropped a group ({counter} counts, this is said once): {error}"
                    warn_once(self._warned, error.reason, text)
        # 2. Whole groups, oldest first; one that is too large for the rest waits for the next iteration.
        chosen: list[RolloutGroup] = []
        room = self._ours.batch_size
        while self._groups and len(self._groups[0].rollouts) <= room:
            chosen.append(self._groups.popleft())
            room -= len(chosen[-1].rollouts)
        return chosen

    def metrics(self) -> Metrics:
        return {name: self._found[name] for name in METRICS} if self.rank == 0 else {}

    def state_dict(self) -> Mapping[str, Any]:
        return {} if self.rank != 0 else {"registration": self._registration["wandb_group"]}

    def close(self) -> None:
        """An API that the run found keeps the registration, for a run that resumes from its checkpoint."""
        for companion in reversed(self._companions):
            companion.stop()

    def _wait_for_batch(self, iteration: int) -> None:
        """Until a batch is there. Environments begin at step `iteration`, if the API has to be told again."""
        self._began_s = self._reported_s = self._checked_s = time.monotonic()
        self._registration["starting_step"] = iteration
        # It is asked often at first: a batch may be there in a moment.
        pause_s = FIRST_PAUSE_S
        while not self._batches:
            try:
                if not self._is_registered:
                    self._register(take_over=False)
                self._poll()
                if self._is_registered and not self._batches:
                    self._check_while_waiting()
            except Unreachable as error:
                log.warning("%s Waiting for it for up to %g s", error, self.restart_timeout_s)
                self._is_registered = False
                self._wait_for_api(self.restart_timeout_s, "rollouts.restart_timeout_s")
            if not self._batches:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self.poll_s)

    def _register(self, *, take_over: bool) -> None:
        for _ in range(MAX_RESETS):
            if not self._is_ours(take_over=take_over):
                self._call("POST", "/register", self._registration)
            if self._is_ours(take_over=take_over):
                self._is_registered, self._step = True, self._status()
                log.info("registered with the Atropos API at %s as %s", self.url, self._ours.group)
                return
            # where it belongs to nobody, groups came first: it would ignore every registration
            self._call("GET", "/reset_data")
        raise EngineError(f"{self.url}: it does not keep a registration")

    def _is_ours(self, *, take_over: bool = False) -> bool:
        """Whether we are registered; not, if nobody is. Raises ConfigError if another trainer is, whose place the run
        may not take over.
        """
        group, info = from_json(self._call("GET", "/wandb_info"))["group"], from_json(self._call("GET", "/info"))
        owner = Owner(group, info["batch_size"], info["max_token_len"])
        if owner == self._ours or owner.group is None or owner.batch_size < 0 or take_over:
            return owner == self._ours
        fix = "use another API, restart run-api, or set rollouts.take_over=true if that trainer is gone"
        about = f"another trainer owns this API ({owner}; this run is {self._ours})"
        raise ConfigError(f"rollouts.url={self.url}: {about}; {fix}")

    def _poll(self) -> None:
        """Take the batches that are there, or find that nobody is registered any more."""
        # The first that comes is the newest; how many were formed says how many older ones come after it.
        newest = None
        while newest is None or self._step < newest:
            self._found[POLLS] += 1
            try:
                answer = from_json(self._call("GET", "/batch", timeout_s=BATCH_TIMEOUT_S))
            except Refused as error:
                self._check_registration()
                if not self._is_registered:
                    return
                self._found["rollouts/num_lost_batches"] += 1
                log.warning("lost a batch, and go on (rollouts/num_lost_batches): %s", error)
            else:
                if answer.get("status") == "error":
                    self._check_registration()
                    return
                if not answer["batch"]:
                    break
                self._batches.appendleft(answer["batch"])
            newest = self._status() if newest is None else newest
            self._step += 1
        if newest is not None:
            self._check_registration()

    def _check_registration(self) -> None:
        """An API that was reset, and got a group before the next poll, says "no batch yet" and never forms one."""
        self._is_registered = self._is_ours()
        if not self._is_registered:
            again = "it was started anew or reset; registering again. Environments that it knew must be restarted"
            log.warning("%s: no trainer is registered any more: %s", self.url, again)

    def _status(self) -> int:
        """How many batches the API has formed since it was started. Notes how many groups are in its queue."""
        found = from_json(self._call("GET", "/status"))
        self._found[QUEUE] = found["queue_size"]
        return found["current_step"]

    def _check_while_waiting(self) -> None:
        """Report what is waited for; see that it can come."""
        self._status()
        num_polls, queue_size = int(self._found[POLLS]), int(self._found[QUEUE])
        progress.report(queue_size, 0, "groups queued")
        progress.report(num_polls, 0, "polls")
        if not self._check_processes():
            return
        self._check_registration()
        # Groups that never add up to a batch would be waited for without end.
        waited_s = time.monotonic() - self._began_s
        is_stuck = waited_s > STUCK_S and queue_size
        size = len(from_json(self._call("GET", "/latest_example"))["tokens"]) if is_stuck else 0
        if size and self._ours.batch_size % size != 0:
            about = f"a group of {size} sequences, and no batch of {self._ours.batch_size}"
            fix = "make it a multiple of the environments' group_size, and restart run-api, whose queue keeps the group"
            sizes = "data.problems_per_iteration x data.rollouts_per_problem"
            where = f"data.rollouts_per_problem: the queue of {self.url} has"
            raise ConfigError(f"{where} {about} ({sizes}) can be made of those; {fix}")
        if time.monotonic() - self._reported_s > REPORT_INTERVAL_S:
            self._reported_s = time.monotonic()
            text = "waiting for rollouts from %s for %.0f s: %d groups in its queue, %d polls"
            log.info(text, self.url, waited_s, queue_size, num_polls)

    def _check_processes(self) -> bool:
        """Every two seconds, see that what a batch needs still runs, the engine too. Returns whether it was time."""
        if time.monotonic() - self._checked_s <= HEALTH_INTERVAL_S:
            return False
        self._checked_s = time.monotonic()
        if not self.client.is_local:
            self.client.check_healthy()  # type: ignore[attr-defined]  # of environments, which ask it
        # A new API does not know the environment, which is started anew with it.
        is_new = False
        for companion in self._companions:
            is_new = companion.keep_running(anew=is_new)
        return True

    def _wait_for_api(self, timeout_s: float, key: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if time.monotonic() >= deadline:
                about = f"Atropos API not reachable for {timeout_s:g} s ({key})"
                fix = "start it with run-api, or name the one that runs"
                raise EngineError(f"rollouts.url={self.url}: {about}; {fix}")
            self._check_processes()
            time.sleep(min(self.poll_s, 0.5))

    def _answers(self) -> bool:
        """Whether something answers at the API's address, whatever it says."""
        try:
            self._call("GET", "/info")
        except EngineError as error:
            return not isinstance(error, Unreachable)
        return True

    def _call(self, method: str, path: str, body: object = None, *, timeout_s: float = TIMEOUT_S) -> bytes:
        """The API's answer. Raises Unreachable, or Refused for a status other than 200."""
        where = f"{self.url}{path}"
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.TransportError as error:
            raise Unreachable(f"{where}: {type(error).__name__}: {error}.") from error
        if answer.status_code in AWAY_STATUS:
            raise Unreachable(f"{where}: status {answer.status_code} from a proxy; is run-api running behind it?")
        if answer.status_code != 200:
            raise Refused(f"{where}: status {answer.status_code}: {answer.text[:300]}")
        return answer.content


@dataclass
class Companion:
    """A command beside the run, which ends with it, and starts again if it ends before. Its logs are in the run's
    folder: the first is `log`, the n-th after it `again` with n.

    Args:
        name: for messages.
        config: what a private file has that the variable OFFLINE_GRPO_ENV_CONFIG names.
    """

    name: str
    command: list[str]
    folder: Path
    log: str
    again: str
    variables: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] | None = None

    _process: Child | None = None
    _num_starts: int = 0
    _num_short_lives: int = 0
    _started_s: float = 0.0

    def keep_running(self, *, anew: bool = False) -> bool:
        """Start it where it does not run, or `anew`. Returns whether it did. Raises GrpoError if it keeps ending."""
        # 1. One that has ended by itself is not started again and again.
        if self._process is not None and not anew:
            if (end := self._process.how_it_ended()) is None:
                return False
            lived_s = time.monotonic() - self._started_s
            self._num_short_lives = self._num_short_lives + 1 if lived_s < SHORT_LIFE_S else 0
            if self._num_short_lives >= MAX_SHORT_LIVES:
                often = f"has ended {MAX_SHORT_LIVES} times in a row within {SHORT_LIFE_S:g} s of its start"
                raise GrpoError(f"{self.name}: {often}; it {end}")
            log.warning("%s %s Starting it again.", self.name, end)
        self.stop()
        # 2. It gets this process's environment, without what a launcher of several sets. `python` is the run's.
        path = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ.get("PATH"))))
        env = {**without_launch_variables(os.environ), "PATH": path, "PYTHONUNBUFFERED": "1", **self.variables}
        scratch = None
        if self.config is not None:
            scratch = Scratch().path  # deleted when the command has ended
            write_whole(scratch / "environment.yaml", json.dumps(self.config), is_private=True)  # JSON is YAML
            env["OFFLINE_GRPO_ENV_CONFIG"] = str(scratch / "environment.yaml")
        log_path = self.folder / (self.again.format(self._num_starts) if self._num_starts else self.log)
        log.info("starting %s; its log: %s", self.name, log_path)
        self._process = Child(self.command, env=env, log_path=log_path, remove=scratch)
        self._num_starts += 1
        self._started_s = time.monotonic()
        return True

    def stop(self) -> None:
        """End it, and wait until it has gone."""
        if self._process is not None:
            self._process.stop()
            self._process = None


def run_api(url: str, folder: Path) -> Companion:
    """The API, at this address of the machine's own. Raises ConfigError if something else listens there, or atroposlib
    is not installed.
    """
    fix = f"atroposlib is not installed; use `{install_command('atropos')}`, or start run-api by hand"
    require(find_spec("atroposlib") is not None, "rollouts.start_api", True, fix)
    parts = urlsplit(url)
    if (owner := owner_of(parts.port or 80)) is not None:
        fix = "stop that process, or choose another port"
        raise ConfigError(f"rollouts.url={url}: is taken by {owner}, which is no Atropos API; {fix}")
    address = ["--host", parts.hostname or "", "--port", str(parts.port or 80)]
    command = [sys.executable, "-m", "atroposlib.cli.run_api", *address]
    return Companion("the Atropos API (run-api)", command, folder, "api.log", "api_{}.log")


def environment_of(
    command: str, url: str, folder: Path, *, server_url: str, server_key: str, model: str, sizes: Mapping[str, int]
) -> Companion:
    """The environment that is this shell command, and samples from the server. `model`: folder or Hub id that has the
    tokenizer.
    """
    # Variables are for environments that know this project.
    variables = {
        "OFFLINE_GRPO_SERVER_URL": server_url,
        "OFFLINE_GRPO_SERVER_KEY": server_key,
        "OFFLINE_GRPO_SERVED_NAME": SERVED_NAME,
        "OFFLINE_GRPO_API_URL": url,
        "OFFLINE_GRPO_MODEL": model,
        "OFFLINE_GRPO_RUN": str(folder),
    }
    # A file is for `--config` of any environment of atroposlib.
    server = {
        "server_type": "vllm",
        "base_url": f"{server_url}/v1",
        "api_key": server_key,
        "model_name": SERVED_NAME,
        "tokenizer_name": model,
    }
    env = {
        **sizes,
        "tokenizer_name": model,
        "rollout_server_url": url,
        "total_steps": FOREVER,  # the run decides when it ends
        "min_batch_allocation": None,  # an environment that had one and ended would keep all batches back
        "use_wandb": False,
        "wandb_name": "environment",  # one without a name cannot register
    }
    # twice: of a single server, atroposlib may take the address in the environment's code, or those of a cluster
    config = {"env": env, "openai": [server, server]}
    name = f"rollouts.environment={command}"
    return Companion(name, ["sh", "-c", command], folder, "env_0.log", "env_{}.log", variables, config)
