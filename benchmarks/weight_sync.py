"""Seconds per push, tokens per second and GPU memory of each weight-sync strategy, on a model with random weights.
Needs a GPU and vLLM.

    # servers run side by side and are measured in alternation
    python benchmarks/weight_sync.py shared_vllm lora_hotswap --with-stock
    python benchmarks/weight_sync.py reload
    # two trainers with FSDP2 push to two servers, or to one that is spread over two GPUs
    accelerate launch --num_processes 2 benchmarks/weight_sync.py nccl --shape 1.7b --server-gpu 2 3
    python benchmarks/weight_sync.py nccl --shape 1.7b --server-gpu 1 2 --engine +engine.args.tensor_parallel_size=2

The time of a push runs from the first write (or the first saved byte) until the server has the weights and continues;
the verification afterwards is timed separately. `details.phases` has the seconds of each step of a push and its proof,
many of which run at the same time. `--with-stock` adds two unmodified vLLM servers, one started before the
others and one after them, from the same files: the baseline for tokens per second, and how much identical servers
differ ("stock_again_vs_stock").
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Target, alternate, parser_of, wait_for_device, write_result
from omegaconf import OmegaConf
from shapes import SIZES, save_model
from torch import distributed, multiprocessing
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM

from offline_grpo.config.build import build
from offline_grpo.config.compose import as_plain, composed, register
from offline_grpo.engine.http import choose_port
from offline_grpo.engine.vllm import VllmEngine, VllmLauncher
from offline_grpo.model.adapters import with_lora
from offline_grpo.model.layouts import Padded
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.load import load_tokenizer
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import Scoring
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import LoraConfig
from offline_grpo.train.fsdp2 import FullyShardedPolicy
from offline_grpo.train.sharding import Sharding
from offline_grpo.types import SamplingParams, SamplingRequest, ServedWeights
from offline_grpo.weight_sync import proof
from offline_grpo.weight_sync.deployment import Deployment

TARGETS = {
    "shared_vllm": [Target("push_s", "<=", 0.05), Target("bytes_copied", "<=", 0)],
    "lora_hotswap": [Target("push_s", "<=", 0.15)],
    "nccl": [
        Target("push_vs_broadcast", ">=", 0.3),
        Target("sync_s", "<=", 0.4),
        Target("proof_s", "<=", 0.1),
        Target("unproven", "<=", 0),
    ],
}
STOCK_TARGETS = {
    "shared_vllm": [Target("single_stream_vs_stock", ">=", 0.97), Target("concurrent_vs_stock", ">=", 0.97)],
    "lora_hotswap": [Target("single_stream_vs_base", ">=", 0.85), Target("concurrent_vs_base", ">=", 0.85)],
}


class StockEngine(VllmLauncher):
    """Unmodified vLLM, without the worker extension."""

    def command(self, model: str, port: int, args: Mapping[str, Any]) -> list[str]:
        words = super().command(model, port, args)
        at = words.index("--worker-extension-cls")
        return words[:at] + words[at + 2 :]


@dataclass
class Arm:
    """A connected strategy, with the measurements taken while connecting."""

    name: str
    deployment: Deployment
    policy: Policy
    client: VllmEngine
    start_s: float
    trainer_mib: float
    sharding: Sharding


class Phases:
    """Seconds that calls of functions took, by name, since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        for name in ("sample_probe", "scored", "compare_bits"):
            self._watch(proof, name)
        for name in ("call_workers", "post"):
            self._watch(VllmEngine, name)

    def _watch(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*words: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*words, **named)
            finally:
                of = words[1] if owner is VllmEngine else name
                self._seconds[of] = max(self._seconds.get(of, 0.0), time.perf_counter() - started)

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        found, self._seconds = self._seconds, {}
        return found


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    arguments = parse()
    ranks = Ranks(use_cpu=not torch.cuda.is_available())
    phases = Phases()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(ranks.broadcast(own))
        ranks.on_main(lambda: save_model(folder / "model", arguments.shape, arguments.dtype))
        servers: list[VllmEngine] = []
        try:
            measure(arguments, folder / "model", folder, servers, ranks, phases)
        finally:
            for server in servers:
                server.stop()


