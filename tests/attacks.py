"""What may answer in place of an inference server: each attack turns the right reply into another. Seeded."""

from __future__ import annotations

import copy
import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from scripted_server import Reply

Attack = Callable[[Reply, Random], Reply]

JUNK: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "a\x1b[31m\nb",
    [],
    {},
    [[]],
    -(10**4),
    10**300,
    10**30,
    -(10**9),
    float("nan"),
    float("inf"),
    "x" * 10**5,
)
"""Takes the place of any value of an answer. None of them is a token id, a logprob, a version or a tag."""

DEEP = b"[" * 200_000
HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def places(value: Any, parents: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values inside parsed JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*parents, key)
        yield from places(child, (*parents, key))


def mutated(body: Any, random: Random) -> Any:
    """A copy of parsed JSON with one value replaced by junk, deleted, or, in a list, doubled."""
    paths = list(places(body))
    if not paths:
        return random.choice(JUNK)
    path = random.choice(paths)
    body = owner = copy.deepcopy(body)
    for key in path[:-1]:
        owner = owner[key]
    match random.choice(("junk", "junk", "junk", "delete", "double")):
        case "delete":
            del owner[path[-1]]
        case "double" if isinstance(owner, list):
            owner.insert(path[-1], owner[path[-1]])
        case _:
            owner[path[-1]] = copy.deepcopy(random.choice(JUNK))
    return body


def damaged(content: bytes, random: Random) -> bytes:
    """A body with a few bytes changed, cut, or doubled."""
    data = bytearray(content or b"{}")
    match random.choice(("bytes", "cut", "double", "insert")):
        case "bytes":
            for _ in range(random.randint(1, 4)):
                data[random.randrange(len(data))] = random.randrange(256)
        case "cut":
            del data[random.randrange(len(data)) :]
        case "double":
            data = data * 2
        case _:
            at = random.randrange(len(data) + 1)
            data[at:at] = random.choice((b"\x00", b"\xff\xfe", b"[[[[", b"9" * 5000, b"NaN", b'"', DEEP))
    return bytes(data)


def _raw(*parts: bytes, pause_s: float = 0.0, repeat: int = 1) -> Attack:
    """These bytes on the connection, the last of them `repeat` times."""

    def send(connection: socket.socket) -> None:
        for part in (*parts[:-1], *parts[-1:] * repeat):
            connection.sendall(part)
            time.sleep(pause_s)

    return lambda reply, random: Reply(raw=send)


def _body(body: Any, status: int = 200, **headers: str) -> Attack:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda reply, random: Reply(body, status, headers={"Content-Type": "application/json", **names})


def _hold(connection: socket.socket) -> None:
    connection.recv(1)  # until the client gives up


def _packed(reply: Reply, random: Random) -> Reply:
    return Reply(gzip.compress(reply.content), headers={"Content-Type": "application/json", "Content-Encoding": "gzip"})


def _right_after_continue(reply: Reply, random: Random) -> Reply:
    head = b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + HEADERS + b"Content-Length: %d\r\n\r\n" % len(reply.content)
    return Reply(raw=lambda connection: connection.sendall(head + reply.content))


FOREVER = 10**6
ATTACKS: dict[str, Attack] = {
    "html": _body(b"<html><h1>Welcome to nginx!</h1></html>", Content_Type="text/html"),
    "empty": _body(b""),
    "text": _body(b"ok\x1b[2J\n", Content_Type="text/plain"),
    "no content": _body(b"", 204),
    "created": _body({}, 201),
    "redirect": _body(b"", 302, Location="/"),
    "redirect to nowhere": _body(b"", 301, Location="http://[::1"),
    "redirect to a wrong name": _body(b"", 308, Location="//xn--a-ecp.ru/"),
    "refused": _body({"error": {"message": "no\nway\x1b[31m"}}, 401),
    "refused deeply": _body(DEEP, 400),
    "refused in idna": _body(b"\xff\xfe\xc3", 400, Content_Type="text/plain; charset=idna"),
    "refused in no charset": _body(b"\xff\xfe\xc3", 500, Content_Type="text/plain; charset=../../etc"),
    "idna": lambda reply, random: Reply(reply.content, headers={"Content-Type": "application/json; charset=idna"}),
    "busy": _body({}, 503),
    "deep": _body(DEEP),
    "deep objects": _body(b'{"a":' * 100_000),
    "almost deep": _body(b"[" * 900 + b"]" * 900),
    "huge integer": _body(b"9" * 100_000),
    "not a number": _body(b"NaN"),
    "utf-16": lambda reply, random: Reply(reply.content.decode("latin-1").encode("utf-16")),
    "byte order mark": lambda reply, random: Reply(b"\xef\xbb\xbf" + reply.content),
    "gzip": _packed,
    "gzip bomb": _body(gzip.compress(bytes(2**24)), Content_Encoding="gzip"),
    "brotli": _body(b"\x0b\x02\x80{}\x03", Content_Encoding="br"),
    "zstandard": _body(b"\x28\xb5\x2f\xfd", Content_Encoding="zstd"),
    "unknown encoding": _body(b"{}", Content_Encoding="x" * 1000),
    "endless": _raw(HEADERS + b"\r\n", b" " * 2**20, repeat=FOREVER),
    "slow": _raw(HEADERS + b"Content-Length: 1000000\r\n\r\n", b" ", pause_s=0.05, repeat=FOREVER),
    "slow headers": _raw(HEADERS, b"X-A: b\r\n", pause_s=0.05, repeat=FOREVER),
    "endless headers": _raw(HEADERS, b"X-A: b\r\n" * 1000, repeat=FOREVER),
    "endless continue": _raw(b"HTTP/1.1 100 Continue\r\n\r\n", pause_s=0.001, repeat=FOREVER),
    "right after continue": _right_after_continue,
    "silence": lambda reply, random: Reply(raw=_hold),
    "closed": lambda reply, random: Reply(cut="silence"),
    "reset": lambda reply, random: Reply(reply.content, cut="reset"),
    "short": lambda reply, random: Reply(reply.content or b"{}", cut="close"),
    "too long": _raw(HEADERS + b"Content-Length: 2\r\n\r\n{}{}{}{}"),
    "two lengths": _raw(HEADERS + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} "),
    "negative length": _raw(HEADERS + b"Content-Length: -2\r\n\r\n{}"),
    "huge length": _raw(HEADERS + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n{}"),
    "chunked garbage": _raw(HEADERS + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n"),
    "gzip transfer": _raw(HEADERS + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "tls": _raw(b"\x15\x03\x03\x00\x02\x02\x28"),
    "http 0.9": _raw(b"<html>hello</html>"),
    "ssh": _raw(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "status 999": _raw(b"HTTP/1.1 999 \xff\r\nContent-Length: 0\r\n\r\n"),
    "no status": _raw(b"HTTP/1.1 abc\r\n\r\n"),
    "switching": _raw(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"),
    "cookies": lambda reply, random: Reply(
        reply.content, headers={"Content-Type": "x", "Set-Cookie": "a=\xff; Domain=..;; expires=x" * 99}
    ),
    "mutated": lambda reply, random: Reply(mutated(json.loads(reply.content or b"{}"), random)),
    "damaged": lambda reply, random: Reply(damaged(reply.content, random)),
}
