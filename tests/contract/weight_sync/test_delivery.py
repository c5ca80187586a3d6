"""After every push the server serves exactly the policy, whatever the strategy: values, version, caches, each tensor by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CPU, GPU_FP32, PROMPTS, Where, distance, found, load, make_client, sample, score, train
from factories import strategy
from torch import Tensor

from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.model.policy import Policy
from offline_grpo.types import Completion, SamplingParams

FULL = ("reload", "shared_vllm")
NUM_TENSORS = 2 * 13 + 2
"""Two blocks of 4 matrices and biases of attention, 3 of the feed-forward, 2 norms; embeddings, norm."""
STRATEGIES = [*FULL, "lora_hotswap", pytest.param("ipc", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("option", STRATEGIES)
def test_what_is_served_is_what_was_trained(option: str, connect: Callable[..., Any], where: Where) -> None:
    sync, policy, client = connect(option)
    for version in range(3):
        if version > 0:
            before = sample(client)
            train(policy, seed=version)
        report = sync.push(policy, version=version)
        completions = sample(client)  # prompts that the server has seen under older weights: its prefix cache must have been flushed
        assert distance(policy, completions) < where.tolerance_nats
        assert {completion.version for completion in completions} == {version} == {report.version}
        assert report.alignment["sync/probe_diff_abs_mean"] < where.tolerance_nats
        if version > 0:
            assert distance(policy, before) > 3 * where.tolerance_nats  # the update was large enough to tell the policies apart


@pytest.mark.parametrize("option", STRATEGIES)
def test_a_second_push_changes_nothing(option: str, connect: Callable[..., Any], where: Where) -> None:
    sync, policy, client = connect(option)
    train(policy, seed=5)
    sync.push(policy, version=1)
    first = sample(client)
    sync.push(policy, version=1)
    assert [c.token_ids for c in sample(client)] == [c.token_ids for c in first]


@pytest.mark.parametrize("option", [*FULL, pytest.param("ipc", marks=pytest.mark.gpu)])
def test_every_tensor_arrives(option: str, connect: Callable[..., Any], where: Where) -> None:
    """Each changed in a way of its own, and each proven."""
    sync, policy, client = connect(option)
    assert len(policy.masters.parameters) == NUM_TENSORS
    train(policy, seed=1, scale=0.1)
    assert sync.push(policy, version=1).alignment["sync/num_tensors_proven"] == NUM_TENSORS
    assert distance(policy, sample(client)) < where.tolerance_nats


@pytest.mark.parametrize("option", ["shared_vllm", pytest.param("ipc", marks=pytest.mark.gpu)])
def test_every_tensor_matters(option: str, connect: Callable[..., Any], where: Where) -> None:
    """Perturb one tensor at a time: the server computes with that very memory, and with no copy of it."""
    sync, policy, client = connect(option)
    names = sorted(policy.masters.parameters)
    assert len(names) == NUM_TENSORS
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
        sync.prove(policy, 2)
    train(policy, seed=1, only="model.layers.1.mlp.up_proj.weight", scale=1e-3)
    with pytest.raises(EngineError, match=r"\[MISMATCH\].*others are not what was pushed: model.layers.1.mlp.up_proj.weight"):
        sync.prove(policy, 1)


def test_a_stale_prefix_cache_is_noticed(connect: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sync, policy, _ = connect("shared_vllm")
    sync.push(policy, version=1)
    monkeypatch.setattr(sync.control, "pause", lambda mode: None)  # it flushes too
    monkeypatch.setattr(sync.control, "reset_prefix_cache", lambda: None)
    train(policy, seed=1, scale=0.2)
    with pytest.raises(EngineError, match=r"\[MISMATCH\].*stale weights or caches"):
        sync.push(policy, version=2)


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


def test_a_server_of_other_weights_is_not_shared(connect: Callable[..., Any], where: Where, model_folder: Path) -> None:
    sync, policy, client = connect("reload")
    train(policy, seed=3, only="model.norm.weight")
    sync.push(policy, version=1)
    fresh = load(model_folder, where, shared=True)
    before = {name: p.data_ptr() for name, p in fresh.causal_lm.named_parameters()}
    with pytest.raises(ConfigError, match=r"1 of 28 parameters cannot be shared: model\.norm\.weight: other values than the trainer's"):
        strategy("shared_vllm").connect(fresh, make_client(found(client.server)))
    assert before == {name: p.data_ptr() for name, p in fresh.causal_lm.named_parameters()}  # refused before the first splice


@pytest.mark.parametrize(
    "where", [pytest.param(CPU, id="cpu"), pytest.param(GPU_FP32, id="gpu", marks=pytest.mark.gpu)], indirect=True, scope="session"
)
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("option", FULL)
def test_no_completion_is_torn(option: str, mode: str, connect: Callable[..., Any], where: Where, model_folder: Path) -> None:
    """Requests in flight during a push: tokens of the old policy, then of the new one, each computed whole."""
    sync, policy, client = connect(option, f"weight_sync.pause_mode={mode}")
    old = load(model_folder, where)
    completions = sample_during(lambda: push_other_weights(sync, policy), client, where)
    switches = [switch_of(c, score(old, [c], [p])[0], score(policy, [c], [p])[0], where) for c, p in zip(completions, PROMPTS, strict=True)]
    lengths = [len(c.token_ids) for c in completions]
    if mode == "keep":
        assert all(0 < switch < where.long == length for switch, length in zip(switches, lengths, strict=True))
    elif mode == "wait":
        assert switches == lengths == [where.long] * len(PROMPTS)
    else:  # asked for again
        assert switches == [0] * len(PROMPTS)
        assert lengths == [where.long] * len(PROMPTS)


def test_requests_in_flight_finish_on_their_adapter(connect: Callable[..., Any], where: Where, model_folder: Path) -> None:
    sync, policy, client = connect("lora_hotswap")
    sync.push(policy, version=0)
    old = load(model_folder, where, lora=True)
    completions = sample_during(lambda: push_other_weights(sync, policy), client, where)
    for completion, prompt in zip(completions, PROMPTS, strict=True):
        switch = switch_of(completion, score(old, [completion], [prompt])[0], score(policy, [completion], [prompt])[0], where)
        assert switch == len(completion.token_ids) == where.long
    assert distance(policy, sample(client)) < where.tolerance_nats


class Endless(VllmClient):
    """Asks for completions that only their length ends."""

    def request(self, prompt: Sequence[int], sampling: SamplingParams, *, group_size: int, seed: int) -> dict[str, Any]:
        return super().request(prompt, sampling, group_size=group_size, seed=seed) | {"ignore_eos": True, "stop_token_ids": []}


def push_other_weights(sync: Any, policy: Policy) -> None:
    train(policy, seed=9, scale=0.1)
    sync.push(policy, version=1)


def sample_during(action: Callable[[], None], client: VllmClient, where: Where) -> list[Completion]:
    """Long completions of `PROMPTS`, and the action while they are under way."""
    asker = Endless(server=client.server, eos_ids=[], batch_size=8, timeout_s=120, max_retries=1)
    asker.model_name = client.model_name
    with ThreadPoolExecutor(1) as thread:
        sampling = SamplingParams(where.long)
        groups = thread.submit(asker.generate, PROMPTS, sampling, group_size=1, seeds=range(len(PROMPTS)))
        while num_running(client) < len(PROMPTS):
            assert not groups.done(), "too fast for a push in the middle"
        action()
        return [completion for [completion] in groups.result()]


def num_running(client: VllmClient) -> float:
    """Requests that the server is working on."""
    lines = client.server.api.get("/metrics").splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


def switch_of(completion: Completion, old: Tensor, new: Tensor, where: Where) -> int:
    """How many tokens have the old policy's logprob, all others having the new one's."""
    theirs = torch.tensor(completion.logprobs)
    is_old, is_new = ((theirs - ours).abs() < 5 * where.tolerance_nats for ours in (old, new))
    fits = [k for k in range(len(theirs) + 1) if is_old[:k].all() and is_new[k:].all()]
    neither = [(i, (theirs - old)[i].item(), (theirs - new)[i].item()) for i in range(len(theirs)) if not is_old[i] and not is_new[i]]
    assert fits, f"tokens of neither policy, or out of order: (position, nats from the old policy, from the new one) {neither[:10]}"
    return fits[-1]
