"""Addresses and ports: a free port of this machine, the process that has one, and hosts as URLs need them."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
import time
from urllib.parse import urlsplit

import psutil

from offline_grpo.errors import ConfigError

SERVER_PORTS = range(15000, 30000)
"""Where free ports are looked for. A server opens its port seconds after it was chosen, and meanwhile the system could
give those above 32767 to any connection of this machine (Linux: net.ipv4.ip_local_port_range)."""
TRIES = 100
TAKEN = (errno.EADDRINUSE, errno.EACCES)
RELEASE_S = 10.0
"""How long the processes of a server that was killed may take to release its port."""
POLL_S = 0.1


def choose_port(host: str, port: int | None, *, key: str, wait_s: float = 0.0) -> int:
    """`port`, or a free one for null.

    Args:
        key: the setting of `port`, such as engine.port, beside which engine.host is that of `host`; or the setting of
            `host`, if there is no other.
        wait_s: for this long the port may be taken.

    Raises:
        ConfigError: something listens there, and the message names the process; or `host` is no address of this
            machine.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return _free(host, port)
        except OSError as error:
            if error.errno not in TAKEN:
                host_key = f"{key.removesuffix('port')}host" if key.endswith("port") else key
                fix = f"cannot be used ({error.strerror}); name an address of this machine"
                raise ConfigError(f"{host_key}={host}: {fix}") from error
            if time.monotonic() >= deadline:
                owner = owner_of(port) if port else None
                problem = f"is taken by {owner}" if owner else f"cannot be used on {host} ({error.strerror})"
                fix = "stop that process, choose another port, or null for any free one"
                raise ConfigError(f"{key}={port}: {problem}; {fix}") from error
        time.sleep(POLL_S)


def _free(host: str, port: int | None) -> int:
    """`port`, or for None any that is free. Raises OSError."""
    # not by `random`, whose state belongs to the run's seed
    ports = [port] if port is not None else [*(secrets.choice(SERVER_PORTS) for _ in range(TRIES)), 0]
    for tried in ports[:-1]:
        try:
            return _free(host, tried)
        except OSError as error:
            if error.errno not in TAKEN:
                raise
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        probe.bind((host, ports[-1]))
        return int(probe.getsockname()[1])


def owner_of(port: int) -> str | None:
    """The process that listens on a port, such as `python3 server.py (pid 4711)`; None if none is visible to us."""
    listening = (c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    pid = next((c.pid for c in listening if c.laddr and c.laddr.port == port), None)
    try:
        return None if pid is None else f"{' '.join(' '.join(psutil.Process(pid).cmdline()).split())[:120]} (pid {pid})"
    except psutil.Error:
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
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def reachable(host: str) -> str:
    """The host of a URL at which this machine finds a server that binds `host`."""
    host = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    return f"[{host}]" if ":" in host else host


def plain_url(url: str) -> str:
    """The URL without a trailing slash and without `/v1`."""
    return url.rstrip("/").removesuffix("/v1")
