"""The policy behind an address on this machine, for programs that bring a client of OpenAI's API.

Each episode has an address with a random key in it, and answers come from its dialogue: see `Episode.ask`. What a
client asks for that would change what tokens are drawn from is refused, or, where it is a mere wish, replaced by the
run's settings.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

from offline_grpo.engine.background import made_once
from offline_grpo.errors import ConfigError
from offline_grpo.types import Message, Reply

if TYPE_CHECKING:
    from offline_grpo.generation.episodes import Episode

MODEL = "policy"
LARGEST_BODY = 64 * 2**20
REFUSED = {
    "functions": "use tools",
    "logit_bias": "it would change what is sampled from",
    "logprobs": "the run keeps them itself",
    "stop": "set generation.stop, for all replies",
}
REPLACED = ("temperature", "top_p", "frequency_penalty", "presence_penalty")

log = logging.getLogger(__name__)


class Refusal(Exception):
    """What a client gets in place of an answer: a status and a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Proxy(ThreadingHTTPServer):
    """Listens on a free port of the loopback interface, with a thread for each connection."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.episodes: dict[str, Episode] = {}
        self.told: set[str] = set()
        Thread(target=self.serve_forever, name="proxy", daemon=True).start()

    def open(self, episode: Episode) -> tuple[str, str]:
        """The address and the key of an episode, until `episodes` has the key no more."""
        key = secrets.token_urlsafe(24)
        self.episodes[key] = episode
        return f"http://127.0.0.1:{self.server_port}/{key}/v1", key

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


@made_once
def the_proxy() -> Proxy:
    """One for the life of the process."""
    return Proxy()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any  # the Proxy

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""

    def do_GET(self) -> None:
        self._answer(lambda episode, place: self._models(place))

    def do_POST(self) -> None:
        self._answer(self._chat)

    def _answer(self, act: Any) -> None:
        key, _, place = self.path.strip("/").partition("/v1/")
        try:
            if (episode := self.server.episodes.get(key)) is None:
                raise Refusal(404, "there is no such episode, or it is over")
            act(episode, place)
        except Refusal as refusal:
            error = {"message": str(refusal), "type": "invalid_request_error", "code": refusal.status}
            self.close_connection = True  # its body may not have been read
            self._send(refusal.status, "application/json", json.dumps({"error": error}).encode())

    def _models(self, place: str) -> None:
        if place != "models":
            raise Refusal(404, f"there is no GET /v1/{place}; there is /v1/models")
        models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "offline_grpo"}]
        self._send(200, "application/json", json.dumps({"object": "list", "data": models}).encode())

    def _chat(self, episode: Episode, place: str) -> None:
        if place != "chat/completions":
            raise Refusal(404, f"there is no POST /v1/{place}; there is /v1/chat/completions")
        body = self._body()
        self._check(body)
        messages = [_message(each) for each in body["messages"]]
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        try:
            reply = episode.ask(messages, tools, limit).result()
        except ConfigError as error:
            raise Refusal(400, str(error)) from error
        except CancelledError as error:
            raise Refusal(410, "the episode is over") from error
        if body.get("stream"):
            options = body.get("stream_options") or {}
            self._send(200, "text/event-stream", _events(reply, with_usage=bool(options.get("include_usage"))))
        else:
            choice = {"index": 0, "message": _said(reply), "finish_reason": _end(reply), "logprobs": None}
            whole = {"choices": [choice], "usage": _usage(reply)}
            self._send(200, "application/json", json.dumps(_whole("chat.completion") | whole).encode())

    def _body(self) -> dict[str, Any]:
        length = self.headers.get("content-length", "")
        if not length.isdigit() or int(length) > LARGEST_BODY:
            raise Refusal(413, f"a request needs a content-length of at most {LARGEST_BODY} bytes")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise Refusal(400, f"the body is not JSON ({error})") from error
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
            raise Refusal(400, "the body must be an object with messages")
        return body

    def _check(self, body: Mapping[str, Any]) -> None:
        if body.get("n") not in (None, 1):
            raise Refusal(400, f"n={body['n']}: an episode has one reply at a time; ask again for another")
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise Refusal(400, "tool_choice: a forced call would change what is sampled from; use auto")
        if (body.get("response_format") or {}).get("type", "text") != "text":
            raise Refusal(400, "response_format: it would change what is sampled from; ask for the form in words")
        for name, fix in REFUSED.items():
            if body.get(name):
                raise Refusal(400, f"{name}: {fix}")
        replaced = {name for name in REPLACED if body.get(name) is not None} - self.server.told
        if replaced:
            self.server.told |= replaced
            log.info("an agent asks for %s of its own; the run's settings count", ", ".join(sorted(replaced)))

    def _send(self, status: int, kind: str, content: bytes) -> None:
        with suppress(OSError):  # the client has hung up
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            if self.close_connection:  # else a client would use it once more
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(content)


def _message(message: Any) -> Message:
    """A message of a client: text parts as one text, arguments of calls as objects."""
    if not isinstance(message, dict) or message.get("role") not in ("system", "developer", "user", "assistant", "tool"):
        raise Refusal(400, f"a message must have a role that is known: {message!r:.80}")
    found = {**message, "role": {"developer": "system"}.get(message["role"], message["role"])}
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refusal(400, "a message's content must be text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, (str, type(None))):
        raise Refusal(400, "a message's content must be text")
    found["content"] = content or ""
    if not message.get("tool_calls"):
        found.pop("tool_calls", None)
        return found
    try:
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    except (KeyError, TypeError) as error:
        raise Refusal(400, f"a call needs a function with a name and arguments ({error!r})") from error
    return found


def _arguments(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _said(reply: Reply) -> dict[str, Any]:
    message = dict(reply.message)
    if reply.calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def _end(reply: Reply) -> str:
    return "length" if reply.is_cut else "tool_calls" if reply.calls else "stop"


def _usage(reply: Reply) -> dict[str, int]:
    prompt, completion = reply.num_prompt_tokens, reply.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _whole(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": kind, "created": 0, "model": MODEL}


def _events(reply: Reply, *, with_usage: bool) -> bytes:
    """The reply as a stream of one piece."""
    delta = _said(reply)
    delta |= {"tool_calls": [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]} if reply.calls else {}
    choices: Sequence[Any] = [
        [{"index": 0, "delta": delta, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": _end(reply)}],
    ]
    head = _whole("chat.completion.chunk")
    chunks = [head | {"choices": each} for each in choices]
    chunks += [head | {"choices": [], "usage": _usage(reply)}] if with_usage else []
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in chunks) + b"data: [DONE]\n\n"
