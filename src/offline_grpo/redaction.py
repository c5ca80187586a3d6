"""Keeps secrets out of what a run publishes or hands on: a model card, W&B, TensorBoard, a bug report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_NAME = (
    r"(?:(?:[\w-]*[_-])?(?:(?:api|access|private)[_-]?keys?|(?:access|auth|refresh|session)?token|passw(?:or)?ds?"
    r"|passphrase|secrets?|credentials?|authorization)|[\w-]+[_-](?:key|pat))"
)
_VALUE = r"""\$\{[^}]*\}[^\s,}\]'"]*|'[^']*'|"[^"]*"|(?:(?:Bearer|Basic|Token)\s+)?[^\s,}\]'"]+"""
_SECRET = re.compile(_NAME, re.IGNORECASE)
_ORDINARY = re.compile(
    r".*(?:answer|prompt|label|input|output|image|video|text|reward_fn|sort|pad|eos|bos|unk|mask|sep|cls|stop)_(key|token)"
)
"""Names of columns and of special tokens."""
_SETTING = re.compile(rf"(?<![\w?&#])({_NAME})(['\"]?\s*[=:]\s*)({_VALUE})", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)[^/\s'\"?#]+(?=@)")
_ELSEWHERE = re.compile(rf"([?&#](?:{_NAME}|key|sig|[\w-]*signature)=|\bBearer\s+)[^&#\s'\"]+", re.IGNORECASE)


def redacted(value: Any) -> Any:
    """A configuration, or a part of it, with `***` for the value of every key such as `api_key`, `HF_TOKEN` or
    `password`; texts lose what `redacted_text` finds in them.
    """
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if child not in (None, "", True, False) and _is_secret(str(key)) else redacted(child)
            for key, child in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redacted(child) for child in value]
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """A word of a command line, or another text, without the values in `generation.api_key=VALUE`, `{api_key: VALUE}`,
    `Authorization: Bearer VALUE`, and `https://USER:PASSWORD@host/?key=VALUE`.
    """

    def hide(found: re.Match[str]) -> str:
        name, sign, secret = found.groups()
        return found.group() if secret == "null" or not _is_secret(name) else f"{name}{sign}{HIDDEN}"

    return _ELSEWHERE.sub(rf"\1{HIDDEN}", _IN_URL.sub(HIDDEN, _SETTING.sub(hide, text)))


def _is_secret(name: str) -> bool:
    return _SECRET.fullmatch(name) is not None and _ORDINARY.fullmatch(name) is None
