"""The protocol of vLLM's weight transfer: buckets, and the order of its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engines import full_weights, make_client
from factories import make_policy, make_qwen2
from fake_vllm import load_extension
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.engine.server import Server
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.snapshot import Named, Snapshot, weights_tag
from offline_grpo.weight_sync.strategy import Staged
from offline_grpo.weight_sync.weight_transfer import Ipc, Nccl


class Recorder(Ipc):
    """Sends by HTTP alone."""

    def send(self, engines: Sequence[VllmEngine], tensors: Sequence[Any], update_info: dict[str, Any]) -> None:
        for engine in engines:
            engine.post("/update_weights", {"update_info": update_info})


def make(**changes: Any) -> Recorder:
    return Recorder(
        **{"interval": 1, "pause_mode": "wait", "tolerance_nats": 0.1, "server_args": {}, "bucket_mib": 1, **changes}
    )


def engine_at(url: str, folder: Path) -> VllmEngine:
    server = Server(base_url=url, api_key=None, launcher=None, log_dir=folder)
    return make_client(server)


def deliver(sync: Ipc, policy: Policy, *engines: VllmEngine) -> Staged:
    """Staged once, and given to all engines."""
    with sync.staged(Snapshot(policy, full_weights, engines[0]), 5) as staged:
        assert sync.deliver(engines, staged) > 0
    return staged


def test_a_delivery_pauses_around_all_of_it(tmp_path: Path) -> None:
    policy = make_policy(make_qwen2(vocab_size=20_000))
    with ScriptedServer(lambda _: Reply({"results": [None]})) as web:
        moved = deliver(make(), policy, engine_at(web.base_url, tmp_path))
        requests = web.requests
    assert [request.path for request in requests] == [
        *("/pause", "/start_weight_update", "/update_weights", "/update_weights"),
        *("/finish_weight_update", "/collective_rpc", "/resume"),
    ]
    assert requests[0].query == {"mode": ["wait"], "clear_cache": ["true"]}
    assert requests[-2].body == {"method": "grpo_set_tag", "kwargs": {"tag": weights_tag(5)}, "timeout": 600.0}
    infos = [request.body["update_info"] for request in requests if request.path == "/update_weights"]
    parameters = dict(policy.causal_lm.named_parameters())
    assert [name for info in infos for name in info["names"]] == list(parameters)
    assert [shape for info in infos for shape in info["shapes"]] == [list(p.shape) for p in parameters.values()]
    assert {dtype for info in infos for dtype in info["dtype_names"]} == {"float32"}
    assert (moved.num_tensors, moved.num_bytes) == (len(parameters), sum(p.nbytes for p in parameters.values()))


# Broadcasts


class Worker(load_extension().WorkerExtension):  # type: ignore[misc]
    """One that holds the checkpoint's parameters as they are, and counts what comes through its loader."""

    def __init__(self) -> None:
        self.model, self.num_loaded = make_qwen2(), 0
        self.model_runner = SimpleNamespace(model=self.model)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.float32), parallel_config=SimpleNamespace(world_size=1, rank=0)
        )

    def reload_weights(self, weights_iterator: Iterator[Named]) -> None:
        for name, tensor in weights_iterator:
            self.model.get_parameter(name).data.copy_(tensor)
            self.num_loaded += 1

    def reply(self, request: Request) -> Reply:
        """Of a server with this worker."""
        if request.path == "/get_world_size":
            return Reply({"world_size": 1})
        body = request.body or {}
        called = getattr(self, body["method"])(**body["kwargs"]) if request.path == "/collective_rpc" else None
        return Reply({"results": [called]})


def test_one_broadcast_reaches_all_servers(tmp_path: Path) -> None:
    """First through the loader; where that has been proven, in place. A server that is started anew joins again."""
    policy, workers = make_policy(make_qwen2(vocab_size=20_000)), [Worker(), Worker()]
    num = len(list(policy.causal_lm.parameters()))
    for worker in workers:
        worker.model.resize_token_embeddings(20_000)
    sync = Nccl(interval=1, pause_mode="wait", tolerance_nats=0.1, server_args={}, bucket_mib=1, master_address=None)
    with ScriptedServer(workers[0].reply) as web, ScriptedServer(workers[1].reply) as other:
        engines = [engine_at(one.base_url, tmp_path) for one in (web, other)]
        for version, num_loaded in ((0, [num, num]), (1, [num, num]), (2, [num, 2 * num])):
            for number, parameter in enumerate(policy.causal_lm.parameters()):
                parameter.data.add_(number + 1)
            with sync.staged(Snapshot(policy, full_weights, engines[0]), version) as staged:
                assert sync.deliver(engines, staged) > 0
            for worker in workers:
                assert worker.grpo_tag() == weights_tag(version)
                assert all(map(torch.equal, worker.model.parameters(), policy.causal_lm.parameters()))
            assert [worker.num_loaded for worker in workers] == num_loaded
            sync._in_place = set(engines)
            if version == 1:
                sync._in_place.discard(engines[1])
                sync.detach(engines[1])
        sync.detach(engines[0])
