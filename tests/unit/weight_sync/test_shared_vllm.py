"""Shared weights: the server's memory as tensors of ours, only where every parameter is there, plain, and equal; and a
server that is replaced by another. The contract tests do it with real ones.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import full_weights, make_client
from factories import make_policy, make_qwen2, strategy
from fake_vllm import SHAPES, FusedModel, make_worker
from scripted_server import Reply, ScriptedServer
from torch import Tensor, nn

from offline_grpo.errors import ConfigError
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.weight_sync.shared_vllm import Bridge, check_coverage, start_time_of
from offline_grpo.weight_sync.snapshot import Snapshot

CPU = torch.device("cpu")


@pytest.fixture
def model() -> FusedModel:
    return FusedModel()


@pytest.fixture
def worker(model: FusedModel) -> Iterator[Any]:
    worker = make_worker(model)
    yield worker
    for file in getattr(worker, "_grpo_files", []):
        os.close(file)


@pytest.fixture
def bridge(worker: Any) -> Bridge:
    about = {name: value for name, value in worker.grpo_describe().items() if name in ("pid", "device", "gpu_uuid")}
    start_time = start_time_of(os.getpid()) or 0
    about |= {"run_id": "run-1", "model": "some/model", "start_time": start_time, **worker.grpo_export()}
    return Bridge(**about, param_mappings=worker.grpo_layout())


def by_name(model: FusedModel) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint, cut out by hand."""
    block = model.model.layers[0]
    qkv, gate_up = block.self_attn.qkv_proj, block.mlp.gate_up_proj.weight
    return {
        "model.embed_tokens.weight": model.model.embed_tokens.weight[:10],
        "model.layers.0.self_attn.q_proj.weight": qkv.weight[:16],
        "model.layers.0.self_attn.k_proj.weight": qkv.weight[16:24],
        "model.layers.0.self_attn.v_proj.weight": qkv.weight[24:],
        "model.layers.0.self_attn.q_proj.bias": qkv.bias[:16],
        "model.layers.0.self_attn.k_proj.bias": qkv.bias[16:24],
        "model.layers.0.self_attn.v_proj.bias": qkv.bias[24:],
        "model.layers.0.self_attn.o_proj.weight": block.self_attn.o_proj.weight,
        "model.layers.0.mlp.gate_proj.weight": gate_up[:12],
        "model.layers.0.mlp.up_proj.weight": gate_up[12:],
        "model.layers.0.mlp.down_proj.weight": block.mlp.down_proj.weight,
        "model.layers.0.norm.weight": block.norm.weight,
        "lm_head.weight": model.lm_head.weight[:10],
    }


def test_views_are_the_servers_memory(model: FusedModel, bridge: Bridge, tmp_path: Path) -> None:
    """Through the file and back: equal bits, and a write by either side is there for the other."""
    before = {name: parameter.clone() for name, parameter in by_name(model).items()}
    path = tmp_path / "vllm_bridge_config.json"
    bridge.write(path)
    assert Bridge.read(path) == bridge
    assert (bridge.run_id, bridge.model, bridge.pid, bridge.device) == ("run-1", "some/model", os.getpid(), "cpu")
    views = Bridge.read(path).open(CPU)
    assert {name: tuple(view.shape) for name, view in views.items()} == SHAPES
    assert all(torch.equal(view, before[name]) for name, view in views.items())
    for number, (name, view) in enumerate(views.items()):
        view.fill_(number)
        assert torch.equal(by_name(model)[name], view)
    with torch.no_grad():
        model.model.layers[0].self_attn.qkv_proj.weight[16] = 77
    assert views["model.layers.0.self_attn.k_proj.weight"][0].tolist() == [77] * 8
    assert views["lm_head.weight"].data_ptr() == views["model.embed_tokens.weight"].data_ptr()
    assert len(bridge.storages) == len(list(model.parameters()))


