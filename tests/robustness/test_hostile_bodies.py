"""Malformed answers, to clients and control calls: each is refused in one line, or what is read of it is what a strict
reading finds.
"""

from __future__ import annotations

import functools
import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attacks import ATTACKS, damaged, mutated
from factories import generate
from scripted_server import Reply, ScriptedServer

from offline_grpo.engine.http import text_of
from offline_grpo.engine.server import Server
from offline_grpo.errors import EngineError
from offline_grpo.generation.sglang_client import SglangClient
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.types import SamplingParams

PROMPT = [7, 8, 9]
MAX_TOKENS = 4
VOCAB = 50
COMPLETIONS = [([5, 2], [-0.5, -0.25], "stop"), ([6, 7, 8, 49], [-1, -2.5, 0.0, -4.0], "length")]


def vllm_body() -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "token_ids": ids,
            "prompt_token_ids": PROMPT,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": reason,
        }
        for index, (ids, logprobs, reason) in enumerate(COMPLETIONS)
    ]
    return {"choices": choices}


def sglang_body() -> list[dict[str, Any]]:
    return [
        {
            "meta_info": {
                "finish_reason": {"type": reason},
                "prompt_tokens": len(PROMPT),
                "completion_tokens": len(ids),
                "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
            }
        }
        for ids, logprobs, reason in COMPLETIONS
    ]


def read_vllm(body: Any) -> list[Any]:
    ordered = sorted(body["choices"], key=lambda choice: choice["index"])
    return [(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]) for choice in ordered]


def read_sglang(body: Any) -> list[Any]:
    tokens = [item["meta_info"]["output_token_logprobs"] for item in body]
    reasons = [item["meta_info"]["finish_reason"]["type"] for item in body]
    return [([t[1] for t in each], [t[0] for t in each], reason) for each, reason in zip(tokens, reasons, strict=True)]


DIALECTS = {"vllm": (VllmClient, vllm_body, read_vllm), "sglang": (SglangClient, sglang_body, read_sglang)}


def bodies(body: Any, count: int, seed: int) -> Iterator[bytes]:
    """Values of the right body replaced, and its bytes damaged, in turn."""
    random = Random(seed)
    for number in range(count):
        if number % 3 == 0:
            yield damaged(json.dumps(body).encode(), random)
        else:
            changed = mutated(body, random)
            yield json.dumps(mutated(changed, random) if number % 3 == 2 else changed).encode()


def check(completions: list[Any], said: list[Any]) -> None:
    """What was accepted is what was said, and could have been drawn."""
    assert [(list(c.token_ids), list(c.logprobs), c.finish_reason) for c in completions] == said
    assert len(said) == len(COMPLETIONS)
    for ids, logprobs, _ in said:
        assert 1 <= len(ids) == len(logprobs) <= MAX_TOKENS
        assert all(type(token) is int and token in range(VOCAB) for token in ids)
        assert all(
            type(logprob) in (int, float) and -9999 < logprob <= 1e-3 and math.isfinite(logprob) for logprob in logprobs
        )


def check_message(message: str, url: str) -> None:
    assert message.startswith(f"{url}: ")
    assert message.isprintable()
    assert len(message) < 900


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(("count", "seed"), [(100, 0), pytest.param(1150, 1, marks=pytest.mark.slow)])
def test_malformed_bodies_are_refused_or_right(name: str, count: int, seed: int, tmp_path: Path) -> None:
    kind, make, read = DIALECTS[name]
    num_refused = num_right = 0
    with ScriptedServer(lambda _: Reply()) as web:
        server = Server(base_url=web.base_url, api_key=None, launcher=None, log_dir=tmp_path)
        client = kind(server=server, eos_ids=[2], vocab_size=VOCAB, batch_size=1, timeout_s=20, max_retries=0)
        for body in bodies(make(), count, seed):
            web.script = lambda _, body=body: Reply(body)
            try:
                [completions] = generate(client, [PROMPT], SamplingParams(MAX_TOKENS), group_size=2, seeds=[0])
            except EngineError as error:
                num_refused += 1
                check_message(str(error), web.base_url + client.path)
            else:
                num_right += 1
                check(completions, read(json.loads(body)))
        client.close()
    assert num_refused > count // 2
    assert num_right > 0, "changes that do not matter are among them"


@pytest.mark.parametrize("name", ATTACKS)
def test_no_control_call_outlasts_its_deadline(name: str, tmp_path: Path) -> None:
    random = Random(name)
    honest = Reply({"version": "0.32.0"})
    with ScriptedServer(lambda _: ATTACKS[name](honest, random)) as web:
        api = Server(base_url=web.base_url, api_key=None, launcher=None, log_dir=tmp_path).api
        started = time.monotonic()
        try:
            answer = api.post("/version", timeout_s=0.3).read(lambda found: text_of(found["version"]))
        except EngineError as error:
            check_message(str(error), f"{web.base_url}/version")
        else:
            assert answer == "0.32.0" or name in ("mutated", "damaged")
        assert time.monotonic() - started < 2


def test_other_programs_that_answer(tmp_path: Path) -> None:
    """Python's own web server, with a file for every route that is asked first."""
    for name in ("health", "version"):
        (tmp_path / name).write_text("<html>hello</html>")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, args=(0.02,), daemon=True).start()
        server = Server(
            base_url=f"http://127.0.0.1:{web.server_address[1]}", api_key=None, launcher=None, log_dir=tmp_path
        )
        server.start("model")
        with pytest.raises(
            EngineError, match=r"/version: a malformed answer .*<html>hello</html>; is that the right server"
        ):
            VllmClient.control(server).check_version()
        with pytest.raises(EngineError, match=r"/server_info: status 404"):
            SglangClient.control(server).check_version()
        web.shutdown()
