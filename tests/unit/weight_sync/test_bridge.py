"""The bridge file: the server's memory as tensors of ours."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import SHAPES, FusedModel, make_worker

from offline_grpo.errors import ConfigError
from offline_grpo.weight_sync.shared_vllm import Bridge, start_time_of

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


# Files


def record_of(bridge: Bridge, path: Path) -> dict[str, Any]:
    bridge.write(path)
    assert path.stat().st_mode & 0o777 == 0o600, "it says how to write to the weights"
    return json.loads(path.read_text())


def test_a_file_that_outlived_its_server(bridge: Bridge, tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    record = record_of(bridge, path)
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
