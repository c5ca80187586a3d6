"""HTTP to an inference server. Anything may answer at its address, so one function reads every answer: within a
deadline, up to a limit of bytes, uncompressed, without following redirects. What is not as expected becomes one line
that names the URL and the cause."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from offline_grpo.engine.background import made_once, start_loop
from offline_grpo.errors import ConfigError, EngineError

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

T = TypeVar("T")

SAFE_TO_RETRY_STATUS = (429, 502, 503, 504)
"""The server, or a proxy before it, says that it has not handled the request."""

KEEP_ALIVE_S = 3.0
"""How long an idle connection is kept. Servers close theirs after 5 s, and a request sent at that moment would break.
"""

MAX_CONTROL_BYTES = 32 * 2**20
"""Of an answer to a control call. The longest, the layout of a model with 100,000 tensors, has 25 MB."""

HEALTH_TIMEOUT_S = 5.0

MAX_TEXT = 300
"""Characters of a version, a tag, or a reason."""


class Refused(EngineError):
    """The server answered with another status than 200: it does not know the request, or cannot do it."""


class NotFound(Refused):
    """It has nothing at that path."""


class Unreachable(EngineError):
    """No answer came: no connection, a broken one, or none in time."""


class TooLarge(EngineError):
    """An answer of more bytes than it can need."""


class Late(Unreachable):
    """None in time, though there is a connection, or may be one."""


@dataclass(frozen=True)
class Answer:
    """What came back from `url`, complete. Its text is UTF-8, as JSON is, whatever the headers say."""

    url: str
    status: int
    body: bytearray

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def check_status(self) -> None:
        """Raise Refused unless the status is 200; the message has what the server says about it."""
        if 300 <= self.status < 400:
            raise Refused(
                f"{self.url}: status {self.status}: redirects are not followed; name the address that it leads to"
            )
        if self.status != 200:
            kind = NotFound if self.status == 404 else Refused
            raise kind(f"{self.url}: status {self.status}: {self.reason()}")

    def read(self, reader: Callable[[Any], T]) -> T:
        """What `reader` makes of the parsed JSON.

        Raises:
            EngineError: no JSON, or an error that `reader` ran into or raised. It does not keep the parsed answer
            alive, which can be
                twenty times as large as the body.
        """
        try:
            return reader(json.loads(self.body.decode()))
        except EngineError as error:
            failure = error.with_traceback(None)
        except RecursionError:
            failure = self._malformed("nested too deeply")
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            failure = self._malformed(f"{type(error).__name__}: {error}")
        raise failure

    def _beginning(self, length: int) -> str:
        return printable(self.body[: 4 * length].decode(errors="replace")[:length])

    def _malformed(self, problem: str) -> EngineError:
        return EngineError(
            f"{self.url}: a malformed answer ({printable(problem[:200])}): {self._beginning(200)}; is that the right server, "
            "with no proxy in between?"
        )

    def reason(self) -> str:
        """What the server says about a status other than 200."""
        try:
            body = json.loads(self.body)
            error = body.get("error", body) if isinstance(body, dict) else body
            message = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, RecursionError):
            message = self._beginning(300)
        return printable(message[:600]) or "no reason given, where status 200 belongs"


class ServerApi:
    """Calls that control a server, for callers that wait.

    Args:
        timeout_s: from the beginning of a call to the last byte of its answer, where the call names no other.
        keep_alive_s: 0 for a server that closes connections after an error, at which the next request would break.
    """

    def __init__(
        self, base_url: str, api_key: str | None, *, timeout_s: float = 120.0, keep_alive_s: float | None = None
    ) -> None:
        self._http = connection(base_url, api_key, ssl_context(base_url), keep_alive_s=keep_alive_s)
        self._timeout_s = timeout_s

    def get(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_CONTROL_BYTES,
    ) -> Answer:
        """The answer to GET `path`.

        Raises:
            Refused: a status other than 200.
            Unreachable: no connection, or no complete answer in time.
            EngineError: an answer that `exchange` refuses.
        """
        answer = self._call("GET", path, timeout_s, max_bytes, json=body)
        answer.check_status()
        return answer

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """The answer to POST `path`, see `get`."""
        answer = self._call("POST", path, timeout_s, json=body, params=params)
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
        """Whether there is a route for POST `path`; asked with GET, which changes nothing and which such routes refuse
        with status 405.

        Raises:
            EngineError: no connection, or no permission.
        """
        answer = self._call("GET", path, None)
        if answer.status not in (404, 405):
            answer.check_status()
        return answer.status != 404

    def _call(
        self, method: str, path: str, timeout_s: float | None, max_bytes: int = MAX_CONTROL_BYTES, **arguments: Any
    ) -> Answer:
        timeout_s = timeout_s or self._timeout_s
        asking = exchange(self._http, method, path, timeout_s=timeout_s, max_bytes=max_bytes, **arguments)
        answer = asyncio.run_coroutine_threadsafe(asking, _control_loop())
        try:
            return answer.result()
        except TimeoutError:
            kind, failure = Late, f"no answer within {timeout_s:g} s"
        except BROKEN as error:
            kind, failure = Unreachable, describe(error)
        finally:
            answer.cancel()  # a signal may have ended the wait
        raise kind(f"{url_of(self._http, path)}: {failure}; is the server running, and reachable from here?")


async def exchange(
    http: httpx.AsyncClient, method: str, path: str, *, timeout_s: float, max_bytes: int, **arguments: Any
) -> Answer:
    """Send a request and read its whole answer.

    Args:
        timeout_s: for all of it: connecting, sending, and every byte of the answer.

    Raises:
        TimeoutError: `timeout_s` has passed.
        BROKEN: no connection, a broken one, or something else than HTTP.
        EngineError: a compressed answer, whose size nobody knows before it is unpacked, or one of more than
        `max_bytes`.
    """
    url, body = url_of(http, path), bytearray()
    async with asyncio.timeout(timeout_s), http.stream(method, path, **arguments) as response:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise EngineError(
                f"{url}: a compressed answer ({printable(encoding[:40])}), which nobody asked for; is a proxy in between?"
            )
        async for part in response.aiter_raw():
            body += part
            if len(body) > max_bytes:
                raise TooLarge(
                    f"{url}: the answer has more than the {max_bytes} bytes that it can need; is that the right server?"
                )
    return Answer(url, response.status_code, body)


BROKEN = (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError)
"""What `exchange` raises where no answer came. The second and the third are of addresses in redirects, which httpx
parses though it does not follow them; OSErrors are of TLS."""


def connection(
    base_url: str,
    api_key: str | None,
    verify: ssl.SSLContext | bool,
    *,
    max_connections: int | None = None,
    keep_alive_s: float | None = None,
) -> httpx.AsyncClient:
    """Connections to a server, none of them open yet. `exchange` has the deadlines."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Accept-Encoding": "identity", **authorization(api_key)},
        limits=httpx.Limits(
            max_connections=max_connections, keepalive_expiry=KEEP_ALIVE_S if keep_alive_s is None else keep_alive_s
        ),
        timeout=None,
        trust_env=False,
        verify=verify,
    )


