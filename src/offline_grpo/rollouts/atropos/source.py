"""Rollouts that environments have sampled and scored elsewhere, from the queue of an Atropos API.

The API forms all batches that it has groups for at once, and hands out the newest first. The source takes them all and
reverses the order: environments stop at three waiting batches, unless they are told otherwise. Batches that were taken
and not trained on are lost with the process; environments sample more. A restart or a reset of the API, and a batch
that it lost, are survived.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from offline_grpo import progress
from offline_grpo.errors import ConfigError, EngineError, require
from offline_grpo.interfaces import RolloutClient, Source
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.rollouts.atropos.api import AtroposApi, NotRegistered, Owner, Unreachable
from offline_grpo.rollouts.atropos.groups import GroupReader
from offline_grpo.rollouts.atropos.processes import Processes
from offline_grpo.settings import RunConfig
from offline_grpo.types import Metrics, RolloutGroup, SamplingParams, UnusableGroup

API_START_S = 120.0
FIRST_PAUSE_S = 0.05
HEALTH_INTERVAL_S = 2.0
REPORT_INTERVAL_S = 10.0
STUCK_S = 20.0
"""How long groups may be in the queue and form no batch before their sizes are checked."""
MAX_RESETS = 10
REASONS = ("malformed", "numbers", "vocabulary", "masks", "too_long", "too_many", "images")
"""Of `UnusableGroup`."""
QUEUE = "perf/rollouts_queue"
METRICS = (
    *(f"rollouts/num_dropped_{reason}" for reason in REASONS),
    *("rollouts/num_lost_batches", "time/rollouts_wait_s", "perf/rollouts_polls", QUEUE),
)

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Atropos(Source):
    """The trainer of an Atropos API. The first process asks it; the others contribute nothing.

    An iteration has the `problems_per_iteration * group_size` sequences of the API's batches; where groups were
    dropped, those of the next batch fill it up, as far as they are small enough. A resumed run trains on new groups.

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

    _api: AtroposApi = field(init=False)
    _processes: Processes = field(init=False)
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

    def __post_init__(self) -> None:
        self._api = AtroposApi(self.url)
        self._processes = Processes(
            run_folder=self.run_folder, api_url=self._api.url, start_api=self.start_api, environment=self.environment
        )

    @staticmethod
    def check(config: RunConfig) -> None:
        settings, environment = config.rollouts, config.rollouts["environment"]
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
        """Register, and poll, which lets environments register.

        Raises:
            ConfigError: another trainer owns the API, or it is no Atropos API.
            EngineError: it does not answer within `connect_timeout_s`.
            GrpoError: `run-api` keeps ending.
        """
        if self.rank != 0:
            return
        folder = self.run_folder
        name = (state or {}).get("registration") or f"{folder.parent.name}-{folder.name}-{secrets.token_hex(4)}"[-128:]
        if self.client.is_local:
            fix = "generation samples in this process, so environments get no new weights; use generation=vllm_server"
            log.warning(fix)
        self._registration = {
            "wandb_group": name,  # by which the run knows its own registration
            "wandb_project": self.wandb_project,
            "batch_size": self._batch_size,  # in sequences
            "max_token_len": min(self.max_token_len, self.context or self.max_token_len),
            "checkpoint_dir": str(folder),
            "save_checkpoint_interval": self.save_checkpoint_interval,
            "starting_step": iteration,
            "num_steps": self.num_steps,
        }
        timeout_s = self.connect_timeout_s
        if self._processes.may_start_api and not self._api.answers():
            self._processes.start_api()
            timeout_s = max(timeout_s, API_START_S)
        self._begin_to_wait()
        self._wait_for_api(timeout_s, "rollouts.connect_timeout_s")
        try:
            self._register(take_over=self.take_over)
            self._poll()
        except (EngineError, ValueError, LookupError) as error:
            raise ConfigError(f"rollouts.url={self._api.url}: no Atropos API that works ({error})") from error
        if self.environment is not None:
            server: Any = getattr(self.client, "server", None)  # `check` requires one
            self._processes.start_environment(
                server_url=server.base_url,
                server_key=server.api_key,
                model=self.model_id,
                group_size=self.group_size,
                max_new_tokens=self.sampling.max_new_tokens,
            )

    def next(self, iteration: int) -> list[RolloutGroup]:
        """Waits for groups as long as it takes.

        Raises:
            EngineDied: the engine that environments ask has ended.
            EngineError: the API stayed away for `restart_timeout_s`.
            ConfigError: another trainer has taken the API over, or no batch can be made of groups of this size.
        """
        if self.rank != 0:
            return []
        self._found = defaultdict(float, {QUEUE: self._found[QUEUE]})
        while sum(len(group.rollouts) for group in self._groups) < self._batch_size:
            began = time.perf_counter()
            batch = self._next_batch(iteration)
            self._found["time/rollouts_wait_s"] += time.perf_counter() - began
            self._read(batch)
        chosen: list[RolloutGroup] = []
        room = self._batch_size
        while self._groups and len(self._groups[0].rollouts) <= room:
            chosen.append(self._groups.popleft())
            room -= len(chosen[-1].rollouts)
        return chosen

    def metrics(self) -> Metrics:
        return {name: self._found[name] for name in METRICS} if self.rank == 0 else {}

    def state_dict(self) -> Mapping[str, Any]:
        """The name by which the API knows the run."""
        return {} if self.rank != 0 else {"registration": self._registration["wandb_group"]}

    def close(self) -> None:
        """An API that the run found keeps the registration, for a run that resumes from its checkpoint."""
        self._processes.close()

    @property
    def _batch_size(self) -> int:
        return self.problems_per_iteration * self.group_size

    def _next_batch(self, iteration: int) -> list[Any]:
        """The oldest batch. `iteration` is the step at which environments begin, if the API has to be told again."""
        self._begin_to_wait()
        self._registration["starting_step"] = iteration
        pause_s = FIRST_PAUSE_S
        while not self._batches:
            try:
                if not self._is_registered:
                    self._register(take_over=False)
                self._poll()
                if not self._batches:
                    self._check_while_waiting()
            except NotRegistered as error:
                again = "it was started anew or reset; registering again. Environments that it knew must be restarted"
                log.warning("%s any more: %s", error, again)
                self._is_registered = False
            except Unreachable as error:
                log.warning("%s Waiting for it for up to %g s", error, self.restart_timeout_s)
                self._is_registered = False
                self._wait_for_api(self.restart_timeout_s, "rollouts.restart_timeout_s")
            if not self._batches:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self.poll_s)
        return self._batches.popleft()

    def _read(self, batch: list[Any]) -> None:
        """Add the usable groups of a batch to those that are held."""
        reader = GroupReader(
            decode=self.codec.decode,
            vocab_size=self.vocab_size,
            max_members=self._batch_size,
            max_token_len=self._registration["max_token_len"],
            correct_threshold=self.correct_threshold,
        )
        for raw in batch:
            try:
                self._groups.append(reader(raw))
            except UnusableGroup as error:
                counter = f"rollouts/num_dropped_{error.reason}"
                self._found[counter] += 1
                if error.reason not in self._warned:
                    self._warned.add(error.reason)
                    log.warning("dropped a group (%s counts, this is said once): %s", counter, error)

    def _poll(self) -> None:
        """Take the batches that are there. The count of those formed says how many are older than the first."""
        if self._fetch():
            step, self._found[QUEUE] = self._api.status()
            for _ in range(step - self._step - 1):
                if not self._fetch():
                    break
            self._step = step
            self._check_owner()

    def _fetch(self) -> bool:
        """Ask for a batch. Returns whether there was one, even if the API lost it."""
        self._found["perf/rollouts_polls"] += 1
        try:
            batch = self._api.batch()
        except (NotRegistered, Unreachable):
            raise
        except EngineError as error:
            self._check_owner()
            self._found["rollouts/num_lost_batches"] += 1
            log.warning("lost a batch, and go on (rollouts/num_lost_batches): %s", error)
            return True
        if batch is not None:
            self._batches.appendleft(batch)
        return batch is not None

    def _register(self, *, take_over: bool) -> None:
        api = self._api
        for _ in range(MAX_RESETS):
            owner = api.owner()
            if owner.is_nobody:
                api.register(self._registration)
                owner = api.owner()
            if owner == self._ours:
                break
            if not owner.is_nobody and not take_over:
                raise self._foreign(owner)
            api.reset()  # where it belongs to nobody, groups came first: it would ignore every registration
        else:
            raise EngineError(f"{api.url}: it does not keep a registration")
        self._is_registered = True
        self._step, self._found[QUEUE] = api.status()
        log.info("registered with the Atropos API at %s as %s", api.url, self._registration["wandb_group"])

    @property
    def _ours(self) -> Owner:
        ours = self._registration
        return Owner(ours["wandb_group"], ours["batch_size"], ours["max_token_len"])

    def _foreign(self, owner: Owner) -> ConfigError:
        fix = "use another API, restart run-api, or set rollouts.take_over=true if that trainer is gone"
        about = f"another trainer owns this API ({owner}; this run is {self._ours})"
        return ConfigError(f"rollouts.url={self._api.url}: {about}; {fix}")

    def _check_owner(self) -> None:
        """An API that was reset, and got a group before the next poll, says "no batch yet" and never forms one."""
        owner = self._api.owner()
        if owner.is_nobody:
            raise NotRegistered(f"{self._api.url}: no trainer is registered")
        if owner != self._ours:
            raise self._foreign(owner)

    def _begin_to_wait(self) -> None:
        self._began_s = self._reported_s = self._checked_s = time.monotonic()

    def _wait_for_api(self, timeout_s: float, key: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._api.answers():
            if time.monotonic() >= deadline:
                about = f"Atropos API not reachable for {timeout_s:g} s ({key})"
                fix = "start it with run-api, or name the one that runs"
                raise EngineError(f"rollouts.url={self._api.url}: {about}; {fix}")
            self._check_processes()
            time.sleep(min(self.poll_s, 0.5))

    def _check_while_waiting(self) -> None:
        """Report what is waited for; see that it can come."""
        _, queue_size = self._api.status()
        num_polls, self._found[QUEUE] = self._found["perf/rollouts_polls"], queue_size
        progress.report(queue_size, 0, "groups queued")
        progress.report(int(num_polls), 0, "polls")
        if not self._check_processes():
            return
        self._check_owner()
        waited_s = time.monotonic() - self._began_s
        size = self._api.newest_size() if waited_s > STUCK_S and queue_size else 0
        if size and self._batch_size % size != 0:
            about = f"the queue of {self._api.url} has a group of {size} sequences, and no batch of {self._batch_size}"
            fix = "make it a multiple of the environments' group_size, and restart run-api, whose queue keeps the group"
            sizes = "data.problems_per_iteration x data.rollouts_per_problem"
            raise ConfigError(f"data.rollouts_per_problem: {about} ({sizes}) can be made of those; {fix}")
        if time.monotonic() - self._reported_s > REPORT_INTERVAL_S:
            self._reported_s = time.monotonic()
            text = "waiting for rollouts from %s for %.0f s: %d groups in its queue, %d polls"
            log.info(text, self._api.url, waited_s, queue_size, num_polls)

    def _check_processes(self) -> bool:
        """Every two seconds, see that what a batch needs still runs, the engine too. Returns whether it was time."""
        if time.monotonic() - self._checked_s <= HEALTH_INTERVAL_S:
            return False
        self._checked_s = time.monotonic()
        server = getattr(self.client, "server", None)
        if server is not None:
            server.check_healthy()
        self._processes.keep_running()
        return True
