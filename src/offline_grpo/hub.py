"""Asks whether the Hugging Face Hub can be reached, before libraries try again for a minute."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from pathlib import Path

from offline_grpo.errors import ConfigError, reason_of

CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 2.5, 4.0

log = logging.getLogger(__name__)

for _name in ("httpx", "httpx2"):  # they log every request
    logging.getLogger(_name).setLevel(logging.WARNING)


def is_model_id(name: str) -> bool:
    """Whether a model of this name is looked for on the Hub: it is no local path, and may be an id."""
    if os.path.exists(name) or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return False
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def need_model(name: str, key: str) -> None:
    """Raise ConfigError unless a model is a local folder, or can be had from the Hub or the cache. Where the Hub cannot
    be reached, this process and those that it starts use the cache alone from then on.
    """
    if os.path.isfile(name):
        raise ConfigError(key, name, "is a file; give the folder of a model, or a Hugging Face id")
    is_id = is_model_id(name)
    if not is_id and not os.path.exists(name):
        raise ConfigError(key, name, "no such folder; give a local model folder or a Hugging Face id")
    if is_id:
        from huggingface_hub import try_to_load_from_cache

        fix = f"give a folder, set a proxy (HTTPS_PROXY), or run `hf download {name}` where there is a network"
        _need(f"{key}={name}", isinstance(try_to_load_from_cache(name, "config.json"), str), fix)


def need_dataset(name: str, key: str, fix: str) -> None:
    """As `need_model`, for a data set; `fix` is the advice where there is no network."""
    from huggingface_hub.constants import HF_HOME

    folder = Path(os.environ.get("HF_DATASETS_CACHE", Path(HF_HOME) / "datasets")).expanduser()
    _need(f"{key}={name}", (folder / name.replace("/", "___")).is_dir(), f"{fix}, or set a proxy (HTTPS_PROXY)")


@cache
def unreachable() -> str | None:
    """Why the Hub cannot be reached, or None if it answers. Asked once in a process."""
    import httpx
    from huggingface_hub.constants import ENDPOINT

    try:
        httpx.head(ENDPOINT, timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:  # the last two: a proxy, certificates
        return f"{ENDPOINT}: {reason_of(error)}"
    return None


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set: nothing is downloaded."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _need(wanted: str, is_cached: bool, fix: str) -> None:
    if is_offline() or (reason := unreachable()) is None:
        return
    if not is_cached:
        raise ConfigError(f"{wanted}: the Hugging Face Hub cannot be reached ({reason}), nor is it cached; {fix}")
    log.warning("%s: the Hugging Face Hub cannot be reached (%s); taken from the cache", wanted, reason)
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"  # for servers
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