def test_a_file_that_outlived_its_server(bridge: Bridge, tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    bridge.write(path)
    assert path.stat().st_mode & 0o777 == 0o600, "it says how to write to the weights"
    record = json.loads(path.read_text())
    with subprocess.Popen(["true"]) as ended:
        pass
    own_start = start_time_of(os.getpid())
    assert own_start is not None
    for pid, start_time in ((ended.pid, own_start), (os.getpid(), own_start + 1)):
        path.write_text(json.dumps(record | {"pid": pid, "start_time": start_time}))
        with pytest.raises(
            ConfigError, match=rf"is stale: the server that wrote it \(pid {pid}, run run-1\) has ended"
        ):
            Bridge.read(path)


# What can be shared


@pytest.fixture
def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in (("a", (4, 2)), ("b", (3,)), ("c", (2, 2)))}


@pytest.fixture
def views(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def refused(parameters: dict[str, nn.Parameter], views: dict[str, Tensor], *, compare: bool = True) -> str:
    with pytest.raises(
        ConfigError,
        match=r"^weight_sync=shared_vllm: \d+ of \d+ parameters cannot be shared: .*or use weight_sync=reload",
    ) as error:
        check_coverage(parameters, views, compare=compare)
    return str(error.value).partition("cannot be shared: ")[2].partition(". Start the server")[0]


def test_a_tensor_that_the_server_lacks(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    del views["b"]
    assert refused(parameters, views, compare=False) == "b: the server has no such tensor"


def test_another_shape(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    views["a"] = views["a"].t()
    expected = "a: [4, 2] float32 in the trainer, [2, 4] float32 in the server"
    assert refused(parameters, views, compare=False) == expected


def test_other_values(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    """One element in its last bit, and two rows exchanged: what packed or permuted weights look like."""
    views["b"][1] = torch.nextafter(views["b"][1], torch.tensor(9.0))
    views["a"] = views["a"][[1, 0, 2, 3]]
    assert refused(parameters, views) == "a: other values than the trainer's; b: other values than the trainer's"
    check_coverage(parameters, views, compare=False)  # one that was started again has the values from before training


def test_a_tensor_that_the_trainer_lacks(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    """It would stay as it is while everything around it is trained."""
    views["visual.patch"] = torch.zeros(3)
    assert refused(parameters, views) == "visual.patch: the trainer has no such parameter"


def test_tied_weights(parameters: dict[str, nn.Parameter], views: dict[str, Tensor]) -> None:
    """The trainer names them once, the server twice."""
    views["lm_head"] = views["a"].view(4, 2)
    check_coverage(parameters, views, compare=True)
    views["lm_head"] = views["a"].clone()
    assert refused(parameters, views) == "lm_head: the trainer has no such parameter"


# Another server


def test_training_survives_a_recovery_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new server has the weights from before training. In fp32 a checkpoint is made of what the policy points at."""
    sync = strategy("shared_vllm")
    policy = make_policy(make_qwen2(), build_char_tokenizer(64))
    untrained = {name: p.detach().clone() for name, p in policy.causal_lm.named_parameters()}

    def memory_of_a_server(*_: Any, **__: Any) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in untrained.items()}

    monkeypatch.setattr(sync, "_open_views", memory_of_a_server)
    with ScriptedServer(lambda _: Reply({"results": [None]})) as web:
        engine = make_client(web.base_url)
        snapshot = Snapshot(policy, full_weights, engine)
        sync.attach(engine, snapshot)
        with torch.no_grad():
            for master in policy.make_masters().parameters.values():
                master.add_(1.0)
        policy.masters.publish()
        old = {name: p.data_ptr() for name, p in policy.causal_lm.named_parameters()}
        monkeypatch.setattr(engine, "post", lambda *_, **__: pytest.fail("interrupted here, as by Ctrl-C"))
        sync.reattach(engine, snapshot)
    for name, parameter in policy.causal_lm.named_parameters():
        assert parameter.data_ptr() != old[name]
        assert torch.equal(parameter, untrained[name] + 1.0)
