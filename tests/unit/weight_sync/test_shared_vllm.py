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
from offline_grpo.weight_sync import shared_vllm
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
        with pytest.raises(ConfigError, match=rf"is stale: .*\(pid {pid}, run run-1\)"):
            Bridge.read(path)


# What can be shared


@pytest.mark.parametrize(
    ("change", "compare", "problem"),
    [
        ({"b": None}, False, "b: the server has no such tensor"),
        ({"a": lambda a: a.t()}, False, "a: [4, 2] float32 in the trainer, [2, 4] float32 in the server"),
        # one element in its last bit, and two rows exchanged, as in packed or permuted weights
        ({"b": lambda b: torch.nextafter(b, b + (torch.arange(3) == 1))}, True, "b: other values than the trainer's"),
        ({"a": lambda a: a[[1, 0, 2, 3]]}, True, "a: other values than the trainer's"),
        ({"a": lambda a: a[[1, 0, 2, 3]]}, False, None),  # one that was started again has those from before training
        # it would stay as it is while everything around it is trained
        ({"visual.patch": lambda _: torch.zeros(3)}, True, "visual.patch: the trainer has no such parameter"),
        ({"lm_head": lambda views: views["a"].view(4, 2)}, True, None),  # tied: the trainer names it once
        ({"lm_head": lambda views: views["a"].clone()}, True, "lm_head: the trainer has no such parameter"),
    ],
)
def test_what_can_be_shared(change: dict[str, Any], compare: bool, problem: str | None) -> None:
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in (("a", (4, 2)), ("b", (3,)), ("c", (2, 2)))}
    views: dict[str, Any] = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    views |= {name: None if make is None else make(views.get(name, views)) for name, make in change.items()}
    views = {name: view for name, view in views.items() if view is not None}
    if problem is None:
        check_coverage(parameters, views, compare=compare)
        return
    with pytest.raises(ConfigError, match=r"^weight_sync=shared_vllm: 1 of 3 .*or use weight_sync=reload") as error:
        check_coverage(parameters, views, compare=compare)
    assert str(error.value).partition("cannot be shared: ")[2].partition(". Start the server")[0] == problem


# Another server


def test_training_survives_a_recovery_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new server has the weights from before training. In fp32 a checkpoint is made of what the policy points at."""
    sync = strategy("shared_vllm")
    policy = make_policy(make_qwen2(), build_char_tokenizer(64))
    untrained = {name: p.detach().clone() for name, p in policy.causal_lm.named_parameters()}

    def memory_of_a_server(*_: Any, **__: Any) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in untrained.items()}

    monkeypatch.setattr(shared_vllm, "open_views", memory_of_a_server)
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
        sync.attach(engine, snapshot)
    for name, parameter in policy.causal_lm.named_parameters():
        assert parameter.data_ptr() != old[name]
        assert torch.equal(parameter, untrained[name] + 1.0)
