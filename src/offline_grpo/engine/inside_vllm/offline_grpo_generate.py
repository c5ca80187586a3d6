"""POST /generate, which Atropos environments call: completions of one prompt, with the token ids and logprobs that GRPO
needs. And POST /generate_tokens, which a run's own client calls: the same without text and without whatever else takes
time per token.

vLLM loads the class by `--middleware`, and its own endpoints stay as they are. Like its neighbour, the module stands
alone. All that it uses of vLLM is alike in all versions that are supported.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator, Sequence
from io import BytesIO
from itertools import compress
from typing import Any

import msgspec
import numpy as np
from PIL import Image, ImageOps
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm import exceptions
from vllm.inputs import TokensPrompt, tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

PATH = "/generate"
TOKENS_PATH = "/generate_tokens"
PAUSE_PATH = "/pause"
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot represent; vLLM's own endpoints use the same number."""
CONTEXT_TOKENS = 8  # of the prompt, decoded together with a completion

OURS = {"output_kind", "flat_logprobs", "skip_clone", "output_text_buffer_length", "stream_interval"}
SAMPLING = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} - OURS
"""What a request may ask of vLLM's sampler."""
OF_REQUEST = (ValueError, TypeError, OverflowError, RecursionError, getattr(exceptions, "VLLMClientError", ValueError))
"""What vLLM and msgspec raise over a request that asks for something impossible. vLLM's class is newer than 0.25."""
NOT_NOW = getattr(exceptions, "VLLMError", EngineDeadError)
"""Of what vLLM raises otherwise, such as over a full queue. 0.25 has no such class."""
PAUSED: Any = getattr(exceptions, "RetryableRequestError", ())
"""What 0.33 raises over requests that come while it is paused; earlier versions let them wait."""
PAUSED_POLL_S = 0.05


class Refusal(Exception):
    """A request that is not answered, with the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Generate:
    """ASGI middleware that answers POST /generate and POST /generate_tokens itself, and passes everything else on.

    A request to /generate has `prompt`, a string or `{"prompt_token_ids": [...]}`, and any of vLLM's sampling
    parameters. Beside ids, in which one placeholder stands for each picture, `prompt` may have `images`, files in
    base64; the answer's `prompt_token_ids` are those that the model has read. `logprobs` is 0 where it is not given:
    that of the chosen token alone. `model` names an adapter, or the base model; without it the adapter that was loaded
    last is sampled from, so that callers need not know that weights are pushed. `stream: true` answers in lines of
    `{"text": [prompt + text]}`; `urgent: true` is computed before others that wait. `alternatives: true`, with a
    `top_k`, also answers with the ids of the tokens that the sampler's filters left beside each chosen one.
    `routes: true` also answers with the experts that each token went to, the prompt's too: numpy's file, in base64.
    `banned_ids` are never drawn, and have no part in processed logprobs. A request to /generate_tokens has the same,
    but for `stream`, and without `model` it asks the base model.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._num_pauses = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else None
        if path not in (PATH, TOKENS_PATH, PAUSE_PATH):
            await self._app(scope, receive, send)
            return
        try:
            answer = await (self._pause(scope) if path == PAUSE_PATH else self._answer(scope, receive, send))
            status = 200
        except Refusal as refusal:
            answer, status = {"error": " ".join(str(refusal).split())}, refusal.status
        if answer is not None:
            response = Response(msgspec.json.encode(answer), status, media_type="application/json")
            await response(scope, receive, send)

    async def _pause(self, scope: Scope) -> dict[str, Any]:
        """As vLLM's endpoint, which sleeps 20 ms at the end so that outputs come to its caller before its answer."""
        engine, query = scope["app"].state.engine_client, QueryParams(scope["query_string"])
        clears = query.get("clear_cache") != "false"
        if clears:
            await engine.renderer.clear_mm_cache_async()
        core = engine.engine_core
        pause = getattr(core, "pause_generation_async", None) or core.pause_scheduler_async  # of 0.33; of earlier ones
        await pause(mode=query.get("mode", "abort"), clear_cache=clears)
        # keys and values of the old weights may stay in the cache, where the salt hides them. Only now: what has come
        # during the pause's beginning may have been computed with them
        self._num_pauses += 1
        return {"status": "paused"}

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> dict[str, Any] | None:
        """None if it was sent in parts, or the client has gone. Raises Refusal, as long as nothing was sent."""
        if scope["method"] != "POST":
            raise Refusal(405, f"{scope['path']} is asked with POST")
        state = scope["app"].state
        try:
            body = await HttpRequest(scope, receive).body()
            request = Request(body, state, salt=str(self._num_pauses), of_tokens=scope["path"] == TOKENS_PATH)
        except ClientDisconnect:
            return None
        except OF_REQUEST as error:
            raise Refusal(400, str(error)) from error

        # A client that goes away takes its request along: vLLM aborts it when its task is cancelled.
        outputs = request.outputs(state.engine_client)
        working = asyncio.create_task(request.stream(outputs, send) if request.is_stream else request.whole(outputs))
        leaving = asyncio.ensure_future(receive())  # returns when the client has gone
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


