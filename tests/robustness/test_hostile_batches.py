"""Batches of a gigabyte, compressed bombs and worse where those of an Atropos API belong: each is lost, and the next
one is trained on.
"""

from __future__ import annotations

import gzip
import resource
import socket
from collections.abc import Callable
from typing import Any

import pytest
from atropos_api import make_source, pair
from scripted_server import Reply, Request, ScriptedServer

GIB = 2**30


def endless(connection: socket.socket) -> None:
    """A chunked body of a gigabyte, as long as somebody reads it."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n%s\r\n" % (2**20, b" " * 2**20)
    for _ in range(1024):
        connection.sendall(chunk)
    connection.sendall(b"0\r\n\r\n")


def bomb() -> bytes:
    """100 MB of blanks in 100 kB."""
    return gzip.compress(b'{"batch": [' + b" " * 100_000_000 + b"]}", compresslevel=1)


HOSTILE: dict[str, Callable[[], Reply]] = {
    "a gigabyte": lambda: Reply(raw=endless),
    "a bomb": lambda: Reply(bomb(), headers={"Content-Type": "application/json", "Content-Encoding": "gzip"}),
    "a bomb that is not announced": lambda: Reply(bomb()),
    "no JSON": lambda: Reply(b"<html>" + b"x" * 100_000),
    "nested": lambda: Reply(b'{"batch": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "no list": lambda: Reply({"batch": {"tokens": "x" * 100_000}}),
    "lists of nothing": lambda: Reply({"batch": [[], {}, None, 1, "x", [[]]] * 10_000}),
    "a redirect": lambda: Reply(b"", status=302, headers={"Location": "http://127.0.0.1:1/batch"}),
    "status 500": lambda: Reply(b"Internal Server Error", status=500),
    "cut": lambda: Reply({"batch": [{"tokens": [[1] * 100_000]}]}, cut="close"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_one_batch_is_lost_and_the_next_one_comes(what: str) -> None:
    batches = [Reply({"batch": None}), HOSTILE[what]()]
    registered: dict[str, Any] = {}

    def script(request: Request) -> Reply:
        if request.path == "/register":
            registered.update(request.body)
            return Reply({"uuid": 1})
        answers: dict[str, Any] = {
            "/info": {
                "batch_size": registered.get("batch_size", -1),
                "max_token_len": registered.get("max_token_len", -1),
            },
            "/wandb_info": {"group": registered.get("wandb_group"), "project": registered.get("wandb_project")},
            "/status": {"current_step": 0, "queue_size": 0},
        }
        if request.path != "/batch":
            return Reply(answers[request.path])
        return batches.pop(0) if batches else Reply({"batch": [pair(1), pair(2)]})

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with ScriptedServer(script) as server:
        source = make_source(server.base_url)
        source.start(0, None)
        groups = source.next(0)
    assert not batches
    assert len(groups) == 2
    assert sum(len(group.rollouts) for group in groups) == 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < GIB / 4
    source.close()
