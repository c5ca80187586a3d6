"""HTTP to a server: what calls that control it and requests for samples have in common, addresses and ports."""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partialmethod
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import psutil
from pydantic_core import from_json

from offline_grpo.errors import ConfigError, EngineError, require

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request

T = TypeVar("T")

SAFE_TO_RETRY_STATUS = (429, 502, 503, 504)
"""The server, or a proxy before it, says that it has not handled the request."""
LOOPBACK = "127.0.0.1"
KEEP_ALIVE_S = 3.0
"""How long an idle connection is kept. Servers close theirs after 5 s, and a request sent at that moment would break.
"""
TIMEOUT_S = 120.0  # of a call that controls a server: the longest silence
HEALTH_TIMEOUT_S = 5.0
SERVER_PORTS = range(15000, 30000)
"""Where free ports are looked for. A server opens its port seconds after it was chosen, and meanwhile the system could
give those above 32767 to any connection of this machine (Linux: net.ipv4.ip_local_port_range)."""
TRIES = 100
TAKEN = (errno.EADDRINUSE, errno.EACCES)
RELEASE_S = 10.0  # how long the processes of a server that was killed may take to release its port
POLL_S = 0.1


class Refused(EngineError):
    """The server answered with another status than 200: it does not know the request, or cannot do it."""


class NotFound(Refused):
    """It has nothing at that path."""


class ServerApi:
    """Calls that control a server, for callers that wait. Threads may share it.

    Each call has a connection of its own. A server that stands still for longer than it keeps idle connections closes
    them before it reads what came meanwhile.
    """

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self.base_url, self._http = base_url, httpx.Client(**connection(base_url, api_key, keeps_alive=False))

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str | float] | None = None,
        timeout_s: float = TIMEOUT_S,
        also: Sequence[int] = (),
    ) -> httpx.Response:
        """The answer to one call. Raises EngineError for no connection or no answer in time, Refused for a status other
        than 200 and those of `also`. `timeout_s` is the longest silence.
        """
        try:
            response = self._http.request(method, path, json=body, params=params, timeout=timeout_s)
        except httpx.HTTPError as error:
            url, why = f"{self.base_url.rstrip('/')}{path}", f"{type(error).__name__}: {error}"[:200]
            raise EngineError(f"{url}: {why}; is the server running, and reachable from here?") from error
        return response if response.status_code in also else checked(response)

    get, post = partialmethod(call, "GET"), partialmethod(call, "POST")


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
    with suppress(ValueError):  # a proxy's page is no JSON
        body = json.loads(text)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    return " ".join(text[:600].split())


def connection(base_url: str, api_key: str | None, *, keeps_alive: bool = True) -> dict[str, Any]:
    """Arguments of httpx's clients for a server. Proxies of the environment are not used. Raises ConfigError for a key
    that no header can carry.
    """
    fix = "must consist of printable ASCII characters: it is sent in an HTTP header"
    is_sendable = api_key is None or (api_key.isascii() and api_key.isprintable())
    require(is_sendable, "generation.api_key or engine.api_key", "...", fix)
    return {
        "base_url": base_url,
        "headers": {} if api_key is None else {"Authorization": f"Bearer {api_key}"},  # vLLM's and SGLang's
        "limits": httpx.Limits(max_keepalive_connections=None if keeps_alive else 0, keepalive_expiry=KEEP_ALIVE_S),
        "trust_env": False,
        "verify": base_url.lower().startswith("https:"),  # else httpx loads certificates, which takes long
    }


# Addresses and ports


def choose_port(host: str, port: int | None, *, key: str, wait_s: float = 0.0) -> int:
    """`port`, or a free one for null. Raises ConfigError if it is still taken after `wait_s` seconds, with the process
    that listens there, or if `host` is no address of this machine.

    Args:
        key: the setting of `port`, such as engine.port, beside which engine.host is that of `host`; or the setting of
            `host`, if there is no other.
    """
    deadline, num_left = time.monotonic() + wait_s, TRIES
    while True:
        # A free one is not drawn by `random`, whose state belongs to the run's seed; at last the system chooses.
        tried = port or (secrets.choice(SERVER_PORTS) if num_left > 0 else 0)
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
                probe.bind((host, tried))
                return int(probe.getsockname()[1])
        except OSError as error:
            # Another error than "taken" is the address's. A port that is taken may still become free.
            if error.errno not in TAKEN:
                host_key = f"{key.removesuffix('port')}host" if key.endswith("port") else key
                fix = f"cannot be used ({error.strerror}); name an address of this machine"
                raise ConfigError(f"{host_key}={host}: {fix}") from error
            if tried == (port or 0) and time.monotonic() >= deadline:
                owner = owner_of(port) if port else None
                problem = f"is taken by {owner}" if owner else f"cannot be used on {host} ({error.strerror})"
                fix = "stop that process, choose another port, or null for any free one"
                raise ConfigError(f"{key}={port}: {problem}; {fix}") from error
        num_left -= 1
        time.sleep(POLL_S if port else 0.0)


def owner_of(port: int) -> str | None:
    """The process that listens on a port, such as `python3 server.py (pid 4711)`; None if none is visible to us."""
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    pid = next((c.pid for c in listening if c.laddr and c.laddr.port == port), None)
    with suppress(psutil.Error):  # it has ended meanwhile
        if pid is not None:
            return f"{' '.join(' '.join(psutil.Process(pid).cmdline()).split())[:120]} (pid {pid})"
    return None


def address_towards(url: str) -> str:
    """The address of this machine from which it reaches a server. Raises OSError where there is no way to it."""
    parts = urlsplit(url)
    [(family, kind, *_, address), *_] = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as way:
        way.connect(address)  # of a datagram socket: sends nothing
        return str(way.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def reachable(host: str) -> str:
    """The host of a URL at which this machine finds a server that binds `host`."""
    host = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    return f"[{host}]" if ":" in host else host


def plain_url(url: str) -> str:
    """The URL without a trailing slash and without `/v1`."""
    return url.rstrip("/").removesuffix("/v1")