class Request:
    """What one body asks for. Raises one of OF_REQUEST for anything impossible that is seen before the engine sees it.

    Args:
        state: of vLLM's application.
        salt: requests with other salts share no cache.
        of_tokens: of POST /generate_tokens. Only stop strings have tokens turned into text, and a token has one
            logprob, its own. An aborted completion is handed out, for it is the client that knows whether to ask again.
    """

    def __init__(self, body: bytes, state: Any, *, salt: str, of_tokens: bool) -> None:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        self._salt, self._of_tokens = salt, of_tokens
        self.is_stream = bool(fields.pop("stream", False))
        if self.is_stream and of_tokens:
            raise ValueError(f"stream: only {PATH} answers in parts")

        # The prompt: ids of the model, or a text. Whoever asks for ids alone reads no text.
        self._tokenizer: Any = state.engine_client.tokenizer
        prompt, vocab_size = fields.pop("prompt", None), state.engine_client.model_config.get_vocab_size()
        if isinstance(prompt, str) and self._tokenizer is not None:
            self._prompt_ids, self._prompt_text = self._tokenizer.encode(prompt), prompt
        else:
            ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
            if not (isinstance(ids, list) and ids and {*map(type, ids)} == {int}):
                raise ValueError('prompt: must be a string, or {"prompt_token_ids": [...]} with at least one id')
            if not (min(ids) >= 0 and max(ids) < vocab_size):
                raise ValueError(f"prompt: ids must be from 0 to {vocab_size - 1}, the model's")
            reader = None if of_tokens else self._tokenizer
            self._prompt_ids, self._prompt_text = ids, "" if reader is None else reader.decode(ids)
        self._images = [b64decode(image) for image in prompt.get("images", ())] if isinstance(prompt, dict) else []

        # The weights: an adapter, or None for the base model. Who names neither gets the newest adapter, if any.
        name, models = fields.pop("model", None), state.openai_serving_models
        adapters, base = models.lora_requests, [path.name for path in models.base_model_paths]
        self._adapter = None
        if name is None and not of_tokens:
            self._adapter = max(adapters.values(), key=lambda adapter: adapter.lora_int_id, default=None)
        elif name is not None and name not in base:
            if name not in adapters:
                raise ValueError(f"model={str(name)[:80]}: is not served; there are {', '.join([*base, *adapters])}")
            self._adapter = adapters[name]

        # How to sample. Integers beyond 64 bits would be the engine's death.
        self._priority = -1 if fields.pop("urgent", False) else 0
        self._has_alternatives = fields.pop("alternatives", False)
        self._has_routes = fields.pop("routes", False)
        if not {self._has_alternatives, self._has_routes} <= {True, False}:
            raise ValueError("alternatives and routes: must be true or false")
        banned = dict.fromkeys(fields.pop("banned_ids", ()), -math.inf)
        if unknown := fields.keys() - SAMPLING:
            ours = ["prompt", "model", "stream", "urgent", "alternatives", "routes", "banned_ids"]
            known = ", ".join([*ours, *sorted(SAMPLING)])
            raise ValueError(f"unknown: {', '.join(sorted(unknown))}; a request may have {known}")
        msgspec.msgpack.encode(fields)
        if fields.get("logprobs") is None:
            fields["logprobs"] = 0
        params = msgspec.convert(fields, SamplingParams, str_keys=True)
        if banned:
            params.logit_bias = {**(params.logit_bias or {}), **banned}
        if self._has_alternatives:
            mode = str(state.engine_client.model_config.logprobs_mode)
            if params.top_k < 1 or mode != "processed_logprobs":
                has = f"top_k is {params.top_k}, {mode}"
                raise ValueError(f"alternatives: need temperature and top_k above 0, and processed_logprobs; {has}")
            params.logprobs = min(params.top_k + params.top_k // 2 + 64, vocab_size)  # see `server_engine.num_told`
            params.extra_args = {**(params.extra_args or {}), "alternatives": True}  # the scheduler reads it
        params.output_kind = RequestOutputKind.CUMULATIVE if self.is_stream else RequestOutputKind.FINAL_ONLY
        params.flat_logprobs = not self.is_stream
        self._wants_text = params.detokenize
        if not (self.is_stream or params.stop):  # a whole text is made from its tokens faster than token by token
            params.detokenize = False
        self._params = params

    async def whole(self, outputs: AsyncIterator[Any]) -> dict[str, Any]:
        """The answer in one piece."""
        [final] = [output async for output in outputs]
        choices: list[dict[str, Any]] = []
        for output in final.outputs:
            values = finite([output.logprobs.logprobs[first] for first in output.logprobs.start_indices])
            choice: dict[str, Any] = {"token_ids": list(output.token_ids), "logprobs": values}
            choice["finish_reason"] = output.finish_reason
            if self._has_alternatives:
                choice["alternatives"] = alternatives(output.logprobs)
            if self._has_routes:
                if output.routed_experts is None:
                    raise Refusal(400, "routes: need --enable-return-routed-experts, and a mixture of experts on a GPU")
                np.save(file := BytesIO(), output.routed_experts)
                choice["routes"] = file.getvalue()
            choices.append(choice)
        if self._of_tokens:
            for choice in choices if self._has_alternatives else ():  # one string is read five times as fast
                choice["alternatives"] = b"".join(choice["alternatives"])  # base64 in JSON
            return {"prompt_token_ids": final.prompt_token_ids, "choices": choices}

        # The text of a token can depend on those before it, so the end of the prompt is decoded too, and taken off. It
        # may be half of a character, of which the completion has the rest.
        texts = []
        skips = {"skip_special_tokens": self._params.skip_special_tokens}
        for output in final.outputs:
            if self._params.detokenize or not self._wants_text or self._tokenizer is None:
                texts.append(output.text)
                continue
            ends_itself = output.finish_reason == "stop" and not self._params.include_stop_str_in_output
            ids, before = list(output.token_ids)[: -1 if ends_itself else None], self._prompt_ids[-CONTEXT_TOKENS:]
            context = self._tokenizer.decode(before, **skips)
            text = self._tokenizer.decode(before + ids, **skips)
            texts.append(text.removeprefix(context.rstrip("\N{REPLACEMENT CHARACTER}")))
        answer = {
            "text": texts,
            "prompt": self._prompt_text,
            "finish_reasons": [output.finish_reason for output in final.outputs],
            "logprobs": [[[position] for position in by_position(output.logprobs)] for output in final.outputs],
            "prompt_token_ids": final.prompt_token_ids,
            "token_ids": [choice["token_ids"] for choice in choices],
        }
        if self._has_alternatives:
            pairs = [zip(choice["token_ids"], choice["logprobs"], strict=True) for choice in choices]
            answer["logprobs"] = [[[{token: logprob}] for token, logprob in each] for each in pairs]
            sets = (choice["alternatives"] for choice in choices)
            answer["alternatives"] = [[memoryview(ids).cast("i").tolist()[:-1] for ids in own] for own in sets]
        if self._params.prompt_logprobs is not None:
            answer["prompt_logprobs"] = [position or None for position in by_position(final.prompt_logprobs)]
        return answer

    async def stream(self, outputs: AsyncIterator[Any], send: Send) -> None:
        """Answer in lines of JSON, each with all text so far, or with the error that ends the answer."""
        texts = [self._prompt_text] * self._params.n
        headers = [(b"content-type", b"application/x-ndjson")]
        has_begun = False

        async def send_line(line: dict[str, Any]) -> None:
            await send({"type": "http.response.body", "body": msgspec.json.encode(line) + b"\n", "more_body": True})

        # Once a line is sent, the status is too, and an error can only be another line.
        try:
            async for output in outputs:
                for completion in output.outputs:
                    texts[completion.index] = self._prompt_text + completion.text
                if not has_begun:
                    has_begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send_line({"text": texts})
        except Refusal as refusal:
            if not has_begun:
                raise
            await send_line({"error": str(refusal)})
        await send({"type": "http.response.body", "body": b""})

    async def outputs(self, engine: Any) -> AsyncIterator[Any]:
        """vLLM's outputs, after the end of a pause. Raises Refusal where they are not the completions that were asked
        for.
        """
        refused = {"error"} if self._of_tokens else {"abort", "error"}
        prompt = await self._prompt(engine)
        while True:  # vLLM 0.33 refuses what comes during a pause
            generating = engine.generate(
                prompt,
                self._params,
                f"generate-{uuid.uuid4().hex}",
                lora_request=self._adapter,
                priority=self._priority,
            )
            try:
                async with contextlib.aclosing(generating):
                    async for output in generating:
                        if refused & {completion.finish_reason for completion in output.outputs}:
                            why = "the engine aborted the request, as it does for a push of weights; send it again"
                            raise Refusal(503, why)
                        yield output
                return
            except EngineDeadError as error:
                raise Refusal(503, "the engine has died") from error
            except EngineGenerateError as error:
                raise Refusal(500, f"the engine failed: {error.__cause__!r}") from error
            except OF_REQUEST as error:
                raise Refusal(400, str(error)) from error
            except PAUSED:
                await asyncio.sleep(PAUSED_POLL_S)
            except NOT_NOW as error:
                raise Refusal(503, str(error)) from error

    async def _prompt(self, engine: Any) -> Any:
        """As the engine takes it: as many tokens in the place of a picture as the model computes of it. Raises Refusal
        where the pictures cannot be read, or the model has no place for them.
        """
        if not self._images:
            return tokens_input(self._prompt_ids, cache_salt=self._salt)
        try:
            images = await asyncio.to_thread(lambda: [opened(image) for image in self._images])
            prompt = TokensPrompt(prompt_token_ids=self._prompt_ids, multi_modal_data={"image": images})
            [rendered] = await engine.renderer.render_cmpl_async([{**prompt, "cache_salt": self._salt}])
        except (*OF_REQUEST, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise Refusal(400, f"images: {error}") from error
        return rendered


def opened(file: bytes) -> Image.Image:
    """The pixels as the trainer sees them (`model/pictures.py`): upright and in RGB; what is transparent is white."""
    image = ImageOps.exif_transpose(Image.open(BytesIO(file)))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")


def alternatives(logprobs: Any) -> list[bytes]:
    """The ids of the tokens that could have been chosen instead, and -1, in 4 bytes each, of each position of vLLM's
    `FlatLogprobs`.
    """
    found = []
    ids, values = logprobs.token_ids, logprobs.logprobs
    for first, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True):
        if isinstance(rank := logprobs.ranks[first], bytes):  # our scheduler has written them in its place
            found.append(rank)
        else:
            is_beside = (values[j] > -math.inf and ids[j] != ids[first] for j in range(first, end))
            found.append(array("i", [*compress(ids[first:end], is_beside), -1]).tobytes())
    return found


def by_position(logprobs: Any) -> list[dict[int, float]]:
    """{token id: logprob in nats} of each position, the chosen token first, from vLLM's `FlatLogprobs`."""
    values = finite(logprobs.logprobs)
    bounds = zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    return [dict(zip(logprobs.token_ids[first:end], values[first:end], strict=True)) for first, end in bounds]


def finite(logprobs: Sequence[float]) -> list[float]:
    """Logprobs as JSON can have them. Raises Refusal for NaN."""
    if any(map(math.isnan, logprobs)):
        raise Refusal(500, "a logprob is not a number: the weights or their activations are probably not finite")
    return [max(value, LOWEST_LOGPROB) for value in logprobs]
