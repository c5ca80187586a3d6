"""When the strategies push, what they refuse, and how a server is paused; with a server that only writes down what it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import compose_config, make_policy, make_qwen2
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.engine.server import Server
from offline_grpo.engine.vllm_control import VllmControl
from offline_grpo.errors import ConfigError, EngineDied, EngineError
from offline_grpo.generation.sglang_client import SglangClient
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.interfaces import WeightSync
from offline_grpo.model.char_tokenizer import build_char_tokenizer
from offline_grpo.model.policy import Policy
from offline_grpo.run.build import build
from offline_grpo.run.config import as_plain
from offline_grpo.weight_sync import lora_hotswap, server_sync
from offline_grpo.weight_sync.proof import Proof
from offline_grpo.weight_sync.server_sync import Moved, ServerSync

FULL = ["reload", "restart", "shared_vllm", "ipc", "nccl"]
LORA = ["lora_hotswap", "lora_restart"]


def strategy(option: str, *overrides: str) -> Any:
    node = as_plain(OmegaConf.select(compose_config(f"weight_sync={option}", *overrides), "weight_sync"))
    return build(node, key="weight_sync", protocol=WeightSync)


@pytest.fixture
def policy() -> Policy:
    model = make_qwen2(vocab_size=100)
    model.config._name_or_path = model.name_or_path = "base/model"
    return make_policy(model, build_char_tokenizer(64))


def with_adapters(rank: int) -> Policy:
    model: Any = make_qwen2(vocab_size=100)
    return make_policy(get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj"])), build_char_tokenizer(64))


@pytest.fixture
def web() -> Iterator[ScriptedServer]:
    def script(request: Request) -> Reply:
        return Reply({"version": "0.32.0"} if request.path == "/version" else {"results": [None]})

    with ScriptedServer(script) as server:
        yield server


@pytest.fixture
def client(web: ScriptedServer, tmp_path: Path) -> Iterator[VllmClient]:
    server = Server(base_url=web.base_url, api_key=None, launcher=None, log_dir=tmp_path)
    client = VllmClient(server=server, eos_ids=[2], batch_size=4, timeout_s=5, max_retries=0)
    yield client
    client.close()
    server.stop()


# When


@dataclass(kw_only=True)
class Recorder(ServerSync):
    """Notes what was delivered, and what was done to the server."""

    events: list[Any] = field(default_factory=list)

    def attach(self, policy: Policy) -> None:
        self.events.append("attach")

    def deliver(self, policy: Policy, version: int) -> Moved:
        self.events.append(version)
        return Moved(num_tensors=2, num_bytes=8, paused_seconds=0.0)

    def prove(self, policy: Policy, version: int) -> Proof:
        self.events.append(f"prove {version}")
        return Proof(num_equal=2, num_compared=2, diff_mean=0.0, diff_abs_mean=0.0, diff_max=0.0)


def recorder(**changes: Any) -> Recorder:
    return Recorder(**{"interval": 1, "tolerance_nats": 0.1, "server_args": {}, **changes})


@pytest.mark.parametrize(
    ("interval", "forced", "expected"),
    [
        (1, "nnnn", [1, 2, 3, 4]),
        (2, "nnnn", [2, 4]),
        (3, "nnnnnnn", [3, 6]),
        (3, "nnfnnn", [3, 6]),
        (3, "nfnnnf", [2, 5, 6]),
        (3, "fnnfnn", [1, 4]),
        (9, "nnff", [3, 4]),
    ],
)
def test_interval_and_force(interval: int, forced: str, expected: list[int], policy: Policy, client: VllmClient) -> None:
    """Every N-th opportunity since the last push, and each that is forced (f). What is not pushed leaves the older version."""
    sync = recorder(interval=interval)
    sync.connect(policy, client)
    newest = 0
    for version, letter in enumerate(forced, start=1):
        report = sync.push(policy, version=version, force=letter == "f")
        newest = version if version in expected else newest
        assert report.version == client.version == newest
        assert (report.num_tensors, report.alignment == {}) == ((2, False) if newest == version else (0, True))
    assert sync.events == ["attach", *(event for version in expected for event in (version, f"prove {version}"))]


def test_what_was_pushed_last_is_what_must_be_served(policy: Policy, client: VllmClient, web: ScriptedServer) -> None:
    sync = recorder(interval=2)
    sync.connect(policy, client)
    sync.push(policy, version=3)
    sync.push(policy, version=4, force=False)
    noted: list[str | None] = [server_sync.stamp(3)]
    web.script = lambda _: Reply({"results": noted})
    sync.check_served()
    assert web.requests[-1].body["method"] == "grpo_stamp"
    noted[0] = None
    with pytest.raises(EngineDied, match=rf"^{web.base_url}: the server was started anew and has none of the weights pushed to it\.$"):
        sync.check_served()
    for other in (server_sync.stamp(4), "3 of run 1-abc"):
        noted[0] = other
        with pytest.raises(EngineError, match=rf"the server has version {other}, where 3 of run .* was pushed: something else") as error:
            sync.check_served()
        assert not isinstance(error.value, EngineDied)


def test_pushes_are_forced_unless_told_otherwise(policy: Policy, client: VllmClient) -> None:
    sync = recorder(interval=5)
    sync.connect(policy, client)
    assert sync.push(policy, version=1).version == 1


def test_a_report_of_a_push(policy: Policy, client: VllmClient) -> None:
    sync = recorder()
    sync.connect(policy, client)
    metrics = sync.push(policy, version=3).metrics()
    assert {name: metrics[f"sync/{name}"] for name in ("version", "num_tensors", "num_bytes", "num_tensors_proven")} == {
        "version": 3,
        "num_tensors": 2,
        "num_bytes": 8,
        "num_tensors_proven": 2,
    }
    assert metrics["time/sync_push_s"] >= 0


def test_recovery_starts_the_server_and_pushes(policy: Policy, client: VllmClient, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = recorder(interval=4)
    sync.connect(policy, client)
    control = sync.control
    control.is_paused = True  # it died in the middle of a push
    sync.events.clear()
    monkeypatch.setattr(client.server, "stop", lambda: sync.events.append("stop"))
    monkeypatch.setattr(client.server, "start", lambda model, options: sync.events.append(("start", model, options)))
    sync.recover(policy, version=6)
    tokenizer = policy.tokenizer.name_or_path
    assert sync.events == ["stop", ("start", tokenizer, {}), "attach", 6, "prove 6"]
    assert client.version == 6
    assert not sync.control.is_paused


def test_closing_before_connecting() -> None:
    recorder().close()


# What is refused


class Foreign:
    """A client with weights of its own."""

    version = 0


@pytest.mark.parametrize("option", [*FULL, *LORA])
def test_a_client_of_something_else(option: str, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = with_adapters(8) if option in LORA else policy
    monkeypatch.setattr(Server, "start", lambda *_, **__: pytest.fail("a server was started"))
    servers = "vLLM or SGLang" if option in ("reload", "restart") else "vLLM"
    with pytest.raises(ConfigError, match=rf"^weight_sync={option}: moves weights to a {servers} server; use another generation, or "):
        strategy(option).connect(policy, Foreign())


@pytest.mark.parametrize("option", FULL)
def test_adapters_where_all_weights_are_moved(option: str, client: VllmClient, web: ScriptedServer) -> None:
    if option in ("reload", "restart", "ipc", "nccl", "shared_vllm"):
        with pytest.raises(ConfigError, match=rf"^weight_sync={option}: moves all weights, .* use weight_sync=lora_hotswap$"):
            strategy(option).connect(with_adapters(8), client)
    assert web.requests == []


@pytest.mark.parametrize("option", LORA)
def test_no_adapters_where_they_are_moved(option: str, policy: Policy, client: VllmClient, web: ScriptedServer) -> None:
    with pytest.raises(ConfigError, match=rf"^weight_sync={option}: moves LoRA adapters and the policy has none; add model/lora=default"):
        strategy(option).connect(policy, client)
    assert web.requests == []


@pytest.mark.parametrize(("rank", "room", "is_refused"), [(16, 16, False), (17, 16, True), (64, 32, True), (64, 64, False)])
def test_room_for_adapters(rank: int, room: int, is_refused: bool, client: VllmClient) -> None:
    sync = strategy("lora_hotswap", f"weight_sync.server_args.max_lora_rank={room}")
    if is_refused:
        with pytest.raises(ConfigError, match=rf"^weight_sync\.server_args\.max_lora_rank={room}: the adapters have rank {rank}; "):
            sync.connect(with_adapters(rank), client)
    else:
        sync.connect(with_adapters(rank), client)


def test_room_that_nobody_set_is_what_vllm_has() -> None:
    lora_hotswap.check_rank(16, {})
    with pytest.raises(ConfigError, match="max_lora_rank=16"):
        lora_hotswap.check_rank(17, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("interval=0", r"^weight_sync\.interval=0: must be at least 1"),
        ("tolerance_nats=0", r"^weight_sync\.tolerance_nats=0: must be above 0"),
    ],
)
@pytest.mark.parametrize("option", [*FULL, *LORA])
def test_settings_that_cannot_be(option: str, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy(option, f"weight_sync.{change}")


@pytest.mark.parametrize("option", ["reload", "shared_vllm", "ipc", "nccl"])
def test_modes_that_are_none(option: str) -> None:
    with pytest.raises(ConfigError, match=r"^weight_sync\.pause_mode=sleep: must be one of keep, wait, abort"):
        strategy(option, "weight_sync.pause_mode=sleep")


def test_settings_of_one_strategy() -> None:
    with pytest.raises(ConfigError, match=r"^weight_sync\.interval=2: shared weights are always the newest; set it to 1"):
        strategy("shared_vllm", "weight_sync.interval=2")
    with pytest.raises(ConfigError, match=r"^weight_sync\.location=tape: must be one of memory, disk"):
        strategy("reload", "weight_sync.location=tape")


@pytest.mark.parametrize("version", ["0.24.1", "0.33.0", "1.0.0", "dev"])
def test_another_vllm(version: str, web: ScriptedServer, client: VllmClient, policy: Policy) -> None:
    web.script = lambda request: Reply({"version": version} if request.path == "/version" else {})
    for key in ("generation.base_url", "eval.base_url"):
        client.server.key = key
        with pytest.raises(ConfigError, match=rf"vLLM {version} answers there, and versions 0\.25 to 0\.32 are supported; see {key}$"):
            recorder().connect(policy, client)


@pytest.mark.parametrize("version", ["0.25.0", "0.32.0+cpu", "0.30.1rc1.dev3"])
def test_supported_vllm(version: str, web: ScriptedServer, client: VllmClient, policy: Policy) -> None:
    web.script = lambda request: Reply({"version": version} if request.path == "/version" else {})
    recorder().connect(policy, client)


# Pausing


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_mode(mode: str, web: ScriptedServer, client: VllmClient) -> None:
    control: Any = server_sync.control_of(client)
    assert isinstance(control, VllmControl)
    with control.paused(mode):
        control.pause(mode)  # it is
        assert control.is_paused
    assert not control.is_paused
    assert [(request.path, request.query) for request in web.requests] == [
        ("/pause", {"mode": [mode], "clear_cache": ["true"]}),
        ("/resume", {}),
    ]


def test_shared_weights_are_fenced_before_the_server_goes_on(
    web: ScriptedServer, client: VllmClient, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to a GPU are queued: one that comes after the server's first step would tear a completion."""
    sync = strategy("shared_vllm")
    sync._take(policy, client)
    sync._addresses = {name: p.data_ptr() for name, p in policy.causal_lm.named_parameters()}
    policy.compute_device = torch.device("cuda", 1)
    fenced: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fenced.append((device, [r.path for r in web.requests])))
    sync.deliver(policy, 3)
    assert fenced == [(policy.compute_device, ["/pause"])]
    assert [request.path for request in web.requests] == ["/pause", "/reset_prefix_cache", "/collective_rpc", "/resume"]


