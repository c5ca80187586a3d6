"""A real vLLM server on the same GPU: whole runs beside it, deaths, sleep, and mixtures of experts.

`pytest -m gpu tests/gpu`, on one GPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from architectures import LATENT, WITH_EXPERTS, ZOO, load_composite
from engines import (
    GPU,
    IPC_ARGS,
    IPC_ENV,
    LORA_ARGS,
    deploy,
    distance,
    kill_engine,
    make_client,
    make_server,
    processes_naming,
    running,
    sample,
)
from engines import train as change
from factories import compose_config, strategy
from runs import SMALL, Kill, metrics_of, printed, run_in_child, wait_until
from safetensors.torch import load_file
from torch import Tensor

from offline_grpo.engine.http import Refused
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import EngineError
from offline_grpo.model.layouts import Padded
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.run import train
from offline_grpo.weight_sync.deployment import Deployment

pytestmark = pytest.mark.gpu

OVERRIDES = (
    *("train.precision=bf16", "train.lr=1e-3", "data.problems_per_iteration=8", "data.rollouts_per_problem=8"),
    "eval.num_ids=16",
)

SMALL_SERVER = (
    "engine.args.enforce_eager=true",
    "engine.args.gpu_memory_utilization=0.1",
    "+engine.args.kv_cache_memory_bytes=1073741824",
)
"""Measures no memory at its start, which others on the GPU would disturb."""


@dataclass
class Deaths:
    """Of engines, and what the masters were at every try of the push that killed one."""

    pids: list[int] = field(default_factory=list)
    masters: list[dict[str, Tensor]] = field(default_factory=list)


def kill_engines(monkeypatch: pytest.MonkeyPatch, *, at_push: int) -> Deaths:
    """Kill the engine of a run under `shared_vllm` before it samples for iteration 1, and at the push of version
    `at_push`.
    """
    deaths = Deaths()
    sampled, pushed = OnPolicy.next, Deployment.push

    def next_and_kill(self: OnPolicy, iteration: int) -> Any:
        if iteration == 1 and not deaths.pids:
            deaths.pids.append(kill_engine(self.client.log_dir))
        return sampled(self, iteration)

    def push_and_kill(self: Deployment, policy: Policy, *, version: int, **how: Any) -> Any:
        if version == at_push:
            deaths.masters.append({name: p.detach().cpu().clone() for name, p in policy.masters.parameters.items()})
            if len(deaths.masters) == 1:
                deaths.pids.append(kill_engine(self.engines[0].log_dir))  # type: ignore[attr-defined]
        return pushed(self, policy, version=version, **how)

    monkeypatch.setattr(OnPolicy, "next", next_and_kill)
    monkeypatch.setattr(Deployment, "push", push_and_kill)
    return deaths


@pytest.mark.parametrize("filters", [(), ("generation.top_p=0.7", "generation.top_k=5")], ids=["no filter", "filters"])
def test_end_to_end(filters: tuple[str, ...], tmp_path: Path) -> None:
    """One copy of the weights, CUDA graphs on, from the first rollout to the last checkpoint."""
    run_dir = tmp_path / "run"
    small = (
        "model.tiny.warm_start_steps=60",
        "task.format_weight=0.5",
        "eval.interval=2",
        "train.iterations=4",
        "checkpoint.save_interval=2",
        "train.drop_zero_signal_groups=false",  # every iteration pushes
    )
    memory = SMALL_SERVER[1:]
    train(
        compose_config(
            "generation=vllm_server",
            "weight_sync=shared_vllm",
            *OVERRIDES,
            *small,
            *memory,
            *filters,
            f"cache_dir={tmp_path}/cache",
        ),
        run_dir,
    )
    metrics = metrics_of(run_dir)
    for iteration in range(4):
        found = metrics[f"train_iter_{iteration:03d}.json"]
        assert found["sync/version"] == iteration + 1
        assert found["sync/num_bytes"] == 0
        assert found["sync/num_tensors_proven"] == found["sync/num_tensors"] > 0
        assert found["alignment/diff_abs_mean"] < 0.05
        assert found["mismatch/ratio_mean"] == pytest.approx(1, abs=0.02), "before the first update"
    assert {"eval_init.json", "eval_iter_001.json", "eval_iter_003.json"} <= set(metrics)
    assert (run_dir / "checkpoints" / "iter_003" / "model.safetensors").exists()
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("option", "where"), [("shared_vllm", "shared_vllm:SharedVllm.deliver"), ("ipc", "weight_transfer:Ipc.send")]
)
def test_a_killed_trainer_leaves_nothing(option: str, where: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of a push: CUDA IPC has files in shared memory too, the server's or the trainer's."""
    files, processes = set(os.listdir("/dev/shm")), processes_naming(str(tmp_path))
    server = ("generation=vllm_server", f"weight_sync={option}", *SMALL_SERVER)
    overrides = (
        *SMALL,
        *OVERRIDES,
        *server,
        f"cache_dir={tmp_path}/cache",
        "checkpoint.enabled=false",
        "model.tiny.hidden_size=128",
    )
    kill = Kill(f"offline_grpo.weight_sync.{where}", count=3)
    assert run_in_child(tmp_path / "run", *overrides, kill=kill, timeout_s=200, fresh=True) == -signal.SIGKILL, printed(
        tmp_path / "run"
    )
    wait_until(lambda: set(os.listdir("/dev/shm")) <= files and processes_naming(str(tmp_path)) == processes, 30)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_server_that_dies_is_started_again(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory dies with it, which the trainer's parameters were; they continue in the memory of the next."""
    deaths = kill_engines(monkeypatch, at_push=6)
    server = ("generation=vllm_server", "weight_sync=shared_vllm", *SMALL_SERVER)
    run = (
        *(f"train.precision={precision}", "train.iterations=3", "model.tiny.hidden_size=128"),
        f"cache_dir={tmp_path}/cache",
    )
    train(compose_config(*SMALL, *OVERRIDES, *server, *run), tmp_path / "run")
    metrics = metrics_of(tmp_path / "run")
    assert len(deaths.pids) == 2
    assert metrics["train_iter_002.json"]["sync/num_recoveries"] == 2
    assert [metrics[f"train_iter_{i:03d}.json"]["sync/version"] for i in range(3)] == [2, 4, 6]
    assert all(metrics[f"train_iter_{i:03d}.json"]["alignment/diff_abs_mean"] < 0.05 for i in range(3))
    before, *after = deaths.masters
    assert after
    assert all(torch.equal(before[name], again[name]) for again in after for name in before)
    saved = load_file(tmp_path / "run" / "checkpoints" / "iter_002" / "model.safetensors")
    assert all(torch.equal(saved[name], master.to(saved[name].dtype)) for name, master in before.items())
    assert processes_naming(str(tmp_path)) == []


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def saved(name: str, folder: Path) -> Path:
    model: Any = ZOO[name].build(**{**WITH_EXPERTS, **(LATENT if name == "deepseek_v3" else {})})
    model.to(GPU.dtype).save_pretrained(folder)
    build_char_tokenizer(512).save_pretrained(folder)
    return folder


def started(tmp_path: Path, args: Mapping[str, Any], env: Mapping[str, str]) -> VllmEngine:
    return make_server(GPU, tmp_path, args={**args, "max_model_len": 256, "enforce_eager": True}, env=env)


def push_twice(
    option: str,
    folder: Path,
    server: VllmEngine,
    lora: list[str] | None = None,
    tolerance_nats: float = GPU.tolerance_nats,
) -> None:
    """Two versions, of which the second is far from the first."""
    policy = load_composite(folder, lora=lora, device=GPU.device, precision="bf16", layout=Padded())
    client = make_client(server)
    deployment = deploy(strategy(option, f"weight_sync.tolerance_nats={tolerance_nats}"), client)
    deployment.connect(policy)
    policy.make_masters()
    try:
        deployment.push(policy, version=0)
        before = sample(client)
        change(policy, seed=1)
        report = deployment.push(policy, version=1)
        print(f"{option} {lora}: {distance(policy, before):.2g} before, {distance(policy, sample(client)):.2g} after")
        assert report.alignment["sync/probe_diff_abs_mean"] < tolerance_nats < distance(policy, before)
        assert distance(policy, sample(client)) < tolerance_nats
    finally:
        deployment.close()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_experts_are_pushed(name: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """vLLM's loader of gpt-oss leaves them as they were, and the proof finds it; those of Mixtral and DeepSeek-V3 do
    not know them by transformers' names. Where routes are torn in bf16, random experts are far apart (Mixtral).
    """
    folder, tolerance_nats = saved(name, tmp_path / "model"), 0.5 if name == "mixtral" else GPU.tolerance_nats
    faults: dict[str, Any] = {}
    if name == "gpt_oss":
        faults = dict.fromkeys(("reload", "ipc"), pytest.raises(EngineError, match=r"\[MISMATCH\].*stale weights"))
    elif name != "qwen3_moe":
        faults["ipc"] = pytest.raises(EngineError, match="use weight_sync=reload")
    with running(started(tmp_path, IPC_ARGS, IPC_ENV), folder) as server:
        for option in ("reload", "ipc"):
            with subtests.test(option), faults.get(option, nullcontext()):
                push_twice(option, folder, server, tolerance_nats=tolerance_nats)


def test_experts_are_not_adapted(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "model")
    with running(started(tmp_path, LORA_ARGS, {}), folder) as server:
        push_twice("lora_hotswap", folder, server, ATTENTION)
        with pytest.raises(Refused, match=r"use model.lora.target_modules=\[q_proj,k_proj,v_proj,o_proj\]$"):
            push_twice("lora_hotswap", folder, server, ["all-linear"])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_routes_of_vllm_are_followed(mode: str, tmp_path: Path) -> None:
    """vLLM tells them itself, with its prefix cache on; of the last token of a completion alone it does not."""
    experts = ("model=tiny_moe", "model.tiny.hidden_size=128", "model.tiny.intermediate_size=64", f"mode={mode}")
    ahead = ("rollouts.max_staleness=2",) if mode == "async" else ()
    server = ("generation=vllm_server", "weight_sync=reload", *SMALL_SERVER, "model.router_replay=rollout", *ahead)
    train(compose_config(*SMALL, *OVERRIDES, *experts, *server, f"cache_dir={tmp_path}/cache"), tmp_path / "run")
    metrics = [metrics_of(tmp_path / "run")[f"train_iter_{i:03d}.json"] for i in range(4)]
    assert metrics[0]["alignment/diff_abs_mean"] < 0.05
    assert all(0 <= found["routes/differ_frac"] < 0.3 for found in metrics)
    for i in range(4):
        for row in pq.read_table(tmp_path / "run" / "rollouts" / f"iter_{i:03d}.parquet").to_pylist():
            routes = np.load(BytesIO(row["routes"]))
            assert routes.shape == (len(row["prompt_ids"]) + len(row["completion_ids"]), 2, 2)
            assert routes[:-1].max() < 8
            assert (routes[-1] == 255).all()


SERVED = "generation=vllm_server model.tiny.hidden_size=128"


@pytest.mark.parametrize("words", ["", SERVED, f"{SERVED} weight_sync=lora_hotswap model/lora=default"])
def test_a_run_can_be_repeated(words: str, tmp_path: Path) -> None:
    """Token for token, also one that was killed and resumed, with CUDA graphs, in another order of the requests."""
    memory = SMALL_SERVER[1:] if words else ()
    overrides = (*SMALL, *OVERRIDES, *memory, *words.split(), "generation.batch_invariant=true", "train.iterations=4")
    overrides += (f"cache_dir={tmp_path}/cache",)
    kill = Kill("offline_grpo.loop:Loop.iterate", count=4)
    assert run_in_child(tmp_path / "first", *overrides, fresh=True) == 0, printed(tmp_path / "first")
    assert run_in_child(tmp_path / "second", *overrides, kill=kill, fresh=True) == -signal.SIGKILL
    resumed = f"resume={tmp_path / 'second'}"
    assert run_in_child(tmp_path / "again", *overrides, resumed, fresh=True) == 0, printed(tmp_path / "again")
    for i in range(4):
        found, expected = (
            pq.read_table(tmp_path / name / "rollouts" / f"iter_{i:03d}.parquet") for name in ("second", "first")
        )
        for column in ("completion_ids", "logprobs"):
            assert found[column].equals(expected[column]), f"{column} of iteration {i}"
    assert len({row["grad_norm"] for row in metrics_of(tmp_path / "first").values() if "grad_norm" in row}) == 4
