"""The trainer's side of the Atropos API (`run-api`), a queue of groups in the memory of one process.

What it does that its answers do not say: a second registration changes nothing, so the first trainer's settings stay;
the first `/batch` lets environments register; a reset, or groups that came before the registration, leave it without a
trainer until it is reset and registered with again; a batch with NaN or an infinity in it is answered with status 500,
and lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from offline_grpo.engine.http import SAFE_TO_RETRY_STATUS, Answer, Refused, ServerApi, TooLarge, Unreachable, text_of
from offline_grpo.errors import EngineError

T = TypeVar("T")

TIMEOUT_S = 30.0
"""For an answer. The API does nothing else while it reads or writes a large group."""
BATCH_TIMEOUT_S = 300.0
"""For a whole batch."""
MAX_BYTES_PER_TOKEN = 128
"""Of a batch: two ids, at most three numbers of 20 digits, and the text, which the API repeats where an environment
sends messages.
"""
MAX_BYTES_PER_SEQUENCE = 2**16
"""Of a batch, beside its tokens."""
MAX_ENVIRONMENTS = 1000
"""That are counted."""


@dataclass(frozen=True)
class Registration:
    """What a trainer tells the API, and through it the environments: the API's own names.

    `wandb_group` is the name by which a run knows its registration again, and where environments log. `batch_size`
    counts sequences.
    """

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int
    num_steps: int


@dataclass(frozen=True)
class Owner:
    """The trainer whose registration the API has. `group` is None, or `batch_size` negative, where it has none."""

    group: str | None
    batch_size: int
    max_token_len: int

    @property
    def is_nobody(self) -> bool:
        return self.group is None or self.batch_size < 0


class NotRegistered(EngineError):
    """The API knows no trainer: it was started anew, or reset."""


class _Http(ServerApi):
    """What a proxy says for an API that is away is no answer of the API's."""

    def _call(self, *args: Any, **options: Any) -> Answer:
        answer = super()._call(*args, **options)
        if answer.status in SAFE_TO_RETRY_STATUS:
            raise Unreachable(f"{answer.url}: status {answer.status} from a proxy; is run-api running behind it?")
        return answer


class AtroposApi:
    """Calls to the API at `url`. Each raises what `ServerApi.get` does."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = _Http(self.url, None, timeout_s=TIMEOUT_S, keep_alive_s=0)

    def answers(self) -> bool:
        """Whether something answers."""
        try:
            self._http.get("/info")
        except Unreachable:
            return False
        except EngineError:
            return True
        return True

    def owner(self) -> Owner:
        """Whose registration it has."""
        group = self._http.get("/wandb_info").read(
            lambda found: None if found["group"] is None else text_of(found["group"])
        )
        sizes = self._http.get("/info").read(
            lambda found: (_count(found["batch_size"]), _count(found["max_token_len"]))
        )
        return Owner(group, *sizes)

    def register(self, registration: Registration) -> None:
        """Register. It does nothing where another trainer has; `owner` tells."""
        self._http.post("/register", asdict(registration)).read(lambda found: found["uuid"])

    def reset(self) -> None:
        """Make it forget trainer, environments and groups."""
        self._http.get("/reset_data")

    def batch(self, *, max_tokens: int, num_sequences: int) -> Answer | None:
        """The newest of the batches that are complete, None if there is none. The groups are not read yet.

        Raises:
            NotRegistered: the API has no trainer.
            EngineError: also where the batch is lost: see the top of this file, or larger than `max_tokens` can make
            it.
        """
        limit = max_tokens * MAX_BYTES_PER_TOKEN + (num_sequences + 1) * MAX_BYTES_PER_SEQUENCE
        try:
            answer = self._http.get("/batch", timeout_s=BATCH_TIMEOUT_S, max_bytes=limit)
        except TooLarge as error:
            raise EngineError(
                f"{error} If it is: environments must not send distill_* or other long fields, which are not read"
            ) from error
        if len(answer.body) > MAX_BYTES_PER_SEQUENCE:
            return answer
        found: Any = answer.read(lambda found: (found["batch"], found.get("status")))
        batch, status = found
        if status == "error":
            raise NotRegistered(f"{answer.url}: no trainer is registered")
        return None if not batch else answer

    def status(self) -> tuple[int, int]:
        """How many batches were formed since it was started, and how many groups are in the queue."""
        return self._http.get("/status").read(
            lambda found: (_count(found["current_step"]), _count(found["queue_size"]))
        )

    def num_environments(self, at_least: int = 0) -> int:
        """How many environments have registered; `at_least` of them have, as an earlier call said.

        Nothing but the error about the first one that has not tells, and the API prints a traceback with it.
        """
        while at_least < MAX_ENVIRONMENTS and self._of_environment(at_least, lambda _: True):
            at_least += 1
        return at_least

    def largest_group(self) -> int | None:
        """The number of sequences of the largest group in the queue; of the newest one where no environment has
        registered.
        """
        size = self._of_environment(0, lambda found: _count(found["max_group_size"]))
        return self._http.get("/latest_example").read(lambda found: len(found["tokens"])) if size is None else size

    def _of_environment(self, number: int, reader: Callable[[Any], T]) -> T | None:
        try:
            return self._http.get("/status-env", {"env_id": number}).read(reader)
        except Refused:  # there is no such environment
            return None


def _count(value: Any) -> int:
    if type(value) is not int or not -1 <= value <= 2**53:
        raise TypeError(f"a count belongs where {str(value)[:60]} is")
    return value
