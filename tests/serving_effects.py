"""What settings of clients of servers do, seen where the parts are built: no real
server runs.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from factories import compose_config, generate, make_qwen2, make_scoring
from peft import LoraConfig, get_peft_model
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.errors import GrpoError
from offline_grpo.generation import server_client
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.run import serving
from offline_grpo.run.config import typed
from offline_grpo.run.plan import Plan, make_plan
from offline_grpo.train.sharding import Replicas


def make_policy(*, with_adapters: bool = False, vocab_size: int = 100) -> Policy:
    model: Any = make_qwen2(vocab_size=vocab_size, eos_token_id=2)
    if with_adapters:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    return Policy(make_scoring(model), build_char_tokenizer(64))


# Clients


@dataclass(frozen=True)
class Asked:
    """What reached the servers `here` and `there`, of four prompts' requests, and the error that came of it."""

    error: str = ""
    where: str = ""
    path: str = ""
    key: str | None = None
    settings: Any = None
    max_active: int = 0


def ask(overrides: str, *, role: str = "training") -> Asked:
    """Sample as a run with these overrides does, for training or for evaluation. Servers refuse their first request;
    they take 0.1 s, and longer until they have been asked for as much at once as they will be."""
    at_once: list[int] = []
    answers = Answers(at_once), Answers(at_once)
    with (
        ScriptedServer(answers[0]) as here,
        ScriptedServer(answers[1]) as there,
        tempfile.TemporaryDirectory() as folder,
    ):
        words = overrides.replace("@here", here.base_url).replace("@there", there.base_url).split()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server_client, "FIRST_PAUSE_S", 0.01)
            try:
                _sample(words, role, Path(folder), at_once)
                error = ""
            except GrpoError as caught:
                error = str(caught).replace(here.base_url, "here").replace(there.base_url, "there")
        for name, web in (("here", here), ("there", there)):
            for request in web.requests:
                if (
                    request.body is not None
                ):  # where the client gave up before it was sent, on a busy machine, nothing was asked
                    key = request.headers.get("Authorization")
                    return Asked(error, name, request.path, key, _settings(request.body), web.max_active)
        return Asked(error)


def _sample(words: list[str], role: str, folder: Path, at_once: list[int]) -> None:
    plan = make_plan(typed(compose_config(*words)))
    policy = make_policy()
    ranks: Any = SimpleNamespace(is_main=True, world_size=1, broadcast=lambda value: value, on_main=lambda act: act())
    deployment, settings = assembled(plan, policy, folder, ranks)[role == "evaluation"], plan.sampling
    if role == "evaluation":
        settings = plan.eval_sampling
        assert not isinstance(deployment.client, TransformersClient)
    client: Any = deployment.client
    prompts = [[1, number, 9] for number in range(4, 8)]
    at_once.append(min(len(prompts), client.batch_size))
    try:
        generate(client, prompts, settings, group_size=2, seeds=range(4))
    finally:
        client.close()


def assembled(plan: Plan, policy: Policy, folder: Path, ranks: Any) -> tuple[Any, Any]:
    """The deployments of training and evaluation, as a run puts them together."""
    gpus = [None] * plan.engine.num_managed
    servers = serving.training_servers(plan, gpus, folder, ranks, ExitStack())
    return serving.deployments(plan, servers, policy, Replicas(ranks), folder, ranks)


class Answers:
    """vLLM and SGLang, each with one token per completion.

    Args:
        at_once: how many requests will be open at the same time, as soon as that is known.
    """

    def __init__(self, at_once: list[int]) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._is_first = True
        self._num_open = self._most_open = 0

    def __call__(self, request: Request) -> Reply:
        if request.body is None:
            return Reply({"data": [{"id": "policy"}]})
        with self._lock:
            is_first, self._is_first = self._is_first, False
        if is_first:
            return Reply(status=503)
        self._take_a_while(request)
        body = request.body
        if request.path == "/generate_tokens":
            choice = {"token_ids": [2], "logprobs": [-1.0], "finish_reason": "stop"}
            return Reply({"prompt_token_ids": body["prompt"]["prompt_token_ids"], "choices": [choice] * body["n"]})
        tokens = {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 2, None]], "finish_reason": {"type": "stop"}}
        return Reply([{"meta_info": {"prompt_tokens": len(prompt), **tokens}} for prompt in body["input_ids"]])

    def _take_a_while(self, request: Request) -> None:
        with self._lock:
            self._num_open += 1
            self._most_open = max(self._most_open, self._num_open)
        time.sleep(0.1)
        deadline = time.monotonic() + 10
        while self._most_open < self._at_once[0] and not request.is_gone() and time.monotonic() < deadline:
            time.sleep(0.005)
        with self._lock:
            self._num_open -= 1


def _settings(body: Any) -> Any:
    """The sampling settings of a request, without what tells it from others of its run."""
    settings = body["sampling_params"][0] if "sampling_params" in body else body
    return {name: value for name, value in settings.items() if name not in ("prompt", "seed", "sampling_seed")}
