"""Asks whether the Hugging Face Hub can be reached, before libraries that would try again for a minute or more need it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from time import monotonic
from typing import Any

from offline_grpo.errors import ConfigError, reason_of, require

CONNECT_TIMEOUT_S = 2.5
ANSWER_TIMEOUT_S = 4.0

_answered: set[str] = set()
"""Endpoints that have answered this process once."""

log = logging.getLogger(__name__)

for _name in ("httpx", "httpx2"):  # they log every request
    logging.getLogger(_name).setLevel(logging.WARNING)


def is_model_id(name: str) -> bool:
    """Whether a model of this name is looked for on the Hub: it is no local path, does not look like one, and may be an
    id.
    """
    if os.path.exists(name) or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return False
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def need_model(name: str, key: str) -> None:
    """Make sure that a model can be had from the Hub or the cache. A local folder is let through, and so is
    all where HF_HUB_OFFLINE is set.

    Where the Hub cannot be reached and the cache has the model, this process and those that it starts use the cache
    alone from then on.

    Raises:
        ConfigError: a local file; or the Hub cannot be reached, and the cache does not have the model's config.json.
    """
    require(not os.path.isfile(name), key, name, "is a file; give the folder of a model, or a Hugging Face id")
    if is_model_id(name):
        from huggingface_hub import try_to_load_from_cache

        fix = f"no folder has that name either; give one, set a proxy (HTTPS_PROXY), or run `hf download {name}` where there is a network"
        _need(f"{key}={name}", lambda: isinstance(try_to_load_from_cache(name, "config.json"), str), fix)


def need_dataset(name: str, key: str, fix: str) -> None:
    """As `need_model`, for a data set: the cache has it if an earlier run has loaded it.

    Args:
        fix: what to do where there is no network.
    """
    from huggingface_hub.constants import HF_HOME

    cache = Path(os.environ.get("HF_DATASETS_CACHE", Path(HF_HOME) / "datasets")).expanduser()
    _need(f"{key}={name}", (cache / name.replace("/", "___")).is_dir, f"{fix}, or set a proxy (HTTPS_PROXY)")


def ask() -> Callable[[], str | None]:
    """Ask the Hub in the background. What is returned waits for the answer: why the Hub cannot be reached, or None.

    A connection has to be there 2.5 s after the question; an answer may take 4 s. Neither depends on how many addresses
    a name has.
    """
    from huggingface_hub.constants import ENDPOINT

    answer: Queue[str | None] = Queue()
    asked_at: Queue[float] = Queue()
    connected = Event()
    Thread(
        target=lambda: answer.put(_head(ENDPOINT, asked_at, connected)), daemon=True
    ).start()  # a name server may keep it for longer

    def wait() -> str | None:
        began = (
            asked_at.get()
        )  # before that it imports and reads certificates, for which a busy machine may take seconds
        for limit in (CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S):
            try:
                return answer.get(timeout=max(0.0, began + limit - monotonic()))
            except Empty:
                if not connected.is_set():
                    return f"no connection to {ENDPOINT} within {limit:g} s"
        return f"{ENDPOINT} does not answer within {ANSWER_TIMEOUT_S:g} s"

    return wait


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set: nothing is downloaded."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _need(what: str, is_cached: Callable[[], bool], fix: str) -> None:
    from huggingface_hub.constants import ENDPOINT

    if is_offline() or ENDPOINT in _answered:
        return
    reason = ask()()
    if reason is None:
        _answered.add(ENDPOINT)
        return
    if not is_cached():
        raise ConfigError(
            f"{what}: the Hugging Face Hub cannot be reached ({reason}), and the cache does not have it; {fix}"
        )
    log.warning("%s: the Hugging Face Hub cannot be reached (%s); taken from the cache", what, reason)
    _use_cache_alone()


def _use_cache_alone() -> None:
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"  # servers
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def _head(url: str, asked_at: Queue[float], connected: Event) -> str | None:
    import httpx

    def trace(event: str, _: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":  # or to the proxy
            connected.set()

    try:
        with httpx.Client(timeout=2 * ANSWER_TIMEOUT_S) as client:  # `wait` has the limits, and gives up before
            asked_at.put(monotonic())
            client.head(url, extensions={"trace": trace})
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        ValueError,
        OSError,
    ) as error:  # ValueError: a proxy's URL; OSError: certificates
        return f"{url}: {reason_of(error)}"
    finally:
        asked_at.put(monotonic())  # where nothing could be asked
    return None
