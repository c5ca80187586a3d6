"""The policy behind an address of this machine, for programs that bring a client of OpenAI's API.

Each episode has an address with a random key in it, and answers come from its dialogue: see `Episode.ask`. What a
client asks for that would change the prompt, or what tokens are drawn from, is refused. Other wishes do not count; the
first of each kind is logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from aiohttp.http import HttpProcessingError
from pydantic import BaseModel, ConfigDict, FailFast, Field, PositiveInt, ValidationError
from pydantic_core import from_json

from offline_grpo.engine.http import LOOPBACK
from offline_grpo.errors import RequestError
from offline_grpo.generation.judging import warn_once
from offline_grpo.model.tool_calls import arguments_of
from offline_grpo.types import Message, Reply, Schema, text_of

T = TypeVar("T")
MODEL = "policy"
LARGEST_BODY = 16 * 2**20
STRANGER_S, IDLE_S = 5.0, 30.0
"""How long a connection may be open before its client shows a key, and then wait for a request, or for its body."""
STRANGERS_FRAC = 0.25
"""Of the files that this process may have open; beyond that, the first connection without a key makes room, and a
client that asks is answered and hung up on."""
ACCEPTED_AT_ONCE, BACKLOG = 8, 1024
"""The former is small, so that a connection that has sent its key is never the first of too many."""
PLACES = {"models": ("GET", "HEAD"), "chat/completions": ("POST",)}
NOTHING = (None, False, "", [], {})
ALLOWED = {"n": (1,), "tool_choice": ("auto", "none"), "response_format": ({"type": "text"},)}
"""What those that are refused may be nevertheless."""
OF_PROMPT = "it would change the prompt; set model.chat_template_kwargs, for all replies"
OF_DRAWS = "it would change what is sampled from; ask for it in words"
REFUSED = {
    "n": "an episode has one reply at a time; ask again for another",
    "tool_choice": "a forced call would change what is sampled from; use auto",
    "stop": "set generation.stop, for all replies",
    **dict.fromkeys(("functions", "function_call"), "use tools"),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), "the run keeps them itself"),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "reasoning_effort", "documents"), OF_PROMPT),
    **dict.fromkeys(("continue_final_message", "add_special_tokens"), OF_PROMPT),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids"), OF_DRAWS),
    **dict.fromkeys(("ignore_eos", "min_tokens", "response_format", "structured_outputs"), OF_DRAWS),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), OF_DRAWS),
}
NO_TEXT = {"refusal", "audio", "images", "function_call"}  # fields of a message

OF_CLIENTS = (HttpProcessingError, web.RequestPayloadError, OSError)
logging.getLogger("aiohttp.server").addFilter(  # that a client sends no HTTP, or hangs up, is no news
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], OF_CLIENTS))
)


class _Read(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Text(_Read):
    type: Literal["text"] = "text"
    text: str


class _Url(_Read):
    url: str


class _Image(_Read):
    type: Literal["image_url"]
    image_url: _Url


class _Function(_Read):
    name: str
    parameters: dict[str, Any] | None = None
    arguments: str | dict[str, Any] | None = None


class _Tool(_Read):
    """A tool, or a call of one."""

    function: _Function


class _AtFirst(FailFast):
    def __hash__(self) -> int:  # type: ignore[override]  # `|` wants it
        return id(self)


Several = Annotated[list[T], _AtFirst()]  # a million wrong items are one mistake


class _Message(_Read):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[_Text | _Image] | None = None
    tool_calls: Several[_Tool] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class _Request(_Read):
    """The types of what is heeded in a request."""

    messages: Several[_Message] = Field(min_length=1)
    model: str | None = None
    tools: Several[_Tool] | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


HEEDED, KNOWN = REFUSED.keys() | _Request.model_fields.keys(), _Message.model_fields.keys() - {"name"}
Ask = Callable[[Sequence[Message], Sequence[Schema], int | None], Future[Reply]]


class Proxy(web.Server):
    """Listens on a free port, on an event loop in a thread of its own, until it is closed.

    Args:
        template_kwargs: the run's arguments of the chat template.
        said: what was logged once in this run, and is not again.
        host: the address of this machine that programs ask.
    """

    def __init__(self, template_kwargs: Mapping[str, Any], said: set[str], host: str = LOOPBACK) -> None:
        self._said, own = said, {name: (value,) for name, value in template_kwargs.items()}
        self._allowed = {**ALLOWED, **own, "chat_template_kwargs": (template_kwargs,)}
        self._most_strangers = int(STRANGERS_FRAC * resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._own_loop, self._is_over = asyncio.new_event_loop(), asyncio.Event()
        self._asks: dict[str, Ask] = {}  # by the key of the episode
        self._keys: dict[web.RequestHandler, str] = {}  # of the connections on which one was shown
        read = partial(web.BaseRequest, loop=self._own_loop, client_max_size=LARGEST_BODY)
        how: dict[str, Any] = {"access_log": None, "auto_decompress": False, "keepalive_timeout": IDLE_S}
        super().__init__(self._answer, request_factory=read, loop=self._own_loop, **how)
        # It listens from now on, so that episodes can be told its address before the thread serves.
        self._socket = socket.create_server((host, 0))

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: self._own_loop) as runner:
                runner.run(self._serve())

        Thread(target=run, name="proxy", daemon=True).start()

    def open(self, ask: Ask) -> tuple[str, str]:
        """The address and the key of an episode, which is asked by `ask` until it is over."""
        key = secrets.token_urlsafe(24)
        self._asks[key] = ask
        host, port = self._socket.getsockname()
        return f"http://{host}:{port}/{key}/v1", key

    def end(self, key: str) -> None:
        """Close the connections of an episode that is over."""
        del self._asks[key]

        def close() -> None:
            for connection in [each for each, own in self._keys.items() if own == key]:
                connection.force_close()

        with suppress(RuntimeError):  # all are closed
            self._own_loop.call_soon_threadsafe(close)

    def close(self) -> None:
        """Close all connections, and end the thread."""
        self._own_loop.call_soon_threadsafe(self._is_over.set)

    async def _serve(self) -> None:
        server = await self._own_loop.create_server(self, sock=self._socket, backlog=ACCEPTED_AT_ONCE)
        self._socket.listen(BACKLOG)  # the number above was also how many may wait to be accepted
        await self._is_over.wait()
        server.close()
        for connection in self.connections:
            connection.force_close()

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._own_loop.call_later(STRANGER_S, lambda: handler in self._keys or handler.force_close())
        strangers = [each for each in self.connections if each not in self._keys]
        for stranger in strangers[: -self._most_strangers]:
            stranger.force_close()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._keys.pop(handler, None)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        # Whoever knows no key gets no further.
        key, _, place = request.path.strip("/").partition("/v1/")
        if (ask := self._asks.get(key)) is None:
            response = _refusal(404, "there is no such episode, or it is over")
        else:
            self._keys[request.protocol] = key
            response = await self._respond(request, place, ask)
        if ask is None or len(self._keys) > self._most_strangers:  # then none is kept alive
            response.force_close()
        return response

    async def _respond(self, request: web.BaseRequest, place: str, ask: Ask) -> web.Response:
        if place not in PLACES:
            return _refusal(404, f"there is no /v1/{place}; there are {', '.join(PLACES)}")
        if request.method not in PLACES[place]:
            return _refusal(405, f"/v1/{place} takes {PLACES[place][0]}")
        if place == "models":
            models = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "offline_grpo"}]
            return web.json_response({"object": "list", "data": models})
        try:
            # 1. All that is heeded has its type.
            async with asyncio.timeout(IDLE_S):
                body = await request.read()
            asked = from_json(body)
            _Request.model_validate(asked)
            # 2. What must not be ignored is not asked for; other wishes are.
            for name in asked.keys() & REFUSED.keys():
                if asked[name] not in (*NOTHING, *self._allowed.get(name, ())):
                    raise RequestError(f"{name}: {REFUSED[name]}")
            if wishes := _names(name for name in asked.keys() - HEEDED if asked[name] is not None):
                warn_once(self._said, wishes, f"an agent asks for {wishes} of its own; the run's settings count")
            # 3. The policy replies, once it is its turn.
            messages = [self._message(message) for message in asked["messages"]]
            tools = [] if asked.get("tool_choice") == "none" else asked.get("tools") or []
            longest = asked.get("max_completion_tokens") or asked.get("max_tokens")
            reply = await asyncio.wrap_future(ask(messages, tools, longest))
        except (TimeoutError, web.RequestPayloadError) as error:
            return _refusal(400, f"the body cannot be read ({type(error).__name__})")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return _refusal(400, f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}")
        except RequestError as error:
            return _refusal(400, str(error))
        except ValueError as error:
            return _refusal(400, f"the body is not JSON ({error})")
        return _completion(reply, asked)

    def _message(self, message: Mapping[str, Any]) -> Message:
        """As chat templates know it, without fields that say nothing."""
        found = {name: value for name, value in message.items() if value}
        if wrong := NO_TEXT & found.keys():
            raise RequestError(f"{min(wrong)}: a message's content must be text and images")
        if others := _names(found.keys() - (KNOWN | {"name"} if message["role"] == "tool" else KNOWN)):
            about = f"an agent's messages have {others}; of that the policy sees what the chat template writes"
            warn_once(self._said, about, about)
        content = message.get("content") or ""
        has_images = any("image_url" in part for part in content if isinstance(part, Mapping))
        found["content"] = content if has_images else text_of(message)
        found["role"] = "system" if message["role"] == "developer" else message["role"]
        if calls := message.get("tool_calls"):
            found["tool_calls"] = _with_arguments(arguments_of, calls)
        return found


def _names(fields: Iterable[str]) -> str:
    """For the log, which what a client makes up must not fill or forge."""
    return ", ".join(sorted({name if name.isidentifier() and len(name) < 40 else "..." for name in fields})[:8])


def _with_arguments(read: Callable[[Schema], object], calls: Iterable[Schema]) -> list[dict[str, object]]:
    """The calls, whose arguments are those that `read` finds in the function."""
    return [{**call, "function": {**call["function"], "arguments": read(call["function"])}} for call in calls]


def _refusal(status: int, reason: str) -> web.Response:
    error = {"message": reason, "type": "invalid_request_error", "code": status}
    return web.json_response({"error": error}, status=status)


def _completion(reply: Reply, asked: Mapping[str, Any]) -> web.Response:
    """A reply as OpenAI's API has it, whole or as a stream of one piece."""
    message = dict(reply.message)
    if reply.calls:
        calls = _with_arguments(lambda function: json.dumps(function["arguments"]), message["tool_calls"])
        message |= {"content": reply.content or None, "tool_calls": calls}
    end = "length" if reply.is_cut else "tool_calls" if reply.calls else "stop"
    prompt, sampled = reply.num_prompt_tokens, reply.num_tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": 0, "model": MODEL}
    if not asked.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": end, "logprobs": None}
        return web.json_response(head | {"object": "chat.completion", "choices": [choice], "usage": usage})
    # The message, its end, and the usage where that is asked for.
    if reply.calls:
        message["tool_calls"] = [{**call, "index": i} for i, call in enumerate(message["tool_calls"])]
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": end}]},
    ]
    if (asked.get("stream_options") or {}).get("include_usage"):
        parts.append({"choices": [], "usage": usage})
    head["object"] = "chat.completion.chunk"
    body = b"".join(b"data: " + json.dumps(head | part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"
    return web.Response(body=body, content_type="text/event-stream")
