"""Calls that fail; ports: a free one, or the name of who has the one that was asked for."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest
from engines import make_client
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.engine import http
from offline_grpo.engine.http import NotFound, Refused, address_towards, choose_port, owner_of, read
from offline_grpo.errors import ConfigError, EngineError

LISTEN = """import socket, time; s = socket.create_server(('127.0.0.1', 0))
print(s.getsockname()[1], flush=True); time.sleep(100)"""


def test_null_takes_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    port = choose_port("127.0.0.1", None, key="engine.port")
    monkeypatch.setattr(http, "SERVER_PORTS", (port, port + 1))
    with socket.create_server(("127.0.0.1", port)):
        assert choose_port("127.0.0.1", None, key="engine.port") == port + 1
        monkeypatch.setattr(http, "SERVER_PORTS", (port,))
        assert choose_port("127.0.0.1", None, key="engine.port") not in (0, port)


def test_a_taken_port_names_its_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            port = int(owner.stdout.readline())
            name = rf"{sys.executable} -c import socket, .*\(pid {owner.pid}\)"
            with pytest.raises(ConfigError, match=rf"^engine\.port={port}: is taken by {name}; "):
                choose_port("127.0.0.1", port, key="engine.port")
        finally:
            owner.kill()
    assert owner_of(port) is None
    assert choose_port("127.0.0.1", port, key="engine.port") == port


def test_a_server_that_starts_again_waits_for_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        port = before.getsockname()[1]
        released = threading.Timer(0.5, before.close)
        released.start()
        choose_port("127.0.0.1", port, key="engine.port", wait_s=10)
        released.join()


@pytest.mark.parametrize(
    ("url", "address"),
    [("http://127.0.0.1:8000", "127.0.0.1"), ("http://localhost:8000", "127.0.0.1"), ("http://[::1]:8000", "::1")],
)
def test_the_address_towards_a_server_is_on_its_network(url: str, address: str) -> None:
    assert address_towards(url) == address


def test_failed_calls() -> None:
    def script(request: Request) -> Reply:
        if request.path == "/late":
            web.hold(request)
        return replies[request.path][0]

    replies = {
        "/refused": (Reply({"error": {"message": "no such adapter"}}, status=404), NotFound, r"status 404: no such"),
        "/plain": (Reply(b"oops", status=500, headers={}), Refused, r"status 500: oops"),
        "/broken": (Reply(b'{"a": '), EngineError, r"a malformed answer \(ValueError: "),
        "/late": (Reply(), EngineError, "ReadTimeout"),
    }
    with ScriptedServer(script) as web:
        client = make_client(web.base_url)
        for path, (_, kind, message) in replies.items():
            with pytest.raises(kind, match=rf"^{web.base_url}{path}: {message}"):
                read(client.api.get(path, timeout_s=0.5), dict)
    with pytest.raises(ConfigError, match="must consist of printable ASCII"):
        make_client("http://127.0.0.1:1", api_key="schlüssel")
