"""What a deployment asks of its strategy, what strategies refuse, and how a server is paused; with a server that only
writes down what it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from engines import deploy, full_weights, make_client
from factories import make_policy, make_qwen2, strategy
from peft import LoraConfig, get_peft_model
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import EngineError
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.weight_sync import lora
from offline_grpo.weight_sync.lora import LoraHotswap
from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.snapshot import Snapshot


@pytest.fixture
def policy() -> Policy:
    model = make_qwen2(vocab_size=100)
    model.config._name_or_path = model.name_or_path = "base/model"
    return make_policy(model, build_char_tokenizer(64))


def with_adapters(rank: int, **others: Any) -> Policy:
    model: Any = make_qwen2(vocab_size=100)
    adapted = get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj"], **others))
    return make_policy(adapted, build_char_tokenizer(64))


def worker_result(request: Request) -> Reply:
    """Of a worker with our extension, which holds nothing that could be compared."""
    is_state = request.method == "POST" and request.body is not None and request.body.get("method") == "grpo_state"
    return Reply({"results": [{"dtype": "float32", "fingerprints": {}} if is_state else None]})


@pytest.fixture
def web() -> Iterator[ScriptedServer]:
    def script(request: Request) -> Reply:
        return Reply({"version": "0.32.0"}) if request.path == "/version" else worker_result(request)

    with ScriptedServer(script) as server:
        yield server


@pytest.fixture
def client(web: ScriptedServer) -> Iterator[VllmEngine]:
    client = make_client(web.base_url, max_retries=0)
    yield client
    client.stop()


PROOF = Proof(num_equal=2, diff_mean=0.0, diff_abs_mean=0.0, diff_max=0.0)


# Pausing


def test_shared_weights_are_fenced_before_the_server_goes_on(
    web: ScriptedServer, client: VllmEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to a GPU are queued: one that comes after the server's first step would tear a completion."""
    sync = strategy("shared_vllm")
    engine = sync._engine = client
    sync._addresses = {name: p.data_ptr() for name, p in policy.causal_lm.named_parameters()}
    policy.compute_device = torch.device("cuda", 1)
    policy.make_masters()
    fenced: list[Any] = []
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: fenced.append((device, [r.path for r in web.requests]))
    )
    with sync.staged(Snapshot(policy, full_weights, engine), 3) as staged:
        sync.deliver([engine], staged)
    assert fenced == [(policy.compute_device, ["/pause"])]
    assert [request.path for request in web.requests[1:]] == ["/collective_rpc", "/resume"]


def test_a_server_stays_paused_after_an_error(web: ScriptedServer, client: VllmEngine) -> None:
    """It would serve half-written weights."""
    web.script = lambda request: Reply({}, status=500 if request.path == "/collective_rpc" else 200)
    with pytest.raises(EngineError):
        client.load_weights("/some/folder", tag="4", pause_mode="keep")
    assert [request.path for request in web.requests] == ["/pause", "/collective_rpc"]
    assert client.is_paused


def test_adapters_get_new_names_and_old_ones_go(
    client: VllmEngine, web: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter of requests in flight keeps its files; the one before it does not. Both keep their names."""
    monkeypatch.setattr(lora, "KEPT_FOLDERS", 2)
    monkeypatch.setattr(LoraHotswap, "verify", lambda *_: [PROOF])
    deployment = deploy(strategy("lora_hotswap"), client)
    policy = with_adapters(8)
    deployment.connect(policy)
    policy.make_masters()
    names: list[str] = []
    for version in range(4):
        deployment.push(policy, version=version)
        names.append(client.weights.name)
    bodies: list[tuple[str, Mapping[str, Any]]] = [(r.path, r.body) for r in web.requests if "lora" in r.path]
    loaded = [body["lora_name"] for path, body in bodies if path == "/v1/load_lora_adapter"]
    assert loaded == names
    assert len(set(names)) == 4
    assert [body["lora_name"] for path, body in bodies if path == "/v1/unload_lora_adapter"] == names[:2]
    assert not any("load_inplace" in body for _, body in bodies)
    assert sorted(path.name for path in client.scratch.iterdir()) == sorted(names[2:])
    assert [path for path, _ in bodies[:4]] == ["/v1/load_lora_adapter"] * 3 + ["/v1/unload_lora_adapter"]
    deployment.close()
    assert [request.body for request in web.requests[-2:]] == [{"lora_name": name} for name in names[2:]]


@pytest.mark.parametrize("others", [{}, {"target_parameters": ["down_proj.weight"]}])
def test_a_refused_adapter_of_experts_comes_with_the_fix(
    others: dict[str, Any], client: VllmEngine, web: ScriptedServer
) -> None:
    """peft adapts experts as parameters, and vLLM 0.25 says no word about why it does not take them."""
    deployment = deploy(strategy("lora_hotswap"), client)
    policy = with_adapters(8, **others)
    deployment.connect(policy)
    policy.make_masters()
    web.script = lambda request: Reply({}, status=500 if "lora" in request.path else 200)
    with pytest.raises(EngineError) as refused:
        deployment.push(policy, version=0)
    fix = "to adapt no experts, use model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
    assert str(refused.value).endswith(fix) is bool(others)
