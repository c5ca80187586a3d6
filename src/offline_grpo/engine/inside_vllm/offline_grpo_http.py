"""Requests and answers as ASGI has them. Like its neighbours, the module stands alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec

MAX_BODY_BYTES = 8 * 2**20
"""A prompt of a million tokens has 7 MB."""

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Coroutine[Any, Any, Message]]


class Refusal(Exception):
    """A request that is not answered, with the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(receive: Receive) -> bytes | None:
    """All of a request's body; None if the client has gone. Raises Refusal for one that is too long."""
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_BODY_BYTES:
            raise Refusal(413, f"the request has more than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


async def reply(send: Send, status: int, answer: Message) -> None:
    """Send a whole answer."""
    body = msgspec.json.encode(answer)
    await send(start(status, b"application/json", (b"content-length", str(len(body)).encode())))
    await send({"type": "http.response.body", "body": body})


def start(status: int, content: bytes, *headers: Sequence[bytes]) -> Message:
    """The message that begins an answer."""
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content), *headers]}