def measure(
    arguments: argparse.Namespace, model: Path, folder: Path, servers: list[VllmEngine], ranks: Ranks, phases: Phases
) -> None:
    """Connect all arms, time their pushes, then time the sampling of all arms in alternation, and write the results."""
    stocks = {}
    if arguments.with_stock:
        stocks["stock"] = start_stock(arguments, model, folder / "stock", servers)
    arms = [connect(name, arguments, model, folder / name, servers, ranks) for name in arguments.strategies]
    if arguments.with_stock:
        stocks["stock_again"] = start_stock(arguments, model, folder / "stock_again", servers)
    pushes = {
        arm.name: [push(arm, version, phases) for version in range(1, pushes_of(arm, arguments) + 1)] for arm in arms
    }
    if not ranks.is_main:
        return
    speeds = throughput(arms, stocks, arguments)
    for arm in arms:
        report(arm, pushes[arm.name], speeds, arguments)


def start_stock(arguments: argparse.Namespace, model: Path, folder: Path, servers: list[VllmEngine]) -> VllmEngine:
    server = new_server(arguments, StockEngine, folder, {}, {}, server_gpus(arguments)[0])
    servers.append(server)
    server.start(str(model), {})
    return server


def pushes_of(arm: Arm, arguments: argparse.Namespace) -> int:
    return 2 if "restart" in arm.name else arguments.pushes


def connect(
    name: str, arguments: argparse.Namespace, model: Path, folder: Path, servers: list[VllmEngine], ranks: Ranks
) -> Arm:
    node = as_plain(OmegaConf.select(configuration(f"weight_sync={name}"), "weight_sync"))
    sync = build({**node, "tolerance_nats": arguments.tolerance_nats}, key="weight_sync")
    own = [
        new_server(arguments, VllmLauncher, folder / str(n), sync.requires.server_args, sync.requires.env, gpus)
        for n, gpus in enumerate(server_gpus(arguments))
    ]
    servers += own
    before = allocated_mib()
    policy = load(model, arguments, ranks, shared=sync.requires.shares_weights, lora=name.startswith("lora"))
    started = time.perf_counter()
    is_spread = ranks.world_size > 1
    sharding = FullyShardedPolicy(ranks) if is_spread else Sharding(ranks)
    deployment = Deployment(own, sync, sharding.full_weights, (ranks, sharding.lead) if is_spread else None)
    sharding.prepare(policy)
    deployment.connect(policy)
    start_s = time.perf_counter() - started
    policy.make_masters()
    arm = Arm(name, deployment, policy, own[0], start_s, allocated_mib() - before, sharding)
    deployment.push(policy, version=0)
    return arm


def server_gpus(arguments: argparse.Namespace) -> list[list[int] | None]:
    """The GPUs of each server."""
    if not torch.cuda.is_available():
        return [None] * len(arguments.server_gpu)
    engine = configuration("generation=vllm_server", *arguments.engine).engine
    size = int(engine.args.get("tensor_parallel_size") or 1)
    return [arguments.server_gpu[at : at + size] for at in range(0, len(arguments.server_gpu), size)]


