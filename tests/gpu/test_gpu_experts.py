"""Mixtures of experts on a server: pushed whole, and adapted, where vLLM's kernels on CPUs cannot."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from architectures import ZOO
from composites import load_composite
from engines import (
    GPU,
    IPC_ARGS,
    IPC_ENV,
    LORA_ARGS,
    deploy,
    distance,
    found,
    make_client,
    make_server,
    running,
    sample,
    train,
)
from factories import strategy

from offline_grpo.engine.http import Refused
from offline_grpo.engine.server import Server
from offline_grpo.errors import EngineError
from offline_grpo.model.layouts.rows import Padded
from offline_grpo.model.tiny import build_char_tokenizer

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def saved(name: str, folder: Path) -> Path:
    model: Any = ZOO[name].build(**SIZES)
    model.to(GPU.dtype).save_pretrained(folder)
    build_char_tokenizer(512).save_pretrained(folder)
    return folder


def started(tmp_path: Path, args: Mapping[str, Any], env: Mapping[str, str]) -> Server:
    return make_server(GPU, tmp_path, args={**args, "max_model_len": 256, "enforce_eager": True}, env=env)


def push_twice(option: str, folder: Path, server: Server, lora: list[str] | None = None) -> None:
    """Two versions, of which the second is far from the first."""
    policy = load_composite(folder, lora=lora, device=GPU.device, precision="bf16", layout=Padded())
    client = make_client(found(server))
    deployment = deploy(strategy(option, f"weight_sync.tolerance_nats={GPU.tolerance_nats}"), client)
    deployment.connect(policy)
    policy.make_masters()
    try:
        deployment.push(policy, version=0)
        before = sample(client)
        train(policy, seed=1)
        report = deployment.push(policy, version=1)
        print(f"{option} {lora}: {distance(policy, before):.2g} before, {distance(policy, sample(client)):.2g} after")
        assert report.alignment["sync/probe_diff_abs_mean"] < GPU.tolerance_nats < distance(policy, before)
        assert distance(policy, sample(client)) < GPU.tolerance_nats
    finally:
        deployment.close()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_are_pushed(name: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """vLLM's loader of gpt-oss leaves them as they were, and the proof finds it."""
    folder, is_left = saved(name, tmp_path / "model"), name == "gpt_oss"
    with running(started(tmp_path, IPC_ARGS, IPC_ENV), folder) as server:
        for option in ("reload", "ipc"):
            fault = pytest.raises(EngineError, match=r"\[MISMATCH\].*stale weights") if is_left else nullcontext()
            with subtests.test(option), fault:
                push_twice(option, folder, server)


def test_experts_are_not_adapted(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "model")
    with running(started(tmp_path, LORA_ARGS, {}), folder) as server:
        push_twice("lora_hotswap", folder, server, ATTENTION)
        with pytest.raises(Refused, match=r"use model.lora.target_modules=\[q_proj,k_proj,v_proj,o_proj\]$"):
            push_twice("lora_hotswap", folder, server, ["all-linear"])