def ssl_context(base_url: str) -> ssl.SSLContext | bool:
    """For `connection`; False where there is nothing to encrypt, for it takes long to make."""
    return httpx.create_ssl_context(trust_env=False) if httpx.URL(base_url).scheme == "https" else False  # HTTPS: too


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that vLLM and SGLang expect where they were given a key; raises ConfigError for a key that fits into
    none.
    """
    if api_key is None:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError(
            "generation.api_key or engine.api_key: must consist of printable ASCII characters: it is sent in an HTTP header"
        )
    return {"Authorization": f"Bearer {api_key}"}


def url_of(http: httpx.AsyncClient, path: str) -> str:
    """For messages."""
    return f"{str(http.base_url).rstrip('/')}{path}"


def describe(error: Exception) -> str:
    """One of `BROKEN` in words."""
    what = "the connection broke"
    cause: BaseException = error
    if isinstance(error, httpx.ConnectError):
        what = "no connection"
        while (
            deeper := cause.__cause__ or cause.__context__
        ) is not None:  # httpx itself says that all attempts failed
            cause = deeper
    return f"{what} ({printable(str(cause)[:200]) or type(cause).__name__})"


def text_of(value: Any) -> str:
    """For `Answer.read`: a short text, printable; raises TypeError for anything else."""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise TypeError(f"a short text belongs where {str(value)[:60]} is")
    return printable(value)


def printable(text: str) -> str:
    """Foreign text as part of one line, without anything that a terminal would obey."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


@made_once
def _control_loop() -> asyncio.AbstractEventLoop:
    """One for the life of the process, because a connection belongs to the loop that it was opened in. Threads that
    make the first calls at the same time, as to several servers, get the same one."""
    return start_loop("control of servers")


def plain_url(url: str) -> str:
    """The URL without a trailing slash and without `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def reachable(host: str) -> str:
    """Where a server that binds `host` is found from this machine."""
    host = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    return f"[{host}]" if ":" in host else host
