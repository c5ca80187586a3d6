"""What settings of engines, clients of servers and weight-sync strategies do, seen where the parts are built: no real
server runs.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engines import deploy
from factories import compose_config, generate, make_qwen2, make_scoring
from inside_vllm import make_worker
from peft import LoraConfig, get_peft_model
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.engine import server as server_module
from offline_grpo.engine.command_line import flags
from offline_grpo.engine.http import authorization
from offline_grpo.engine.server import Server
from offline_grpo.errors import GrpoError
from offline_grpo.generation import server_client
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.model.char_tokenizer import build_char_tokenizer
from offline_grpo.model.policy import Policy
from offline_grpo.run import serving
from offline_grpo.run.config import typed
from offline_grpo.run.plan import Plan, make_plan
from offline_grpo.train.sharding import Replicas
from offline_grpo.weight_sync import ipc, nccl, proof

PORT = 1111
OF_ITS_FOLDER = ("TMPDIR", "VLLM_RPC_BASE_PATH", "OFFLINE_GRPO_HAS_MEMORY")
"""Variables of a server that name the folder which it alone has."""


def make_policy(*, with_adapters: bool = False, vocab_size: int = 100) -> Policy:
    model: Any = make_qwen2(vocab_size=vocab_size, eos_token_id=2)
    if with_adapters:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    return Policy(make_scoring(model), build_char_tokenizer(64))


# Engines


def engine_effect(engine: Any) -> Any:
    """What is started, how long it is waited for, where it is, and what requests to it carry."""
    seen: list[Any] = []

    class Process:
        log_path = Path("server.log")

        def __init__(self, command: Any, *, env: Mapping[str, str], **_: Any) -> None:
            own = set(env.items()) - set(os.environ.items())
            seen.append((command, sorted((name, value) for name, value in own if name not in OF_ITS_FOLDER)))

        def wait_until(self, _: Any, *, timeout_s: float, what: str, since_s: float) -> None:
            seen.append(timeout_s)

        def stop(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(server_module, "ServerProcess", Process)
        patch.setattr(server_module, "choose_port", lambda _, port, *, key: port or PORT)
        server = Server(base_url=None, api_key=None, launcher=engine, log_dir=Path(folder))
        server.start("some/model")
        server.stop()
    return seen, server.base_url, authorization(server.api_key)


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


# Weight sync


def sync_effect(sync: Any) -> Any:
    """What a strategy asks of server and process group, over a connection and the pushes of three iterations."""
    seen: list[Any] = [flags(sync.server_args)]
    sent: list[Any] = []  # between processes, while requests are under way
    with (
        tempfile.TemporaryDirectory() as folder,
        _server_of_the_policy(sync, seen, sent, Path(folder)) as (policy, client),
    ):
        deployment = deploy(sync, client)
        try:
            deployment.connect(policy)
            policy.make_masters()
            for version in range(1, 4):
                if version % sync.interval == 0:
                    deployment.push(policy, version=version)
                    seen.append(version)
        except GrpoError as error:
            seen.append(str(error))
        deployment.close()
        scratch = str(client.scratch_path or "/nowhere")
        text = repr([*seen, *sent]).replace(scratch, "SCRATCH").replace(folder, "LOGS")
    return re.sub(r"policy-\d+-[0-9a-f]{6}-", "policy-", text)


class Client(VllmClient):
    """Remembers the scratch folder of its server."""

    scratch_path: Path | None = None


class OurServer(Server):
    """A server of our own, as far as a strategy can tell; starting it is written down."""

    is_managed = True
    seen: list[Any]

    def start(self, model: str, *, args: Mapping[str, Any] | None = None) -> None:
        self.seen.append(("start", model, dict(args or {})))

    def stop(self) -> None: ...


@contextmanager
def _server_of_the_policy(sync: Any, seen: list[Any], sent: list[Any], folder: Path) -> Iterator[tuple[Policy, Client]]:
    """A policy, and a client of a server that has a worker with the same weights in this process."""
    policy = make_policy(with_adapters=sync.requires.moves == "lora", vocab_size=20_000)  # more than one MiB
    worker = make_worker(copy.deepcopy(policy.causal_lm))
    gpu = {"ipc": "GPU-1", "nccl": "GPU-2"}.get(sync.name)

    def script(request: Request) -> Reply:
        seen.append((request.path, request.query, request.body))
        if request.path == "/collective_rpc" and request.method == "POST":
            method, kwargs = request.body["method"], request.body["kwargs"]
            if method == "reload_weights":
                return Reply({"results": [None]})
            result = getattr(worker, method)(**kwargs)
            return Reply({"results": [result | {"gpu_uuid": gpu} if method == "grpo_describe" else result]})
        return Reply({"version": "0.32.0", "world_size": 1})

    with ScriptedServer(script) as web, pytest.MonkeyPatch.context() as patch:
        server = OurServer(base_url=web.base_url, api_key=None, launcher=None, log_dir=folder)
        server.seen = seen
        client = Client(server=server, eos_ids=[2], vocab_size=1000, batch_size=4, timeout_s=5, max_retries=0)
        client.scratch_path = server.scratch
        patch.setattr(proof, "sample_probe", lambda client, prompts, sampling: ([], sampling))
        patch.setattr(proof, "probe_difference", lambda *_: torch.tensor([0.05]))
        _pretend_to_have_gpus(patch, sent)
        yield policy, client
        Server.stop(server)
        for file in getattr(worker, "_grpo_files", []):
            os.close(file)


def _pretend_to_have_gpus(patch: pytest.MonkeyPatch, sent: list[Any]) -> None:
    group = SimpleNamespace(broadcast=lambda tensor, src, stream: sent.append(("broadcast", tuple(tensor.shape))))
    create: Callable[..., None] = lambda **settings: sent.append(("group", settings))  # noqa: E731
    modules = {
        "vllm.distributed.device_communicators.pynccl": {"PyNcclCommunicator": lambda *_, **__: group},
        "vllm.distributed.utils": {"StatelessProcessGroup": SimpleNamespace(create=create)},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
    for owner in (ipc, nccl):
        patch.setattr(owner, "gpu_uuid", lambda _: "GPU-1")
    patch.setattr(ipc, "reduce_tensor", lambda tensor: (None, tuple(tensor.shape)))
    patch.setattr(nccl, "choose_port", lambda host, port, *, key: PORT)
    for name in ("synchronize", "current_stream"):
        patch.setattr(torch.cuda, name, lambda *_: None)