def push(arm: Arm, version: int, phases: Phases) -> dict[str, Any]:
    """Change every master weight a little, publish and push. Returns the seconds of each part."""
    with torch.no_grad():
        for master in arm.policy.masters.parameters.values():
            master.add_(torch.randn_like(master), alpha=1e-3)
    wait_for_device()
    phases.take()
    started = time.perf_counter()
    arm.policy.masters.publish()
    wait_for_device()
    published = time.perf_counter() - started
    report = arm.deployment.push(arm.policy, version=version)
    whole = time.perf_counter() - started - report.proof_seconds
    found = phases.take()
    print(
        f"{arm.name} version {version}: {whole:.4f} s, published {published:.4f} s, paused {report.paused_seconds:.4f} "
        f"s, proof {report.proof_seconds:.3f} s; " + ", ".join(f"{name} {s:.4f}" for name, s in found.items()),
        flush=True,
    )
    return {
        "push_s": whole,
        "deliver_s": report.seconds,
        "paused_s": report.paused_seconds,
        "proof_s": report.proof_seconds,
        "sync_s": report.seconds + report.proof_seconds,
        "bytes_copied": report.num_bytes,
        "unproven": report.num_tensors - report.alignment["sync/num_tensors_proven"],
        "probe_diff_abs_mean": report.alignment["sync/probe_diff_abs_mean"],
        "phases": found,
    }


