"""What a probe asks for, and what it compares the server's logprobs with, which is worked out again here in numpy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CPU, full_weights, load, save_model
from factories import make_policy, make_qwen2

from offline_grpo.errors import EngineError
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import Completion, FinishReason, SamplingParams, SamplingRequest
from offline_grpo.weight_sync.proof import (
    PROBE_TOKENS,
    Probe,
    Probed,
    has_followed,
    probe_difference,
    probe_requests,
    prove_base,
    sample_probe,
    scored,
)
from offline_grpo.weight_sync.proof import (
    prove as verified,
)
from offline_grpo.weight_sync.snapshot import Snapshot

SAMPLED = (9, 30, 9, 2)


class Answering:
    """A server that returns logprobs of `temperature`, or of the requests' where that is None."""

    def __init__(self, policy: Policy, temperature: float | None = None) -> None:
        self.policy, self.temperature = policy, temperature
        self.asked: list[SamplingParams] = []

    def generate_now(self, requests: Sequence[SamplingRequest], sampling: SamplingParams) -> list[list[Completion]]:
        self.asked.append(sampling)
        return [[self._complete(request.prompt_ids, self.temperature or sampling.temperature)] for request in requests]

    @torch.no_grad()
    def _complete(self, prompt: tuple[int, ...], temperature: float) -> Completion:
        z = self.policy.causal_lm(torch.tensor([[*prompt, *SAMPLED]])).logits[0].double().numpy() / temperature
        rows = z[len(prompt) - 1 : -1]
        logprobs = [
            row[token] - torch.tensor(row).logsumexp(0).item() for row, token in zip(rows, SAMPLED, strict=True)
        ]
        return Completion(SAMPLED, tuple(logprobs), FinishReason.LENGTH, (0,) * 4)


class Untagged:
    """A server that nobody has tagged, of a kind that tells no bits."""

    url_key, base_url = "generation.base_url", "http://127.0.0.1:1"

    def served_tag(self) -> None:
        return None

    def set_tag(self, tag: str) -> None:
        self.tag = tag

    def served_bits(self) -> None:
        return None


def test_runs_with_one_base_say_the_same_of_it(tmp_path: Path) -> None:
    """Two that begin at the same time both tag the server; neither may take the other's tag for a foreign one."""
    engine: Any = Untagged()

    def tag_of(policy: Policy) -> str:
        assert prove_base(engine, Snapshot(policy, full_weights, host=None)) == engine.tag
        return engine.tag

    policy = load(save_model(tmp_path), CPU, lora=True)
    first = tag_of(policy)
    parameters = dict(policy.causal_lm.named_parameters())
    with torch.no_grad():
        next(p for name, p in parameters.items() if "lora_A" in name).normal_()
        assert tag_of(policy) == first
        next(iter(parameters.values()))[0, 0] += 1
    assert tag_of(policy) != first


@pytest.mark.parametrize(("temperature", "asked"), [(1.0, 1.0), (0.7, 0.7), (0.0, 1.0)])
def test_a_probe_compares_at_the_temperature_of_the_run(temperature: float, asked: float) -> None:
    """Greedy completions have the logprobs of temperature 1."""
    run = SamplingParams(99, temperature=temperature, repetition_penalty=1.1, top_p=0.9)  # of which nothing is recorded
    policy = make_policy(make_qwen2(vocab_size=40), build_char_tokenizer(64))

    def probe(server: Any) -> torch.Tensor:
        return probe_difference(scored(policy, sample_probe(server, probe_requests(policy), run)))

    server = Answering(policy)
    assert probe(server).abs().max() < 1e-5
    assert server.asked == [SamplingParams(PROBE_TOKENS, temperature=asked)]
    assert probe(Answering(policy, temperature=2.0)).abs().mean() > 1e-3


