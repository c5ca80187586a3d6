"""What a weight-sync strategy needs of the rest of a run, and the check that the run has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from offline_grpo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SyncRequirements:
    """Said by the strategy, read by preflight, placement and serving.

    Args:
        engines: the `engine_name` of every kind of server that it can update; empty: the client must sample from
            the trained module.
        refused: kinds of server that its present settings rule out, each with the message that says which setting.
        moves: "full" for all weights of the model, "lora" for adapters alone; "any" where trainer and engine share
            them; "nothing" where the engine keeps the weights that it has.
        max_lora_rank: of the adapters that a server which the run starts makes room for; None where no adapters move.
        own_server: the run must have started the server.
        one_engine: it cannot serve several engines at once.
        gpu: weights travel from GPU to GPU alone.
        placement: GPUs of a server that the run starts: the "same" as the first training process's, any "other"
            than the training processes', or "any".
        server_args, env: what the server needs on its command line and in its environment.
        in_flight: of "keep", "wait" and "abort" that which a push does to requests that run; empty: there must be none.
        shares_weights: the policy's parameters become the server's memory: the policy is loaded on the CPU, and
            moved by `attach`.
    """

    engines: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    moves: Literal["full", "lora", "any", "nothing"] = "full"
    max_lora_rank: int | None = None
    own_server: bool = False
    one_engine: bool = False
    gpu: bool = False
    placement: Literal["same", "other", "any"] = "any"
    server_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    in_flight: tuple[str, ...] = ()
    shares_weights: bool = False


def check_requirements(
    name: str, needs: SyncRequirements, client_class: type, *, lora_rank: int | None, base_url: str | None
) -> None:
    """Raise ConfigError if a run does not have what the strategy `name` needs.

    Args:
        client_class: the rollout client's, whose `engine_name` says what it asks.
        lora_rank: of the policy's adapters, None where it has none.
        base_url: of a server that the run does not start; None where it starts one, or needs none.
    """
    engine_name: str | None = client_class.engine_name  # type: ignore[attr-defined]  # every rollout client has one
    if not needs.engines and engine_name is not None:
        raise ConfigError(
            f"weight_sync={name}: {client_class.__name__} does not sample from the trained module; choose a "
            "weight_sync that moves "
            "weights to it, such as shared_vllm, reload, or with LoRA lora_hotswap"
        )
    if engine_name is not None and engine_name in needs.refused:
        raise ConfigError(needs.refused[engine_name])
    if needs.engines and engine_name not in needs.engines:
        what = "is for a" if needs.moves == "nothing" else "moves weights to a"
        servers = " or ".join(needs.engines)
        raise ConfigError(
            f"weight_sync={name}: {what} {servers} server; use another generation, or another weight_sync"
        )
    if lora_rank is not None and needs.moves == "full":
        raise ConfigError(
            f"weight_sync={name}: moves all weights, and with model.lora only adapters change; use "
            "weight_sync=lora_hotswap"
        )
    if lora_rank is None and needs.moves == "lora":
        raise ConfigError(
            f"weight_sync={name}: moves LoRA adapters and the policy has none; add model/lora=default, or choose "
            "another"
        )
    if (
        base_url is None
        and lora_rank is not None
        and needs.max_lora_rank is not None
        and lora_rank > needs.max_lora_rank
    ):
        raise ConfigError(
            f"weight_sync.server_args.max_lora_rank={needs.max_lora_rank}: the adapters have rank {lora_rank}; set "
            "it to the next of 16, "
            "32, 64, 128, ..."
        )
    if needs.own_server and base_url is not None:
        raise ConfigError(
            f"generation.base_url={base_url}: weight_sync={name} starts the server again and again, and this one is "
            "not the run's own; "
            "set generation.base_url=null, or use another weight_sync"
        )


def check_in_flight(name: str, needs: SyncRequirements, in_flight: str | None) -> None:
    """Raise ConfigError if the strategy `name` does something else than `in_flight` to requests that run; None: none
    run during a push.
    """
    if in_flight is None or in_flight in needs.in_flight:
        return
    if needs.in_flight:
        can = needs.in_flight[0]
        what = f"weight_sync={name} does {can} (weight_sync.pause_mode, which follows this key)"
        fix = f"{what}; use rollouts.in_flight={can}"
    else:
        fix = (
            f"weight_sync={name} sends no weights while requests run; use reload, ipc, nccl, or with LoRA lora_hotswap"
        )
    raise ConfigError(f"rollouts.in_flight={in_flight}: {fix}")
