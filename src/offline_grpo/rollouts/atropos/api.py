"""The trainer's side of the Atropos API (`run-api`), a queue of groups in the memory of one process.

What it does that its answers do not say: a second registration changes nothing, so the first trainer's settings stay;
the first `/batch` lets environments register; a reset, or groups that came before the registration, leave it without a
trainer until it is reset and registered with again; a batch with NaN or an infinity in it is answered with status 500,
and lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic_core import from_json

from offline_grpo.errors import EngineError

TIMEOUT_S = 30.0
"""Between two parts of an answer. The API does nothing else while it reads or writes a large group."""
BATCH_TIMEOUT_S = 300.0
AWAY_STATUS = (429, 502, 503, 504)
"""A proxy's answers for an API that is away."""


@dataclass(frozen=True)
class Owner:
    """The trainer that is registered. Without one, `group` is None or `batch_size` negative."""

    group: str | None
    batch_size: int
    max_token_len: int

    @property
    def is_nobody(self) -> bool:
        return self.group is None or self.batch_size < 0


class NotRegistered(EngineError):
    """The API knows no trainer: it was started anew, or reset."""


class Unreachable(EngineError):
    """The API does not answer."""


class AtroposApi:
    """Calls to the API at `url`. Each raises Unreachable, or EngineError for a status other than 200."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        limits = httpx.Limits(max_keepalive_connections=0)  # it closes a connection after an error
        self._http = httpx.Client(base_url=self.url, limits=limits, trust_env=False)

    def answers(self) -> bool:
        """Whether something answers."""
        try:
            self._call("GET", "/info")
        except EngineError as error:
            return not isinstance(error, Unreachable)
        return True

    def owner(self) -> Owner:
        group, info = self._get("/wandb_info")["group"], self._get("/info")
        return Owner(group, info["batch_size"], info["max_token_len"])

    def register(self, body: Mapping[str, Any]) -> None:
        """Register. It does nothing where another trainer has; `owner` tells."""
        self._call("POST", "/register", body)

    def reset(self) -> None:
        """Make it forget trainer, environments and groups."""
        self._call("GET", "/reset_data")

    def batch(self) -> list[Any] | None:
        """The groups of the newest of the batches that are complete, None if there is none.

        Raises:
            NotRegistered: the API has no trainer.
            EngineError: also where the batch is lost: see the top of this file.
        """
        found = from_json(self._call("GET", "/batch", timeout_s=BATCH_TIMEOUT_S))
        if found.get("status") == "error":
            raise NotRegistered(f"{self.url}: no trainer is registered")
        return found["batch"] or None

    def status(self) -> tuple[int, int]:
        """How many batches were formed since it was started, and how many groups are in the queue."""
        found = self._get("/status")
        return found["current_step"], found["queue_size"]

    def newest_size(self) -> int:
        """The number of sequences of the group that came last, 0 without one."""
        return len(self._get("/latest_example")["tokens"])

    def _get(self, path: str) -> Any:
        return from_json(self._call("GET", path))

    def _call(self, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> bytes:
        where = f"{self.url}{path}"
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.TransportError as error:
            raise Unreachable(f"{where}: {type(error).__name__}: {error}.") from error
        if answer.status_code in AWAY_STATUS:
            raise Unreachable(f"{where}: status {answer.status_code} from a proxy; is run-api running behind it?")
        if answer.status_code != 200:
            raise EngineError(f"{where}: status {answer.status_code}: {answer.text[:300]}")
        return answer.content
