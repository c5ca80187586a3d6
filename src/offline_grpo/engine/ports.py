"""Ports of this machine: find a free one, or say who has the one that was asked for."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from urllib.parse import urlsplit

import psutil

from offline_grpo.errors import ConfigError

SERVER_PORTS = range(15000, 30000)
"""Where free ports are looked for: a server opens its port only seconds after it was chosen, and meanwhile the system
could give those above 32767 to any connection that a process of this machine opens (Linux:
net.ipv4.ip_local_port_range)."""
TRIES = 100
RELEASE_S = 10.0
"""How long the processes of a server that was killed may take to end, and to let go of its port."""
POLL_S = 0.1


def address_towards(url: str) -> str:
    """The address of this machine from which it reaches a server.

    Raises:
        OSError: there is no way to it.
    """
    parts = urlsplit(url)
    [(family, kind, *_, address), *_] = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as way:
        way.connect(address)  # of a datagram socket: sends nothing
        return str(way.getsockname()[0])


def choose_port(host: str, port: int | None, *, key: str) -> int:
    """`port`, or a free one for null.

    Args:
        key: the setting of `port`, such as engine.port, beside which engine.host is that of `host`; or the only
            one, that of `host`.

    Raises:
        ConfigError: something listens there already, and the message names the process; or `host` is no address of this
        machine.
    """
    try:
        return _probed(host, port) if port is not None else _any_free(host)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # the address is to blame: no other port would help
            host_key = f"{key.removesuffix('port')}host" if key.endswith("port") else key
            raise ConfigError(
                f"{host_key}={host}: cannot be used ({error.strerror}); name an address of this machine"
            ) from error
        owner = (
            f"is taken by {owner_of(port)}"
            if port and owner_of(port)
            else f"cannot be used on {host} ({error.strerror})"
        )
        raise ConfigError(
            f"{key}={port}: {owner}; stop that process, choose another port, or null for any free one"
        ) from error


def choose_again(host: str, port: int, *, key: str) -> None:
    """Wait until a server's port is free again, for at most `RELEASE_S`. Raises as `choose_port`."""
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            choose_port(host, port, key=key)
            return
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def _any_free(host: str) -> int:
    for _ in range(TRIES):
        try:
            return _probed(
                host, secrets.choice(SERVER_PORTS)
            )  # not drawn by `random`, whose state belongs to the run's seed
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    return _probed(host, 0)


def _probed(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def owner_of(port: int) -> str | None:
    """The process that listens on a port, such as `python3 server.py (pid 4711)`; None if there is none that we may
    see.
    """
    try:
        listeners = [
            c
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port
        ]
    except psutil.AccessDenied:
        return None
    for listener in listeners:
        if listener.pid is None:
            return "a process of another user, or one that is ending"
        try:
            return f"{' '.join(' '.join(psutil.Process(listener.pid).cmdline()).split())[:120]} (pid {listener.pid})"
        except psutil.Error:
            return f"pid {listener.pid}"
    return None