def test_a_server_stays_paused_after_an_error(web: ScriptedServer, client: VllmClient) -> None:
    """It would serve half-written weights."""
    control: Any = server_sync.control_of(client)
    with pytest.raises(ZeroDivisionError), control.paused("keep"):
        raise ZeroDivisionError
    assert [request.path for request in web.requests] == ["/pause"]
    assert control.is_paused


def test_weights_are_loaded_in_a_pause(web: ScriptedServer, client: VllmClient) -> None:
    control: Any = server_sync.control_of(client)
    control.load_weights("/some/folder", version=4, pause_mode="wait")
    assert [request.path for request in web.requests] == [
        *("/pause", "/collective_rpc", "/reset_prefix_cache", "/collective_rpc", "/resume"),
    ]
    assert web.requests[0].query["mode"] == ["wait"]
    assert [request.body["method"] for request in web.requests if request.body and "method" in request.body] == [
        "reload_weights",
        "grpo_set_stamp",
    ]


def test_a_failed_call_asks_whether_the_server_died(web: ScriptedServer, client: VllmClient, monkeypatch: pytest.MonkeyPatch) -> None:
    control: Any = server_sync.control_of(client)
    web.script = lambda _: Reply({"error": "no"}, status=500)
    with pytest.raises(EngineError, match="status 500: no") as error:
        control.set_version(1)
    assert not isinstance(error.value, EngineDied)

    def check_alive(*, grace_s: float = 0.0) -> None:
        assert grace_s > 0
        raise EngineDied("the server has ended (signal 9)")

    monkeypatch.setattr(client.server, "check_alive", check_alive)
    with pytest.raises(EngineDied):
        control.set_version(1)


