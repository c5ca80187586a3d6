"""Rollouts that environments have sampled and scored elsewhere, from the queue of an Atropos API."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic_core import from_json

from offline_grpo.errors import require
from offline_grpo.interfaces import RolloutClient, Source, TextCodec
from offline_grpo.rollouts.atropos.api import AtroposApi, Registration
from offline_grpo.rollouts.atropos.feed import Feed
from offline_grpo.rollouts.atropos.groups import GroupReader
from offline_grpo.rollouts.atropos.processes import Processes, Surroundings
from offline_grpo.settings import RunConfig
from offline_grpo.types import Metrics, RolloutGroup, SamplingParams, UnusableGroup

USELESS = 10
"""Batches in a row without a group that can be trained on, after which it is said, and said again."""
REASONS = ("malformed", "numbers", "vocabulary", "masks", "too_long", "too_many", "images")
"""Of `UnusableGroup`."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Atropos(Source):
    """The trainer of an Atropos API. The first process asks it; the others contribute nothing.

    An iteration has the `problems_per_iteration * group_size` sequences that the API makes a batch of; where groups
    were dropped, those of the next batch fill it up, as far as they are small enough. What it trains on is not repeated
    by a run that goes on from an earlier checkpoint.

    Args:
        max_token_len: of a sequence; the model's `context` is another limit.
        correct_threshold: see `GroupReader`.
        num_steps, save_checkpoint_interval, wandb_project: told to the environments.
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
    codec: TextCodec
    sampling: SamplingParams
    vocab_size: int
    context: int | None
    run_folder: Path
    rank: int

    _feed: Feed | None = field(default=None, init=False)
    _processes: Processes | None = field(default=None, init=False)
    _name: str = field(default="", init=False)
    _groups: deque[RolloutGroup] = field(default_factory=deque, init=False)  # that no iteration has had yet
    _num_dropped: Counter[str] = field(default_factory=Counter, init=False)
    _wait_s: float = field(default=0.0, init=False)
    _told: set[str] = field(default_factory=set, init=False)
    _told_num_steps: int = field(default=0, init=False)

    needs_problems: ClassVar[bool] = False

    @staticmethod
    def check(config: RunConfig) -> None:
        settings, environment = config.rollouts, config.rollouts["environment"]
        positive = "problems_per_iteration group_size max_token_len poll_s connect_timeout_s restart_timeout_s"
        for name in positive.split():
            require(settings[name] > 0, f"rollouts.{name}", settings[name], "must be above 0")
        fix = "environments ask a server, and generation samples in this process; use generation=vllm_server"
        require(environment is None or config.engine is not None, "rollouts.environment", environment, fix)
        fix = "environments are told one server; "
        number, url = config.placement.num_engines, config.generation.get("base_url")
        require(number == 1, "placement.num_engines", number, f"{fix}leave it at 1")
        require(url is None or isinstance(url, str), "generation.base_url", url, f"{fix}name one")
        fix = "Atropos does not say which completions hit a length limit; use false"
        require(not config.train.mask_truncated, "train.mask_truncated", True, fix)

    def start(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        """Raises what `Feed.connect` and `Processes` do."""
        if self.rank != 0:
            return
        folder = self.run_folder
        own_name = f"{folder.parent.name}-{folder.name}-{secrets.token_hex(4)}"[-128:]
        self._name = (state or {}).get("registration") or own_name
        if self.client.engine_name is None:
            log.warning(
                "generation samples in this process, so environments get no new weights; use generation=vllm_server"
            )
        registration = Registration(
            wandb_group=self._name,
            wandb_project=self.wandb_project,
            batch_size=self._batch_size,
            max_token_len=self._max_token_len,
            checkpoint_dir=str(folder),
            save_checkpoint_interval=self.save_checkpoint_interval,
            starting_step=iteration,
            num_steps=self.num_steps,
        )
        api = AtroposApi(self.url)
        self._processes = Processes(
            run_folder=folder, api_url=api.url, start_api=self.start_api, environment=self.environment
        )
        if self._processes.may_start_api and not api.answers():
            self._processes.start_api(api.answers)
        self._feed = Feed(
            api,
            registration,
            poll_s=self.poll_s,
            restart_timeout_s=self.restart_timeout_s,
            look_after=lambda: self._look_after(api),
        )
        self._feed.connect(self.connect_timeout_s, take_over=self.take_over)
        self._told_num_steps = (state or {}).get("num_steps", self.num_steps)
        if self._feed.was_known and self._told_num_steps != self.num_steps:
            log.warning(
                "the API still tells environments num_steps=%d, and rollouts.num_steps is %d now; restart run-api "
                "and its "
                "environments where they end at that step",
                self._told_num_steps,
                self.num_steps,
            )
        if self.environment is not None:
            self._processes.start_environment(self._surroundings())

    def next(self, iteration: int) -> list[RolloutGroup]:
        """Raises MissingLogprobs, and what `Feed.next` does."""
        if self._feed is None:
            return []
        self._num_dropped.clear()
        self._feed.num_polls = self._feed.num_lost = 0
        self._wait_s = 0.0
        num_useless = 0
        while sum(len(group.rollouts) for group in self._groups) < self._batch_size:
            began = time.perf_counter()
            body = self._feed.next(iteration)
            self._wait_s += time.perf_counter() - began
            num_useless = 0 if self._read(body) else num_useless + 1
            if num_useless and num_useless % USELESS == 0:  # the run waits, and may look busy
                dropped = ", ".join(
                    f"{count} groups dropped as {reason}" for reason, count in self._num_dropped.items()
                )
                log.warning("nothing in the last %d batches can be trained on (%s)", num_useless, dropped)
        chosen: list[RolloutGroup] = []
        room = self._batch_size
        while self._groups and len(self._groups[0].rollouts) <= room:
            chosen.append(self._groups.popleft())
            room -= len(chosen[-1].rollouts)
        return chosen

    def metrics(self) -> Metrics:
        if self._feed is None:
            return {}
        return {
            **{f"rollouts/num_dropped_{reason}": float(self._num_dropped[reason]) for reason in REASONS},
            "rollouts/num_lost_batches": float(self._feed.num_lost),
            "time/rollouts_wait_s": self._wait_s,
            "perf/rollouts_polls": float(self._feed.num_polls),
            "perf/rollouts_queue": float(self._feed.queue_size),
        }

    def state_dict(self) -> Mapping[str, Any]:
        """The name by which the API knows the run, and the number of steps that environments are told."""
        is_old = self._feed is not None and self._feed.was_known
        return {"registration": self._name, "num_steps": self._told_num_steps if is_old else self.num_steps}

    def close(self) -> None:
        """An API that the run found keeps the registration, for a run that resumes from its checkpoint."""
        if self._processes is not None:
            self._processes.close()

    @property
    def _batch_size(self) -> int:
        return self.problems_per_iteration * self.group_size

    @property
    def _max_token_len(self) -> int:
        return min(self.max_token_len, self.context or self.max_token_len)

    def _look_after(self, api: AtroposApi) -> None:
        """See that what a batch needs is there. Raises EngineDied where the engine that environments ask has ended."""
        server = getattr(self.client, "server", None)
        if server is not None:
            server.check_healthy()
        if self._processes is not None:
            self._processes.keep_running(api.answers)

    def _surroundings(self) -> Surroundings:
        server: Any = getattr(self.client, "server", None)  # `check` has seen to it
        return Surroundings(
            server_url=server.base_url,
            server_key=server.api_key,
            model=self.model_id,
            api_url=self.url,
            run_folder=self.run_folder,
            group_size=self.group_size,
            max_new_tokens=self.sampling.max_new_tokens,
        )

    def _read(self, body: bytes) -> int:
        """Add the usable groups of a batch to those that are held. Returns how many there were."""
        before = len(self._groups)
        reader = GroupReader(
            decode=self.codec.decode,
            vocab_size=self.vocab_size,
            max_members=self._batch_size,
            max_token_len=self._max_token_len,
            correct_threshold=self.correct_threshold,
        )
        groups = from_json(body)["batch"]
        groups.reverse()
        while groups:  # so that each is freed when it has been read
            try:
                self._groups.append(reader(groups.pop()))
            except UnusableGroup as error:
                self._num_dropped[error.reason] += 1
                if error.reason not in self._told:
                    self._told.add(error.reason)
                    counter = f"rollouts/num_dropped_{error.reason}"
                    log.warning("dropped a group (%s counts, this is said once): %s", counter, error)
        return len(self._groups) - before
