"""An HTTP server that does what a test tells it, faults included, and notes what it was asked."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Reply:
    """What to answer.

    Args:
        body: bytes, or what is sent as JSON (NaN and infinities as Python writes them).
        cut: "reset" or "close" ends the connection in the middle of the body, "silence" before the answer.
        byte_pause_s: between any two bytes of the body.
    """

    body: Any = None
    status: int = 200
    cut: str = ""
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    byte_pause_s: float = 0.0

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass(frozen=True)
class Request:
    """What came in. `number` counts requests from 0; `connection` tells connections apart."""

    number: int
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: Any
    connection: int
    is_gone: Callable[..., bool]
    """Whether the client has closed the connection, or does so within the seconds that are given."""


class ScriptedServer:
    """Answers each request with what `script` returns for it, each in a thread of its own. Ends with `close`, or as a
    context manager.
    """

    def __init__(self, script: Callable[[Request], Reply]) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.num_active = self.max_active = 0
        self.changed = threading.Condition()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # the body would wait for the receipt of the headers

            def do_POST(self) -> None:
                server._handle(self)

            do_GET = do_HEAD = do_POST

            def log_message(self, *_: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def num_connections(self) -> int:
        return len({request.connection for request in self.requests})

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a state of this server; to be used from scripts and tests."""
        with self.changed:
            assert self.changed.wait_for(is_so, TIMEOUT_S), "waited in vain"

    def hold(self, request: Request) -> None:
        """Wait until the client gives up."""
        assert request.is_gone(TIMEOUT_S), "the client never gave up"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        content = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        url = urlsplit(handler.path)
        with self.changed:
            request = Request(
                number=len(self.requests),
                method=handler.command,
                path=url.path,
                query=parse_qs(url.query),
                headers=dict(handler.headers),
                body=_parsed(content) if content else None,
                connection=handler.client_address[1],
                is_gone=lambda within_s=0.0: _is_closed(handler.connection, within_s),
            )
            self.requests.append(request)
            self.num_active += 1
            self.max_active = max(self.max_active, self.num_active)
            self.changed.notify_all()
        try:
            reply = self.script(request)
        finally:
            with self.changed:
                self.num_active -= 1
                self.changed.notify_all()
        try:
            _send(handler, reply)
        except OSError:
            handler.close_connection = True  # the client did not wait


def _parsed(content: bytes) -> Any:
    """JSON, or the list of a JSON value on each line."""
    try:
        return json.loads(content)
    except ValueError:
        return [json.loads(line) for line in content.splitlines()]


def _send(handler: BaseHTTPRequestHandler, reply: Reply) -> None:
    handler.close_connection = bool(reply.cut)
    if reply.cut == "silence":
        return
    content = reply.content
    handler.send_response(reply.status)
    for name, value in reply.headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    if reply.byte_pause_s:
        for byte in content:
            time.sleep(reply.byte_pause_s)
            handler.wfile.write(bytes([byte]))
        return
    handler.wfile.write(content[: len(content) // 2] if reply.cut else content)
    if reply.cut == "reset":
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()


def _is_closed(connection: socket.socket, within_s: float) -> bool:
    readable, _, _ = select.select([connection], [], [], within_s)
    return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