def throughput(
    arms: Sequence[Arm], stocks: Mapping[str, VllmEngine], arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Time the same loads, "single_stream" and "concurrent", on every arm and on stock vLLM, in alternation."""
    clients = {arm.name: (arm.client, arm.client.weights.name) for arm in arms}
    for arm in arms:
        if arm.name.startswith("lora"):
            clients[f"{arm.name} base"] = (arm.client, "")
    clients |= {name: (client, "") for name, client in stocks.items()}
    results: dict[str, dict[str, Any]] = {}
    for load_name, num_prompts, num_tokens in (
        ("single_stream", 1, arguments.tokens * 2),
        ("concurrent", arguments.concurrent, arguments.tokens),
    ):
        timings = alternate(
            {name: partial(ask, *pair, num_prompts, num_tokens) for name, pair in clients.items()},
            settle={name: partial(ask, *pair, num_prompts, num_tokens // 8) for name, pair in clients.items()},
            rounds=arguments.rounds,
        )
        tokens = num_prompts * num_tokens
        results[load_name] = {
            "tokens_per_s": {name: tokens / timings.median_s(name) for name in clients},
            "timings": timings,
        }
    return results


def ask(client: VllmEngine, model_name: str, num_prompts: int, num_tokens: int) -> None:
    client.weights = ServedWeights(0, model_name)
    prompts = [tuple(5 + (i * 31 + j * 7) % 90 for j in range(64)) for i in range(num_prompts)]
    requests = [SamplingRequest(prompt, 1, seed) for seed, prompt in enumerate(prompts)]
    answers = client.generate(requests, SamplingParams(num_tokens))
    assert sum(len(c.token_ids) for _, [c] in answers) > 0.8 * num_prompts * num_tokens


def report(
    arm: Arm, pushes: list[dict[str, Any]], speeds: dict[str, dict[str, Any]], arguments: argparse.Namespace
) -> None:
    phases = [push.pop("phases") for push in pushes]
    measured = {key: statistics.median(push[key] for push in pushes) for key in pushes[0]}
    measured["push_max_s"] = max(push["push_s"] for push in pushes)
    measured |= {"server_start_s": arm.start_s, "trainer_gpu_mib": arm.trainer_mib}
    for load_name, speed in speeds.items():
        measured[f"{load_name}_tokens_per_s"] = speed["tokens_per_s"][arm.name]
        if arguments.with_stock:
            measured[f"{load_name}_vs_stock"] = 1 / speed["timings"].ratio(arm.name, "stock")
            measured[f"{load_name}_stock_again_vs_stock"] = 1 / speed["timings"].ratio("stock_again", "stock")
        if f"{arm.name} base" in speed["tokens_per_s"]:
            measured[f"{load_name}_vs_base"] = 1 / speed["timings"].ratio(arm.name, f"{arm.name} base")
    if arm.name == "nccl":
        measured["gb_per_s"] = measured["bytes_copied"] / measured["deliver_s"] / 1e9
        measured["broadcast_gb_per_s"] = broadcast_gb_s(int(measured["bytes_copied"]))
        measured["push_vs_broadcast"] = measured["gb_per_s"] / measured["broadcast_gb_per_s"]
    targets = TARGETS.get(arm.name, []) + [t for t in STOCK_TARGETS.get(arm.name, []) if t.metric in measured]
    write_result(
        arguments.out.format(arm.name),
        claim=f"weight_sync={arm.name}: a push of {arguments.shape}, and what the server then makes per second",
        targets=targets,
        settings={
            **{name: getattr(arguments, name) for name in ("shape", "dtype", "concurrent", "tokens", "engine")},
            "server_gpus": arguments.server_gpu,
            "num_trainers": arm.sharding.ranks.world_size,
        },
        measured=measured,
        details={
            "pushes": pushes,
            "phases": {name: statistics.median(one[name] for one in phases) for name in phases[0]},
            "rounds": {name: speed["timings"].summary(arm.name) for name, speed in speeds.items()},
        },
    )


def new_server(
    arguments: argparse.Namespace,
    kind: type[VllmLauncher],
    folder: Path,
    args: Mapping[str, Any],
    env: Mapping[str, str],
    gpus: Sequence[int] | None,
) -> VllmEngine:
    share = f"engine.args.gpu_memory_utilization={arguments.gpu_memory_utilization}"
    node = as_plain(OmegaConf.select(configuration("generation=vllm_server", share, *arguments.engine), "engine"))
    own = {"args": {**node["args"], "dtype": arguments.dtype, **args}, "env": {**env, **node["env"]}}
    launcher = kind(**{**{key: value for key, value in node.items() if key != "_target_"}, **own})
    about: Any = {"eos_ids": [], "vocab_size": 2**31, "batch_size": arguments.concurrent, "timeout_s": 600}
    return VllmEngine(**about, max_retries=0, launcher=launcher, log_dir=folder, gpus=gpus)


def configuration(*overrides: str) -> Any:
    register()
    return composed(overrides)


def load(folder: Path, arguments: argparse.Namespace, ranks: Ranks, *, shared: bool, lora: bool) -> Policy:
    device = torch.device("cuda", ranks.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=getattr(torch, arguments.dtype))
    model: Any = loaded.to("cpu" if shared else device)
    if lora:
        model = with_lora(model, LoraConfig(16, 32, 0.0, ["all-linear"], None), adapter=None)
    return Policy(
        Scoring(model, Padded(), TiledHead(tile_width=None)), load_tokenizer(str(folder)), compute_device=device
    )


def allocated_mib() -> float:
    return torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("strategies", nargs="*")
    parser.add_argument("--with-stock", action="store_true")
    parser.add_argument("--shape", choices=list(SIZES), default="qwen2_5_0_5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrent", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--tolerance-nats", type=float, default=0.1)
    parser.add_argument("--gpu-memory-utilization", default="0.25")
    parser.add_argument("--server-gpu", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--engine", nargs="*", default=[], help="further overrides, such as engine.args.enforce_eager=true"
    )
    parser.add_argument("--out", default="weight_sync_{}", help="name of the result")
    return parser.parse_args()


BROADCASTS = 10


def _broadcast(rank: int, num_bytes: int, port: int, results: multiprocessing.Queue) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # under accelerate, rank 0 would open no store of its own
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=2)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(BROADCASTS + 1):
        distributed.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        distributed.broadcast(tensor, src=0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        results.put(num_bytes / statistics.median(seconds[1:]) / 1e9)
    distributed.destroy_process_group()


def broadcast_gb_s(num_bytes: int) -> float:
    """In 10^9 bytes per second, median of `BROADCASTS`; one tensor of `num_bytes` in each of two new processes."""
    port = choose_port("127.0.0.1", None, key="MASTER_PORT")
    results: multiprocessing.Queue = multiprocessing.get_context("spawn").Queue()
    spawn(_broadcast, args=(num_bytes, port, results), nprocs=2)
    return results.get(timeout=60)


if __name__ == "__main__":
    main()
