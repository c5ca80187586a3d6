"""HTTP to a server: calls that control it, and what they have in common with requests for samples."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import httpx

from offline_grpo.errors import ConfigError, EngineError

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


class Unreachable(EngineError):
    """No answer came: no connection, a broken one, or none in time."""


@dataclass(frozen=True)
class Answer:
    """A whole answer from `url`."""

    url: str
    status: int
    body: bytes

    @classmethod
    def of(cls, response: httpx.Response) -> Answer:
        """The answer that httpx has read."""
        return cls(str(response.request.url), response.status_code, response.content)

    def check_status(self) -> None:
        """Raise Refused unless the status is 200; the message has the server's own words."""
        if self.status != 200:
            kind = NotFound if self.status == 404 else Refused
            raise kind(f"{self.url}: status {self.status}: {self.reason()}")

    def read(self, reader: Callable[[Any], T]) -> T:
        """What `reader` makes of the parsed JSON. Raises EngineError where the answer is no JSON, or `reader` fails."""
        try:
            return reader(json.loads(self.body))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            why = f"a malformed answer ({type(error).__name__}: {str(error)[:200]}): {self.body[:200]!r}"
            raise EngineError(f"{self.url}: {why}; is that the right server, with no proxy in between?") from error

    def reason(self) -> str:
        """The server's own words about a status other than 200, as one line."""
        text = self.body.decode(errors="replace")
        with suppress(ValueError):
            body = json.loads(text)
            error = body.get("error", body) if isinstance(body, dict) else body
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        return " ".join(text[:600].split())


class ServerApi:
    """Calls that control a server, for callers that wait. Threads may share it.

    `get` and `post` return the answer; `timeout_s` is the longest silence.

    Raises:
        Refused: a status other than 200.
        Unreachable: no connection, or no answer in time.
    """

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._http = httpx.Client(**connection(base_url, api_key))

    def get(self, path: str, *, timeout_s: float = TIMEOUT_S) -> Answer:
        """The answer to GET `path`."""
        answer = self._call("GET", path, timeout=timeout_s)
        answer.check_status()
        return answer

    def post(
        self, path: str, body: Any = None, *, params: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> Answer:
        """The answer to POST `path`."""
        answer = self._call("POST", path, timeout=timeout_s, json=body, params=params)
        answer.check_status()
        return answer

    def answers(self, path: str) -> bool:
        """Whether GET `path` succeeds now."""
        try:
            self.get(path, timeout_s=HEALTH_TIMEOUT_S)
        except EngineError:
            return False
        return True

    def has(self, path: str) -> bool:
        """Whether there is a route for POST `path`; asked with GET, which such routes refuse with status 405.

        Raises:
            EngineError: no connection, or no permission.
        """
        answer = self._call("GET", path, timeout=TIMEOUT_S)
        if answer.status not in (404, 405):
            answer.check_status()
        return answer.status != 404

    def _call(self, method: str, path: str, **arguments: Any) -> Answer:
        try:
            return Answer.of(self._http.request(method, path, **arguments))
        except httpx.HTTPError as error:
            url = f"{str(self._http.base_url).rstrip('/')}{path}"
            raise Unreachable(f"{url}: {describe(error)}; is the server running, and reachable from here?") from error


def connection(base_url: str, api_key: str | None) -> dict[str, Any]:
    """Arguments of httpx's clients for a server. Proxies of the environment are not used."""
    return {
        "base_url": base_url,
        "headers": authorization(api_key),
        "limits": httpx.Limits(keepalive_expiry=KEEP_ALIVE_S),
        "trust_env": False,
        "verify": base_url.lower().startswith("https:") and _ssl_context(),
    }


@cache
def _ssl_context() -> ssl.SSLContext:
    """Takes long to make."""
    return httpx.create_ssl_context(trust_env=False)


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that vLLM and SGLang expect. Raises ConfigError for a key that does not fit into one."""
    if api_key is None:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        fix = "must consist of printable ASCII characters: it is sent in an HTTP header"
        raise ConfigError(f"generation.api_key or engine.api_key: {fix}")
    return {"Authorization": f"Bearer {api_key}"}


def describe(error: Exception) -> str:
    """An error of httpx in words."""
    return f"{type(error).__name__}: {error}"[:200]
