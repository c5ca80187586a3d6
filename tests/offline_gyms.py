"""`gyms`, in a process that with this module reaches no other machine."""

from __future__ import annotations

import socket
from typing import Any

from gyms import Aviary, SkyRL, TextArena

__all__ = ["Aviary", "SkyRL", "TextArena"]

connect = socket.socket.connect


def connect_here(self: socket.socket, address: Any) -> None:
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise PermissionError(f"a socket to {address}")
    connect(self, address)


socket.socket.connect = connect_here  # type: ignore[method-assign]
