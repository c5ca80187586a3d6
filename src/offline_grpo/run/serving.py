"""Who samples: the server that a run starts or finds, the client that training asks, and the one that evaluations ask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_grpo.engine.server import Server
from offline_grpo.errors import ConfigError
from offline_grpo.generation.server_client import ServerClient
from offline_grpo.generation.sglang_client import SglangClient
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.interfaces import RolloutClient, WeightSync
from offline_grpo.model.policy import Policy
from offline_grpo.model.text import end_ids
from offline_grpo.placement.devices import server_gpus
from offline_grpo.placement.ranks import Ranks
from offline_grpo.run.build import build
from offline_grpo.run.preflight import Plan
from offline_grpo.types import SyncReport
from offline_grpo.weight_sync.in_process import InProcess
from offline_grpo.weight_sync.lora_hotswap import LoraHotswap
from offline_grpo.weight_sync.main_only import MainOnly
from offline_grpo.weight_sync.reload import Reload

EVAL_BACKENDS: dict[str, type] = {"transformers": TransformersClient, "vllm_server": VllmClient, "sglang_server": SglangClient}


@dataclass(frozen=True, eq=False)
class Sampling:
    """A client, and what delivers the policy's weights to it."""

    client: RolloutClient
    weight_sync: WeightSync

    def push(self, policy: Policy, *, version: int) -> SyncReport:
        return self.weight_sync.push(policy, version=version)

    def check_served(self) -> None:
        self.weight_sync.check_served()

    def recover(self, policy: Policy, *, version: int) -> None:
        self.weight_sync.recover(policy, version=version)

    def close(self) -> None:
        self.weight_sync.close()


def for_training(plan: Plan, policy: Policy, run_folder: Path, ranks: Ranks) -> Sampling:
    """The client of `generation` and the strategy of `weight_sync`, not connected yet."""
    server = None
    if plan.needs_server:
        server = _server(plan, run_folder, ranks) if ranks.is_main else None
        url = ranks.broadcast(server.base_url if server is not None else None)
        server = server or Server(base_url=url, api_key=_api_key(plan), launcher=None, log_dir=run_folder)
    runtime = {
        "model": policy.model,
        "tokenizer": policy.tokenizer,
        "server": server,
        "eos_ids": end_ids(policy.causal_lm.generation_config, policy.tokenizer),
    }
    client = build(plan.client_node, key="generation", protocol=RolloutClient, **runtime)
    return Sampling(client, plan.weight_sync if server is None else _by_main(plan.weight_sync, ranks))


def for_evaluation(plan: Plan, policy: Policy, training: Sampling, run_folder: Path, ranks: Ranks) -> Sampling:
    """The client that evaluations ask: that of training, unless `eval.backend` or `eval.base_url` name another."""
    settings = plan.config.eval
    kind = EVAL_BACKENDS.get(settings.backend or "", type(training.client))
    if settings.base_url is None:
        if isinstance(training.client, kind):
            return training
        if not issubclass(kind, TransformersClient):
            raise ConfigError(
                f"eval.backend={settings.backend}: training samples from elsewhere; set eval.base_url to the server for evaluations"
            )
        return Sampling(TransformersClient(policy.model, policy.tokenizer, settings.batch_size), InProcess())
    if not issubclass(kind, ServerClient):
        raise ConfigError(f"eval.base_url={settings.base_url}: name the kind of server too: eval.backend=vllm_server or sglang_server")
    server = Server(base_url=settings.base_url, api_key=plan.api_key, launcher=None, log_dir=run_folder, key="eval.base_url")
    client = kind(
        server=server,
        eos_ids=end_ids(policy.causal_lm.generation_config, policy.tokenizer),
        batch_size=settings.batch_size,
        timeout_s=getattr(training.client, "timeout_s", 600),
        max_retries=getattr(training.client, "max_retries", 5),
    )
    return Sampling(client, _by_main(_evaluation_sync(plan, kind, has_adapters=policy.lora_rank is not None), ranks))


def _evaluation_sync(plan: Plan, kind: type[ServerClient], *, has_adapters: bool) -> WeightSync:
    """How evaluations' own server gets the weights: with the settings of training's strategy, where it has them."""
    trained = plan.weight_sync  # not that of a Sampling, which MainOnly may wrap
    common: dict[str, Any] = {"interval": 1, "tolerance_nats": getattr(trained, "tolerance_nats", 0.1)}
    if has_adapters:
        return LoraHotswap(**common, server_args={"max_lora_rank": 512})
    pause_mode = "abort" if issubclass(kind, SglangClient) else "keep"  # nothing is in flight at a push; SGLang knows no other
    return Reload(**common, pause_mode=pause_mode, server_args={}, location=getattr(trained, "location", "memory"))


def _by_main(weight_sync: WeightSync, ranks: Ranks) -> WeightSync:
    return MainOnly(weight_sync, ranks) if ranks.world_size > 1 else weight_sync


def _server(plan: Plan, run_folder: Path, ranks: Ranks) -> Server:
    return Server(
        base_url=plan.base_url,
        api_key=_api_key(plan),
        launcher=plan.launcher if plan.base_url is None else None,
        log_dir=run_folder,
        gpus=server_gpus(plan, ranks.world_size),
        options=getattr(plan.weight_sync, "server_args", {}),
        variables=getattr(plan.weight_sync, "variables", {}),
    )


def _api_key(plan: Plan) -> str | None:
    return plan.api_key if plan.base_url is not None or plan.launcher is None else plan.launcher.api_key