def test_adapters_get_new_names_and_old_ones_go(client: VllmClient, web: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter of requests in flight keeps its files; the one before it does not."""
    proof = Proof(num_equal=0, num_compared=0, diff_mean=0.0, diff_abs_mean=0.0, diff_max=0.0)
    monkeypatch.setattr(lora_hotswap, "prove", lambda *_, **__: proof)
    sync = strategy("lora_hotswap")
    policy = with_adapters(8)
    sync.connect(policy, client)
    policy.make_masters()
    names: list[str] = []
    for version in range(4):
        sync.push(policy, version=version)
        names.append(client.model_name)
    bodies: list[tuple[str, Mapping[str, Any]]] = [(r.path, r.body) for r in web.requests if "lora" in r.path]
    loaded = [body["lora_name"] for path, body in bodies if path == "/v1/load_lora_adapter"]
    assert loaded == names
    assert len(set(names)) == 4
    assert [body["lora_name"] for path, body in bodies if path == "/v1/unload_lora_adapter"] == names[:3]
    assert not any("load_inplace" in body for _, body in bodies)
    assert sorted(path.name for path in client.server.scratch.iterdir()) == sorted(names[2:])
    assert [path for path, _ in bodies[:3]] == ["/v1/load_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    sync.close()
    assert web.requests[-1].body == {"lora_name": names[3]}  # its folder goes, and a server that was found stays


def test_sglang_needs_a_strategy_that_knows_it(tmp_path: Path, policy: Policy) -> None:
    server = Server(base_url="http://127.0.0.1:1", api_key=None, launcher=None, log_dir=tmp_path)
    client = SglangClient(server=server, eos_ids=[2], batch_size=4, timeout_s=5, max_retries=0)
    with pytest.raises(ConfigError, match="moves weights to a vLLM server"):
        recorder().connect(policy, client)
