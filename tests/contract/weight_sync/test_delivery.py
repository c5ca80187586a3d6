"""After every push the server serves exactly the policy, whatever the strategy: values, version, caches, each tensor by
itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    CLIENT,
    CPU,
    GPU_FP32,
    LORA_ARGS,
    PROMPTS,
    Where,
    deploy,
    distance,
    full_weights,
    load,
    make_client,
    make_server,
    num_running,
    place_of,
    preloaded_python,
    running,
    sample,
    score,
    switch_of,
    train,
)
from factories import generate, make_policy, strategy
from peft import LoraConfig, get_peft_model
from runs import Endless
from transformers import AutoModelForCausalLM

from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import ConfigError, EngineDied, EngineError
from offline_grpo.model.load import load_tokenizer
from offline_grpo.model.policy import Policy, save_adapter, save_policy
from offline_grpo.types import Completion, SamplingParams
from offline_grpo.weight_sync import lora, reload, snapshot
from offline_grpo.weight_sync.lora import LoraHotswap

FULL = ("reload", "shared_vllm")
NUM_TENSORS = 2 * 13 + 2
"""Two blocks of 4 matrices and biases of attention, 3 of the feed-forward, 2 norms; embeddings, norm."""
STRATEGIES = [*FULL, "lora_hotswap", pytest.param("ipc", marks=pytest.mark.gpu)]


ON_CPU = pytest.mark.parametrize("where", [pytest.param(CPU, id="cpu")], indirect=True, scope="session")
"""What is about the order of requests, and not about what computes them."""


FILTERED = SamplingParams(1, temperature=0.7, top_p=0.9, top_k=20, needs_alternatives=True)
OF_RUNS = pytest.mark.parametrize("sampling", [SamplingParams(1), FILTERED], ids=["whole", "filtered"])
"""How a run draws, and so its probe."""


@OF_RUNS
@pytest.mark.parametrize("option", STRATEGIES)
def test_what_is_served_is_what_was_trained(
    option: str, sampling: SamplingParams, connect: Callable[..., Any], where: Where
) -> None:
    sync, policy, client = connect(option)
    client.sampling = sampling
    for version in range(3):
        if version > 0:
            before = sample(client)
            train(policy, seed=version)
        report = sync.push(policy, version=version)
        completions = sample(
            client
        )  # prompts that the server has seen under older weights: its prefix cache must have been flushed
        assert distance(policy, completions) < where.tolerance_nats
        assert {v for completion in completions for v in completion.versions} == {version} == {report.version}
        assert report.alignment["sync/probe_diff_abs_mean"] < where.tolerance_nats
        if version > 0:
            assert (
                distance(policy, before) > 3 * where.tolerance_nats
            )  # the update was large enough to tell the policies apart


@pytest.mark.slow
@pytest.mark.parametrize("option", ["shared_vllm", pytest.param("ipc", marks=pytest.mark.gpu)])
def test_every_tensor_matters(
    option: str, connect: Callable[..., Any], where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perturb one tensor of the last block, or of none, at a time: the server computes with that very memory, and with
    no copy of it. The proof, which would notice too, is not asked.
    """
    sync, policy, client = connect(option)
    monkeypatch.setattr(sync._strategy, "verify", lambda *_: [])
    names = sorted(name for name in policy.masters.parameters if "layers.0." not in name)
    assert len(names) == 13 + 2
    [before] = sample(client, tokens=2, prompts=PROMPTS[1:2])
    for version, name in enumerate(names):
        train(policy, seed=version, scale=0.1, only=name)
        sync.push(policy, version=version + 1)
        [after] = sample(client, tokens=2, prompts=PROMPTS[1:2])
        assert distance(policy, [after], PROMPTS[1:2]) < where.tolerance_nats, name
        if not name.endswith("k_proj.bias"):  # softmax takes no notice of a term that all keys share
            assert abs(after.logprobs[0] - before.logprobs[0]) > 1e-5, name
        before = after


def test_what_is_not_pushed_is_noticed(connect: Callable[..., Any], where: Where) -> None:
    """The proof can fail: on other bits, on another version, and on a stale prefix cache."""
    sync, policy, _ = connect("reload")
    sync.push(policy, version=1)
    with pytest.raises(EngineError, match=r"\[MISMATCH\].*the server has version 1"):
        sync._strategy.verify(sync.engines, sync._snapshot(policy), 2)
    train(policy, seed=1, only="model.layers.1.mlp.up_proj.weight", scale=1e-3)
    with pytest.raises(
        EngineError, match=r"\[MISMATCH\].*others are not what was pushed: model.layers.1.mlp.up_proj.weight"
    ):
        sync._strategy.verify(sync.engines, sync._snapshot(policy), 1)


