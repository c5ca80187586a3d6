"""What the server of evaluations is asked with: training's settings, where training has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import compose_config, generate
from scripted_server import Reply, Request, ScriptedServer
from serving_effects import make_policy

from offline_grpo.errors import EngineError
from offline_grpo.generation.sglang_client import SglangClient
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.run import serving
from offline_grpo.run.config import typed
from offline_grpo.run.preflight import make_plan
from offline_grpo.types import SamplingParams
from offline_grpo.weight_sync.lora_hotswap import LoraHotswap
from offline_grpo.weight_sync.main_only import MainOnly
from offline_grpo.weight_sync.reload import Reload

DEAD = "http://127.0.0.1:1"
SERVED = f"generation=vllm_server generation.base_url={DEAD} weight_sync=reload"
TUNED = "generation.timeout_s=7 generation.max_retries=0 weight_sync.tolerance_nats=0.4"


def evaluation(overrides: str, folder: Path, *, num_processes: int = 1, with_adapters: bool = False) -> serving.Sampling:
    plan = make_plan(typed(compose_config(*overrides.split())))
    policy = make_policy(with_adapters=with_adapters)
    ranks: Any = SimpleNamespace(is_main=True, world_size=num_processes, broadcast=lambda value: value)
    training = serving.for_training(plan, policy, folder, ranks)
    return serving.for_evaluation(plan, policy, training, folder, ranks)


@pytest.fixture
def web() -> Iterator[ScriptedServer]:
    def script(request: Request) -> Reply:
        server.hold(request)
        return Reply()

    with ScriptedServer(script) as server:
        yield server


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(("backend", "kind"), [("vllm_server", VllmClient), ("sglang_server", SglangClient)])
def test_the_settings_of_training_are_passed_on(backend: str, kind: type, num_processes: int, tmp_path: Path) -> None:
    chosen = f"{SERVED} {TUNED} weight_sync.location=disk eval.backend={backend} eval.base_url={DEAD}"
    found = evaluation(chosen, tmp_path, num_processes=num_processes)
    client, sync = found.client, found.weight_sync
    if num_processes > 1:
        assert isinstance(sync, MainOnly)
        sync = sync._inner
    assert isinstance(sync, Reload)
    assert (sync.tolerance_nats, sync.location) == (0.4, "disk")
    assert isinstance(client, kind)
    assert isinstance(client, VllmClient | SglangClient)
    assert (client.timeout_s, client.max_retries) == (7, 0)


def test_the_tolerance_of_another_strategy_is_passed_on(tmp_path: Path) -> None:
    chosen = f"generation=vllm_server generation.base_url={DEAD} {TUNED} eval.base_url={DEAD}"  # shared_vllm has no location
    full = evaluation(chosen, tmp_path).weight_sync
    assert isinstance(full, Reload)
    assert (full.tolerance_nats, full.location) == (0.4, "memory")
    lora = evaluation(f"{chosen} weight_sync=lora_hotswap model/lora=default", tmp_path, with_adapters=True).weight_sync
    assert isinstance(lora, LoraHotswap)
    assert lora.tolerance_nats == 0.4


def test_training_in_process_has_none_of_them(tmp_path: Path) -> None:
    found = evaluation(f"eval.backend=vllm_server eval.base_url={DEAD}", tmp_path)
    assert isinstance(found.client, VllmClient)
    assert isinstance(found.weight_sync, Reload)
    assert (found.client.timeout_s, found.client.max_retries) == (600, 5)
    assert (found.weight_sync.tolerance_nats, found.weight_sync.location) == (0.1, "memory")


def test_errors_name_settings_that_act(web: ScriptedServer, tmp_path: Path) -> None:
    client = evaluation(f"{SERVED} {TUNED} eval.base_url={DEAD}", tmp_path).client
    assert isinstance(client, VllmClient)
    with pytest.raises(EngineError, match=rf"^eval\.base_url={DEAD}: no healthy server answers"):
        client.server.start("model")
    client.model_name = "policy"
    message = ask(client)
    assert message.startswith(f"{DEAD}/v1/completions: no connection")
    assert message.endswith("after 1 attempts; is the server running, and eval.base_url its address?")
    client = evaluation(f"{SERVED} {TUNED} generation.timeout_s=0.1 eval.base_url={web.base_url}", tmp_path).client
    assert isinstance(client, VllmClient)
    client.model_name = "policy"
    assert "no answer after 0.1 s; raise generation.timeout_s" in ask(client)


def ask(client: VllmClient) -> str:
    """The error that asking gives."""
    with pytest.raises(EngineError) as raised:
        generate(client, [[1, 4, 9]], SamplingParams(4), group_size=1, seeds=[0])
    client.close()
    return str(raised.value)
