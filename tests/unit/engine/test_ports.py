"""Ports: a free one, or the name of who has the one that was asked for."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading

import pytest

from offline_grpo.engine import ports
from offline_grpo.engine.ports import address_towards, choose_port, owner_of
from offline_grpo.errors import ConfigError

LISTEN = """import socket, time; s = socket.create_server(('127.0.0.1', 0))
print(s.getsockname()[1], flush=True); time.sleep(100)"""


def test_null_takes_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    port = choose_port("127.0.0.1", None, key="engine.port")
    monkeypatch.setattr(ports, "SERVER_PORTS", (port, port + 1))
    with socket.create_server(("127.0.0.1", port)):
        assert choose_port("127.0.0.1", None, key="engine.port") == port + 1
        monkeypatch.setattr(ports, "SERVER_PORTS", (port,))
        assert choose_port("127.0.0.1", None, key="engine.port") not in (0, port)


def test_a_free_one_is_not_drawn_from_the_seed_of_a_run() -> None:
    random.seed(7)
    before = random.getstate()
    choose_port("127.0.0.1", None, key="engine.port")
    assert random.getstate() == before


def test_a_taken_port_names_its_owner() -> None:
    with subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            port = int(owner.stdout.readline())
            name = rf"{sys.executable} -c import socket, .*\(pid {owner.pid}\)"
            with pytest.raises(
                ConfigError,
                match=rf"^engine\.port={port}: is taken by {name}; stop that process, .*null for any free one$",
            ):
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
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=rf"^engine\.port={port}: is taken by "),
    ):
        choose_port("127.0.0.1", port, key="engine.port", wait_s=0.3)


def test_a_port_whose_server_has_just_ended_is_free() -> None:
    """Its connections are in TIME_WAIT for a minute: a restart must not wait for that."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    connection, _ = server.accept()
    connection.close()  # the side that closes first keeps the state
    client.close()
    server.close()
    assert choose_port("127.0.0.1", port, key="engine.port") == port


@pytest.mark.parametrize(
    ("key", "named"), [("engine.port", r"engine\.host"), ("weight_sync.master_address", r"weight_sync\.master_address")]
)
@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "Cannot assign requested address"),
        ("2001:db8::1", "(Cannot assign requested address|Address family not supported.*)"),
    ],
)
def test_an_address_of_another_machine(host: str, reason: str, key: str, named: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{named}={host}: cannot be used \({reason}\); name an address of this machine$"
    ):
        choose_port(host, None, key=key)


@pytest.mark.parametrize(
    ("url", "address"),
    [("http://127.0.0.1:8000", "127.0.0.1"), ("http://localhost:8000", "127.0.0.1"), ("http://[::1]:8000", "::1")],
)
def test_the_address_towards_a_server_is_on_its_network(url: str, address: str) -> None:
    assert address_towards(url) == address