@OF_RUNS
def test_a_stale_prefix_cache_is_noticed(
    sampling: SamplingParams, connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, policy, _ = connect("shared_vllm")
    control = sync.engines[0]
    control.sampling = sampling
    sync.push(policy, version=1)
    monkeypatch.setattr(control, "pause", lambda mode: None)  # which flushes the cache
    train(policy, seed=1, scale=0.2)
    with pytest.raises(EngineError, match=r"\[MISMATCH\].*stale weights or caches"):
        sync.push(policy, version=2)


@ON_CPU
@pytest.mark.slow
def test_an_adapter_that_the_server_ignores_is_noticed(where: Where, model_folder: Path, tmp_path: Path) -> None:
    """vLLM takes an adapter for other layers than it adapts, and serves the base model. All is within the tolerance."""
    args = LORA_ARGS | {"lora_target_modules": ["qkv_proj"]}

    def policy_of(*targets: str) -> Policy:
        torch.manual_seed(1)
        model: Any = AutoModelForCausalLM.from_pretrained(str(model_folder))
        model = get_peft_model(model, LoraConfig(r=8, target_modules=list(targets)))
        policy = make_policy(model, load_tokenizer(str(model_folder)))
        policy.make_masters()
        return policy

    with running(make_server(CPU, tmp_path, args=args, python=preloaded_python(tmp_path)), model_folder) as server:
        client, scale = make_client(server), 1e-3
        ways = [
            (["down_proj"], True, SamplingParams(1)),
            (["down_proj"], True, FILTERED),
            (["q_proj"], False, FILTERED),
        ]
        for targets, is_ignored, sampling in ways:
            policy = policy_of(*targets)
            sync = deploy(strategy("lora_hotswap"), client, sampling=sampling)
            sync.connect(policy)
            sync.push(policy, version=0)
            train(policy, seed=1, scale=scale)
            with (
                pytest.raises(EngineError, match="nearer to the weights before the push")
                if is_ignored
                else nullcontext()
            ):
                sync.push(policy, version=1)
        resumed = deploy(strategy("lora_hotswap"), client)
        policy = policy_of("down_proj")
        train(policy, seed=1, scale=scale)
        resumed.connect(policy)
        with pytest.raises(EngineError, match="nearer to the weights of the base model"):
            resumed.push(policy, version=1)


@ON_CPU
def test_raw_logprobs_are_no_use_to_filtered_samples(
    connect: Callable[..., Any], full_server: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, policy, client = connect("reload")
    top_5 = SamplingParams(1, top_k=5)
    deploy(strategy("reload"), client, sampling=top_5).connect(policy)
    describe = VllmEngine.describe
    monkeypatch.setattr(VllmEngine, "describe", lambda self: describe(self) | {"logprobs_mode": "raw_logprobs"})
    deploy(strategy("reload"), client).connect(policy)
    filtered = deploy(strategy("reload"), client, sampling=top_5)
    with pytest.raises(ConfigError, match=r"^logprobs_mode of generation.base_url=raw_logprobs: top_p, top_k"):
        filtered.connect(policy)
    monkeypatch.setattr(VllmEngine, "describe", describe)
    for top_k in (512, 513):
        sampling = SamplingParams(1, top_p=0.9, top_k=top_k, needs_alternatives=True)
        wide = deploy(strategy("reload"), client, sampling=sampling)
        fix = r"^max_logprobs of generation.base_url=832: training with generation.top_k=513 asks for 833"
        with pytest.raises(ConfigError, match=fix) if top_k == 513 else nullcontext():
            wide.connect(policy)


def test_shared_weights_are_one_copy(connect: Callable[..., Any], where: Where) -> None:
    """The trainer's tensors lie inside the server's fused ones, and a write by one is there for the other."""
    _, policy, _ = connect("shared_vllm")
    parameters = dict(policy.causal_lm.named_parameters())
    attention = "model.layers.0.self_attn."
    q, k, v = (parameters[f"{attention}{name}_proj.weight"] for name in "qkv")
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert k.data_ptr() == q.data_ptr() + q.nbytes
    assert v.data_ptr() == k.data_ptr() + k.nbytes
    assert {p.device.type for p in parameters.values()} == {where.device.type}
    assert {master.dtype for master in policy.masters.parameters.values()} == {torch.float32}
    assert all(master.data_ptr() != parameters[name].data_ptr() for name, master in policy.masters.parameters.items())


def test_trainers_of_adapters_share_the_base_of_their_server(
    connect: Callable[..., Any], model_folder: Path, where: Where, caplog: pytest.LogCaptureFixture
) -> None:
    """What one writes to it the other reads; with it they compute bit for bit what they do with a copy of their own."""
    caplog.set_level(logging.INFO, "offline_grpo")
    first, policy, client = connect("lora_hotswap", "weight_sync.share_base=true")
    _, other, _ = connect("lora_hotswap", "weight_sync.share_base=true")
    assert "of the base are the server's memory" in caplog.messages[-1]
    assert "own" not in caplog.messages[-1]
    parameters = [dict(each.causal_lm.named_parameters()) for each in (policy, other)]
    for own in parameters:
        q, k = (own[f"model.layers.0.self_attn.{name}_proj.base_layer.weight"] for name in "qk")
        assert k.data_ptr() == q.data_ptr() + q.nbytes
        assert {p.device.type for p in own.values()} == {where.device.type}
    ours, theirs = (own["model.layers.1.mlp.up_proj.base_layer.weight"] for own in parameters)
    before = ours.data[0, 0].item()
    ours.data[0, 0] = 7.0
    assert theirs[0, 0] == 7.0
    ours.data[0, 0] = before

    alone = load(model_folder, where, lora=True)
    alone.make_masters()
    for version in (1, 2):
        for each in (policy, alone):
            train(each, seed=version)
        first.push(policy, version=version)
        completions = sample(client)
        assert distance(policy, completions) < where.tolerance_nats
        assert all(map(torch.equal, score(policy, completions), score(alone, completions)))


def test_weights_in_shared_memory_can_be_saved(connect: Callable[..., Any], tmp_path: Path) -> None:
    """Queries, keys and values then lie in one storage, which must not be saved as one tensor, or thrice."""
    sync, policy, _ = connect("shared_vllm")
    train(policy, seed=4)
    sync.push(policy, version=1)
    save_policy(policy, full_weights(policy), tmp_path)
    saved = dict(AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=policy.dtype).named_parameters())
    trained = dict(policy.causal_lm.named_parameters())
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name].cpu()) for name in saved)
    size = sum(p.nbytes for p in trained.values())
    assert size < (tmp_path / "model.safetensors").stat().st_size < size + 20_000


