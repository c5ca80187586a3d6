"""Batches from an Atropos API, oldest first, through its restarts, resets and losses."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from offline_grpo import progress
from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.rollouts.atropos.api import AtroposApi, NotRegistered, Owner, Registration, Unreachable

FIRST_PAUSE_S = 0.05
HEALTH_INTERVAL_S = 2.0
REPORT_INTERVAL_S = 10.0
STUCK_S = 20.0
"""How long groups may be in the queue and no batch come of it, before their sizes are looked at."""
MAX_RESETS = 10

log = logging.getLogger(__name__)


class Feed:
    """Hands out the batches of one API, to which it is registered as `registration`.

    The API forms all batches that it has groups for at once, and hands out the newest first. They are all taken, and
    turned round, unread: environments stop at three, unless they are told otherwise. What is taken and not trained on
    is lost where the process is killed; environments sample more.

    Args:
        look_after: is called every two seconds of a wait. Raises EngineDied where the engine that environments ask
            has ended: they would wait for it, and we for them.
        restart_timeout_s: how long an API that does not answer any more is waited for.
    """

    def __init__(
        self,
        api: AtroposApi,
        registration: Registration,
        *,
        poll_s: float,
        restart_timeout_s: float,
        look_after: Callable[[], None],
    ) -> None:
        self._api = api
        self._registration = registration
        self._poll_s = poll_s
        self._restart_timeout_s = restart_timeout_s
        self._look_after = look_after
        self._is_registered = False
        self._step = 0  # batches formed, as the API counts them
        self._held: deque[bytes] = deque()
        self._num_environments = 0
        self._last_check_s = self._last_report_s = self._since_s = self._count_after_s = 0.0
        self.num_polls = self.num_lost = self.queue_size = 0
        self.was_known = True  # whether the API had this run's registration at the start

    def connect(self, timeout_s: float, *, take_over: bool) -> None:
        """Wait for the API, register, and begin to poll, which lets environments register.

        Args:
            take_over: make it forget another trainer.

        Raises:
            ConfigError: another trainer owns it, or it is no Atropos API.
            EngineError: it does not answer within `timeout_s`.
        """
        self._begin_to_wait()
        self._wait_for_api(timeout_s, "rollouts.connect_timeout_s")
        try:
            self._register(take_over=take_over)
            self._poll()
        except (EngineError, ValueError, LookupError) as error:
            raise ConfigError(f"rollouts.url={self._api.url}: no Atropos API that works ({error})") from error

    def next(self, iteration: int) -> bytes:
        """The oldest batch; waits for one as long as it takes.

        Args:
            iteration: the step at which environments begin, if the API has to be told again.

        Raises:
            EngineDied: see `look_after`.
            EngineError: the API stayed away.
            ConfigError: another trainer has taken the API over, or no batch can be made of groups of this size.
        """
        self._begin_to_wait()
        self._registration = replace(self._registration, starting_step=iteration)
        pause_s = FIRST_PAUSE_S
        while not self._held:
            try:
                if not self._is_registered:
                    self._register(take_over=False)
                self._poll()
                if not self._held:
                    self._while_waiting()
            except NotRegistered as error:
                again = "it was started anew or reset; registering again. Environments that it knew must be restarted"
                log.warning("%s any more: %s", error, again)
                self._is_registered = False
            except Unreachable as error:
                log.warning("%s Waiting for it for up to %g s", error, self._restart_timeout_s)
                self._is_registered = False
                self._wait_for_api(self._restart_timeout_s, "rollouts.restart_timeout_s")
            if not self._held:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self._poll_s)
        return self._held.popleft()

    def _begin_to_wait(self) -> None:
        self._since_s = self._last_report_s = self._last_check_s = time.monotonic()
        self._count_after_s = 0.0

    def _poll(self) -> None:
        """Take the batches that are there. The count of those formed says how many are older than the first."""
        if not self._fetch():
            return
        step, self.queue_size = self._api.status()
        for _ in range(step - self._step - 1):
            if not self._fetch():
                break
        self._step = step
        self._check_owner()

    def _fetch(self) -> bool:
        """Ask for a batch; it is older than those that are held. Returns whether there was one, though it may have been
        lost.
        """
        self.num_polls += 1
        try:
            batch = self._api.batch()
        except (NotRegistered, Unreachable):
            raise
        except EngineError as error:
            if self._api.owner().is_nobody:
                raise NotRegistered(f"{self._api.url}: no trainer is registered") from error
            self.num_lost += 1
            log.warning("lost a batch, and go on (rollouts/num_lost_batches): %s", error)
            return True
        if batch is not None:
            self._held.appendleft(batch)
        return batch is not None

    def _register(self, *, take_over: bool) -> None:
        for _ in range(MAX_RESETS):
            owner = self._api.owner()
            if owner.is_nobody:
                self._api.register(self._registration)
                owner, self.was_known = self._api.owner(), False
            if self._is_ours(owner):
                break
            if not owner.is_nobody and not take_over:
                raise self._foreign(owner)
            self._api.reset()  # where it belongs to nobody, groups came first: it would ignore every registration
        else:
            raise EngineError(f"{self._api.url}: it does not keep a registration")
        self._is_registered = True
        self._num_environments = 0
        self._step, self.queue_size = self._api.status()
        log.info("registered with the Atropos API at %s as %s", self._api.url, self._registration.wandb_group)

    def _is_ours(self, owner: Owner) -> bool:
        ours = self._registration
        return owner == Owner(ours.wandb_group, ours.batch_size, ours.max_token_len)

    def _foreign(self, owner: Owner) -> ConfigError:
        ours = self._registration
        has = f"{owner.group}, batch_size={owner.batch_size}, max_token_len={owner.max_token_len}"
        want = f"{ours.wandb_group}, batch_size={ours.batch_size}, max_token_len={ours.max_token_len}"
        return ConfigError(
            f"rollouts.url={self._api.url}: another trainer owns this API ({has}; this run is {want}); use another "
            f"API, or, if that "
            "trainer is gone, restart run-api, or set rollouts.take_over=true, which makes it forget that trainer "
            "and its groups"
        )

    def _wait_for_api(self, timeout_s: float, key: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._api.answers():
            if time.monotonic() >= deadline:
                raise EngineError(
                    f"rollouts.url={self._api.url}: Atropos API not reachable for {timeout_s:g} s ({key}); start it "
                    f"with run-api, or "
                    "name the one that runs"
                )
            self._check_now_and_then()
            time.sleep(min(self._poll_s, 0.5))

    def _while_waiting(self) -> None:
        """Say what is waited for; see that it can come."""
        _, self.queue_size = self._api.status()
        counts = {"groups queued": self.queue_size, "environments": self._num_environments, "polls": self.num_polls}
        for unit, number in counts.items():
            progress.report(number, 0, unit)
        waited_s = time.monotonic() - self._since_s
        if self._check_now_and_then():
            self._check_owner()
        if waited_s > STUCK_S and self.queue_size:
            self._check_sizes()
        if time.monotonic() - self._last_report_s > REPORT_INTERVAL_S:
            self._last_report_s = time.monotonic()
            if waited_s > self._count_after_s:  # less and less often, see `num_environments`
                self._num_environments = self._api.num_environments(self._num_environments)
                self._count_after_s = 2 * waited_s
            what = (
                f"{self.queue_size} groups in its queue, {self._num_environments} environments registered, "
                f"{self.num_polls} polls"
            )
            log.info("waiting for rollouts from %s for %.0f s: %s", self._api.url, waited_s, what)

    def _check_owner(self) -> None:
        """An API that was reset, and got a group before it was polled again, says that there is no batch yet, and never
        forms one.
        """
        owner = self._api.owner()
        if owner.is_nobody:
            raise NotRegistered(f"{self._api.url}: no trainer is registered")
        if not self._is_ours(owner):
            raise self._foreign(owner)

    def _check_sizes(self) -> None:
        size, batch_size = self._api.newest_size(), self._registration.batch_size
        if size and batch_size % size != 0:
            raise ConfigError(
                f"data.rollouts_per_problem: the queue of {self._api.url} has a group of {size} sequences, and no "
                f"batch of {batch_size} "
                f"(data.problems_per_iteration x data.rollouts_per_problem) can be made of those; make it a multiple "
                f"of the environments' "
                "group_size, and restart run-api, whose queue keeps the group"
            )

    def _check_now_and_then(self) -> bool:
        """Call `look_after`, where it is time. Returns whether it was."""
        is_due = time.monotonic() - self._last_check_s > HEALTH_INTERVAL_S
        if is_due:
            self._last_check_s = time.monotonic()
            self._look_after()
        return is_due