def test_fp8_may_differ_by_what_it_does_to_the_trainer() -> None:
    """The server rounds with one scale for each weight, as vLLM's `fp8` does; by more than the tolerance for bf16."""
    policy = make_policy(make_qwen2(vocab_size=40, initializer_range=0.3), build_char_tokenizer(64))
    served, snapshot = copy.deepcopy(policy.causal_lm), Snapshot(policy, full_weights, host=None)
    for name, parameter in served.named_parameters():
        if "_proj.weight" in name:
            scale = parameter.abs().max() / 448
            parameter.data = (parameter.data / scale).to(torch.float8_e4m3fn).float() * scale

    def prove(quantization: str | None) -> float:
        engine: Any = Answering(make_policy(served, policy.tokenizer))
        about = {"describe": lambda: {"quantization": quantization}, "base_url": "http://a", "url_key": "generation"}
        vars(engine).update(about, sampling=SamplingParams(1))
        [proof] = verified([engine], snapshot, 1, tag=None, tolerance_nats=1e-4, before={})
        return proof.diff_abs_mean

    assert prove("fp8") > 1e-3
    with pytest.raises(EngineError, match=r"above weight_sync.tolerance_nats=0.0001: stale"):
        prove(None)
    for name, parameter in policy.causal_lm.named_parameters():
        if "_proj.weight" in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    with pytest.raises(EngineError, match=r"above weight_sync.tolerance_nats=0.0001 and 2 times FP8's 0\.\d"):
        prove("fp8")


# Old weights told from new ones


class Pushes:
    """Probes of 64 tokens whose logprobs move by `step` nats each push, and reach trainer and server with noise: of
    `noise` nats, and a hundred times as much in one token of fifty. Filters left `num_alone` of them alone.
    """

    def __init__(self, noise: float, step: float, seed: int, *, num_alone: int = 0) -> None:
        self.noise, self.step, self.draw = noise, step, torch.Generator().manual_seed(seed)
        self.num_alone = num_alone
        self.true = -3 * torch.rand(64, generator=self.draw) - 0.5
        self.served = self.true

    def push(self, *, arrives: bool = True) -> Probe:
        self.true = self.true + self.step * torch.randn(64, generator=self.draw)
        self.served = self.true if arrives else self.served
        ours, theirs = (logprobs + self.noisy() for logprobs in (self.true, self.served))
        ours[: self.num_alone] = theirs[: self.num_alone] = 0.0
        tokens = [Probed(*values) for values in zip(range(64), ours.tolist(), theirs.tolist(), strict=True)]
        return [tokens[i : i + 8] for i in range(0, 64, 8)]

    def noisy(self) -> torch.Tensor:
        large = torch.where(torch.rand(64, generator=self.draw) < 0.02, 100.0, 1.0)
        return self.noise * large * torch.randn(64, generator=self.draw)


@pytest.mark.parametrize(("noise", "step"), [(0.01, 0.0), (0.01, 0.003), (0.01, 0.03), (0.01, 0.3), (1e-7, 1e-4)])
def test_a_server_that_follows_is_never_an_alarm(noise: float, step: float) -> None:
    """However small the updates are beside the noise. What is kept is what the last verdict was about."""
    for seed in range(20):
        pushes = Pushes(noise, step, seed)
        before, verdicts = pushes.push(), []
        for _ in range(100):
            now = pushes.push()
            verdicts.append(has_followed(now, before))
            before = now if verdicts[-1] is not None else before
        assert False not in verdicts, (seed, verdicts.index(False))
        assert True in verdicts or step <= noise


@pytest.mark.parametrize(
    ("noise", "step", "at_most"), [(0.01, 0.2, 1), (0.01, 0.02, 20), (1e-7, 0.01, 1), (1e-7, 1e-4, 60)]
)
def test_a_server_that_stays_behind_is_found(noise: float, step: float, at_most: int) -> None:
    """All of it within the tolerance of 0.1 nats, but for the first: small updates add up."""
    for seed in range(20):
        pushes = Pushes(noise, step, seed)
        before = pushes.push()
        verdicts = [has_followed(pushes.push(arrives=False), before) for _ in range(at_most)]
        assert set(verdicts) <= {None, False}
        assert False in verdicts, seed


@pytest.mark.parametrize("arrives", [True, False])
def test_a_token_without_alternatives_says_nothing(arrives: bool) -> None:
    pushes, alone = Pushes(0.001, 0.1, 0, num_alone=40), Pushes(0.001, 0.1, 0, num_alone=64)
    before = pushes.push()
    assert has_followed(pushes.push(arrives=arrives), before) is arrives
    assert has_followed(alone.push(arrives=arrives), alone.push()) is None


def test_other_tokens_are_other_weights() -> None:
    """And of a model that ends its completions at once nothing is known."""
    probe = Pushes(0.01, 0.0, 0).push()
    others = [[token._replace(token=99) for token in tokens] for tokens in probe]
    assert has_followed(others, probe) is True
    assert has_followed([tokens[:1] for tokens in probe], [tokens[:1] for tokens in probe]) is None