@pytest.mark.slow  # a second server
@pytest.mark.parametrize("option", ["reload", "lora_hotswap", pytest.param("ipc", marks=pytest.mark.gpu)])
def test_one_staging_serves_two_servers(
    option: str, connect: Callable[..., Any], second_server: VllmEngine, where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, policy, client = connect(option, others=[second_server])
    saves: list[Path] = []

    for name, original in (("save_policy", save_policy), ("save_adapter", save_adapter)):

        def save(policy: Policy, weights: Any, folder: Path, original: Callable[..., None] = original) -> None:
            saves.append(folder)
            original(policy, weights, folder)

        monkeypatch.setattr(snapshot, name, save)
    other = sync.engines[1]
    assert other.base_url != client.base_url
    for version in (1, 2):
        train(policy, seed=version)
        report = sync.push(policy, version=version)
        assert len(saves) == (0 if option == "ipc" else version)
        assert report.alignment["sync/probe_diff_abs_mean"] < where.tolerance_nats  # of the server that is further off
        for one in (client, other):
            completions = sample(one)
            assert distance(policy, completions) < where.tolerance_nats
            assert {v for completion in completions for v in completion.versions} == {version}
    sync.check_served()


@pytest.mark.parametrize(
    "where",
    [pytest.param(CPU, id="cpu"), pytest.param(GPU_FP32, id="gpu", marks=pytest.mark.gpu)],
    indirect=True,
    scope="session",
)
@pytest.mark.parametrize(
    ("option", "mode"),
    [
        ("shared_vllm", "keep"),
        pytest.param("shared_vllm", "wait", marks=pytest.mark.slow),
        pytest.param("shared_vllm", "abort", marks=pytest.mark.slow),  # everything is sampled anew
        ("reload", "keep"),
    ],
)
def test_no_completion_is_torn(
    option: str, mode: str, connect: Callable[..., Any], where: Where, model_folder: Path
) -> None:
    """Requests in flight during a push: tokens of the old policy, then of the new one, each computed whole."""
    sync, policy, client = connect(option, f"weight_sync.pause_mode={mode}")
    old = load(model_folder, where)
    completions = sample_during(lambda: push_other_weights(sync, policy), "pause", sync, client, where)
    switches = [
        switch_of(c.logprobs, score(old, [c], [p])[0], score(policy, [c], [p])[0], where)
        for c, p in zip(completions, PROMPTS, strict=True)
    ]
    lengths = [len(c.token_ids) for c in completions]
    if mode == "keep":
        assert all(0 < switch < where.long == length for switch, length in zip(switches, lengths, strict=True))
    elif mode == "wait":
        assert switches == lengths == [where.long] * len(PROMPTS)
    else:  # asked for again
        assert switches == [0] * len(PROMPTS)
        assert lengths == [where.long] * len(PROMPTS)


@ON_CPU
@pytest.mark.slow
def test_kept_caches_are_of_old_weights_for_requests_in_flight_alone(
    connect: Callable[..., Any], where: Where, model_folder: Path
) -> None:
    sync, policy, client = connect("reload", "weight_sync.pause_mode=keep_cache")
    sync.push(policy, version=1)  # whose probe leaves in the cache what the next one must not find
    old = load(model_folder, where)
    completions = sample_during(lambda: push_other_weights(sync, policy), "pause", sync, client, where)
    for completion, prompt in zip(completions, PROMPTS, strict=True):
        theirs = torch.tensor(completion.logprobs)
        from_old, from_new = (
            (theirs - score(one, [completion], [prompt])[0]).abs() < 5 * where.tolerance_nats for one in (old, policy)
        )
        switch = int((~from_old).int().argmax())
        assert 0 < switch < where.long == len(theirs)
        assert not from_new[switch:].all()
    assert distance(policy, sample(client)) < where.tolerance_nats


@pytest.mark.slow
def test_requests_in_flight_finish_on_their_adapter(
    connect: Callable[..., Any], where: Where, model_folder: Path
) -> None:
    sync, policy, client = connect("lora_hotswap")
    sync.push(policy, version=0)
    old = load(model_folder, where, lora=True)
    completions = sample_during(lambda: push_other_weights(sync, policy), "load_adapter", sync, client, where)
    for completion, prompt in zip(completions, PROMPTS, strict=True):
        switch = switch_of(
            completion.logprobs, score(old, [completion], [prompt])[0], score(policy, [completion], [prompt])[0], where
        )
        assert switch == len(completion.token_ids) == where.long
    assert distance(policy, sample(client)) < where.tolerance_nats


@ON_CPU
def test_an_adapter_stays_until_nobody_asks_for_it(
    connect: Callable[..., Any], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has room for two, and reads the first one's files again when its turn comes. To miss them would be its
    end.
    """
    sync, policy, client = connect("lora_hotswap")
    sync.push(policy, version=0)
    old, control = load(model_folder, CPU, lora=True), sync.engines[0]
    monkeypatch.setattr(LoraHotswap, "verify", lambda *_: [])
    monkeypatch.setattr(lora, "KEPT_FOLDERS", 2)
    with ThreadPoolExecutor(1) as thread:
        control.pause("keep")
        waiting = thread.submit(sample, client)
        while client.num_asked[client.weights.name] < len(PROMPTS):
            assert not waiting.done()
        for version in range(1, 5):
            train(policy, seed=version)
            sync.push(policy, version=version)
        control.resume()
        assert distance(old, waiting.result()) < CPU.tolerance_nats
    sync.push(policy, version=5)
    assert len([*client.scratch.glob("policy-*")]) == 2


@ON_CPU
def test_adapters_are_for_one_base(
    connect: Callable[..., Any], model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, policy, client = connect("lora_hotswap")
    assert "[OK] base model: 28 of 28 tensors equal bit for bit" in caplog.text
    second = deploy(strategy("lora_hotswap"), make_client(client))
    second.connect(load(model_folder, CPU, lora=True))
    first.push(policy, version=0)
    first.check_served()

    for sync in (second, deploy(strategy("lora_hotswap"), make_client(client))):
        other = load(model_folder, CPU, lora=True)
        other.causal_lm.get_input_embeddings().weight.data[3] *= 1.5
        with pytest.raises(
            ConfigError, match=r"generation.base_url=.* another base model than the server has: 1 of 28 tensors differ"
        ):
            sync.connect(other)
        sync.close()
    first.check_served()
    first.engines[0].set_tag("")  # what loading leaves; older servers with adapters cannot load
    with pytest.raises(
        EngineError, match="another client has loaded weights into the server: it has another base model under"
    ):
        first.check_served()


@ON_CPU
def test_adapters_come_back_to_a_server_that_was_started_anew(connect: Callable[..., Any]) -> None:
    sync, policy, client = connect("lora_hotswap")
    sync.push(policy, version=0)
    control = sync.engines[0]
    control.unload_adapter(client.weights.name)
    with pytest.raises(EngineDied, match=f"the server has lost the adapter {client.weights.name}"):
        sample(client)
    control.call_workers("grpo_set_tag", tag=None)
    with pytest.raises(EngineDied, match="was started anew"):
        sync.check_served()
    sync.push(policy, version=0, is_recovery=True)
    sync.check_served()
    assert distance(policy, sample(client)) < CPU.tolerance_nats


@ON_CPU
def test_weights_that_others_load_into_shared_memory_end_the_run(
    connect: Callable[..., Any], model_folder: Path
) -> None:
    sync, policy, client = connect("shared_vllm")
    sync.push(policy, version=0)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(model_folder)}, "timeout": 60}
    train(policy, seed=1)
    client.api.post("/collective_rpc", body)
    with pytest.raises(EngineError, match=r"another client has loaded weights into the server: [^\n]*$"):
        sync.push(policy, version=1)


@ON_CPU
def test_memory_that_others_write_to_under_the_right_tag_ends_the_run(connect: Callable[..., Any]) -> None:
    sync, policy, _ = connect("shared_vllm")
    sync.push(policy, version=0)
    train(policy, seed=1)
    name, parameter = next(iter(policy.causal_lm.named_parameters()))
    with torch.no_grad():
        parameter.mul_(0.7)
    with pytest.raises(EngineError, match=f"wrote to 1 tensors of the policy, {name}"):
        sync.push(policy, version=1)


@ON_CPU
def test_a_push_notices_what_others_loaded_while_it_was_staged(
    connect: Callable[..., Any], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It overwrites what requests under way have been sampled from, and with it every trace."""
    sync, policy, client = connect("reload")
    sync.push(policy, version=0)
    train(policy, seed=1)
    save = reload.save_weights

    def save_and_be_late(*args: Any, **options: Any) -> int:
        client.api.post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(model_folder)}, "timeout": 60},
        )
        return save(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(reload, "save_weights", save_and_be_late)
        with pytest.raises(EngineError, match="another client has loaded weights into the server"):
            sync.push(policy, version=1, amid_requests=True)
        assert not client.api.get("/is_paused").json()["is_paused"]
        sync.push(policy, version=1, is_recovery=True)
        sync.push(policy, version=2)  # with all requests at an end, nothing has come of it
    assert sync.push(policy, version=3, amid_requests=True).version == 3
    assert distance(policy, sample(client)) < CPU.tolerance_nats


def push_other_weights(sync: Any, policy: Policy) -> None:
    train(policy, seed=9, scale=0.1)
    sync.push(policy, version=1)


def sample_during(
    action: Callable[[], None], step: str, sync: Any, client: VllmEngine, where: Where
) -> list[Completion]:
    """Long completions of `PROMPTS`, under way when the action takes this step: a method of the server's control."""
    asker = Endless(**{**CLIENT, **place_of(client), "eos_ids": [], "batch_size": 8})
    asker.weights = client.weights
    control = sync.engines[0]
    take_step, under_way = getattr(control, step), []

    def amid_requests(*words: Any) -> None:
        for _ in range(10):
            groups = thread.submit(
                generate, asker, PROMPTS, SamplingParams(where.long), group_size=1, seeds=range(len(PROMPTS))
            )
            while not groups.done():
                if num_running(client) == len(PROMPTS):
                    take_step(*words)
                    under_way.append(groups)
                    return
            groups.result()  # a busy machine looked too late: the same again
        raise AssertionError("too fast for a push in the middle, ten times")

    with ThreadPoolExecutor(1) as thread, pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, step, amid_requests)
        action()
        [groups] = under_way
        return [completion for [completion] in groups.result()]
