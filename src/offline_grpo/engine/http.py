"""HTTP to a server: calls that control it, and what they have in common with requests for samples."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from pydantic_core import from_json

from offline_grpo.errors import EngineError, require

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

T = TypeVar("T")

SAFE_TO_RETRY_STATUS = (429, 502, 503, 504)
"""The server, or a proxy before it, says that it has not handled the request."""
KEEP_ALIVE_S = 3.0
"""How long an idle connection is kept. Servers close theirs after 5 s, and a request sent at that moment would break.
"""
TIMEOUT_S = 120.0
HEALTH_TIMEOUT_S = 5.0


class Refused(EngineError):
    """The server answered with another status than 200: it does not know the request, or cannot do it."""


class NotFound(Refused):
    """It has nothing at that path."""


class ServerApi:
    """Calls that control a server, for callers that wait. Threads may share it.

    Each has a connection of its own. A server that stands still for longer than it keeps idle connections closes them
    before it reads what came meanwhile.

    `get` and `post` return the response; `timeout_s` is the longest silence.

    Raises:
        Refused: a status other than 200.
        EngineError: no connection, or no answer in time.
    """

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._http = httpx.Client(**connection(base_url, api_key, keeps_alive=False))

    def get(self, path: str, *, timeout_s: float = TIMEOUT_S) -> httpx.Response:
        """The answer to GET `path`."""
        return checked(self._call("GET", path, timeout=timeout_s))

    def post(
        self, path: str, body: Any = None, *, params: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> httpx.Response:
        """The answer to POST `path`."""
        return checked(self._call("POST", path, timeout=timeout_s, json=body, params=params))

    def is_healthy(self) -> bool:
        """Whether GET /health succeeds now."""
        try:
            self.get("/health", timeout_s=HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    def has(self, path: str) -> bool:
        """Whether there is a route for POST `path`; asked with GET, which such routes refuse with status 405."""
        response = self._call("GET", path, timeout=TIMEOUT_S)
        if response.status_code not in (404, 405):
            checked(response)
        return response.status_code != 404

    def _call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            url = f"{str(self._http.base_url).rstrip('/')}{path}"
            raise EngineError(f"{url}: {describe(error)}; is the server running, and reachable from here?") from error


def checked(response: httpx.Response) -> httpx.Response:
    """The response, if its status is 200. Raises Refused with the server's own words."""
    if response.status_code != 200:
        kind = NotFound if response.status_code == 404 else Refused
        raise kind(f"{response.url}: status {response.status_code}: {reason(response)}")
    return response


def read(response: httpx.Response, reader: Callable[[Any], T]) -> T:
    """What `reader` makes of the parsed JSON. Raises EngineError where the answer is no JSON, or `reader` fails."""
    try:
        return reader(from_json(response.content))  # three times as fast as json: an answer has 100 KB and more
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"a malformed answer ({type(error).__name__}: {str(error)[:200]}): {response.content[:200]!r}"
        raise EngineError(f"{response.url}: {why}; is that the right server, with no proxy in between?") from error


def reason(response: httpx.Response) -> str:
    """The server's own words about a status other than 200, as one line."""
    text = response.text
    with suppress(ValueError):
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text[:600].split())


def connection(base_url: str, api_key: str | None, *, keeps_alive: bool = True) -> dict[str, Any]:
    """Arguments of httpx's clients for a server. Proxies of the environment are not used."""
    num_idle = None if keeps_alive else 0
    return {
        "base_url": base_url,
        "headers": authorization(api_key),
        "limits": httpx.Limits(max_keepalive_connections=num_idle, keepalive_expiry=KEEP_ALIVE_S),
        "trust_env": False,
        "verify": base_url.lower().startswith("https:"),  # else httpx loads certificates, which takes long
    }


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that vLLM and SGLang expect. Raises ConfigError for a key that does not fit into one."""
    if api_key is None:
        return {}
    fix = "must consist of printable ASCII characters: it is sent in an HTTP header"
    require(api_key.isascii() and api_key.isprintable(), "generation.api_key or engine.api_key", "...", fix)
    return {"Authorization": f"Bearer {api_key}"}


def describe(error: Exception) -> str:
    """An error of httpx in words."""
    return f"{type(error).__name__}: {error}"[:200]
