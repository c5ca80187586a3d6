"""The SGLang engine against a stand-in written from SGLang's source (tests/fakes/fake_sglang.py): what it samples, and
how it is controlled. What all engines do with a server that misbehaves is in test_server_engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import CLIENT
from factories import generate
from fake_sglang import FakeSglang, log_softmax, logits_after
from scripted_server import ScriptedServer

from offline_grpo.engine.sglang import SglangEngine
from offline_grpo.errors import ConfigError
from offline_grpo.types import SamplingParams

PROMPTS = [[1, 3, 5], [1, 9], [4]]
SEEDS = [10, 2**62, 10]
SAMPLING = SamplingParams(max_new_tokens=6)


@pytest.fixture
def fake() -> FakeSglang:
    return FakeSglang()


@pytest.fixture
def web(fake: FakeSglang) -> Iterator[ScriptedServer]:
    with ScriptedServer(fake) as server:
        yield server


@pytest.fixture
def client(web: ScriptedServer) -> Iterator[SglangEngine]:
    client = SglangEngine(**{**CLIENT, "eos_ids": [2, 7], "batch_size": 2}, base_url=web.base_url)
    yield client
    client.close()


def test_completion_j_is_drawn_with_seed_plus_j(client: SglangEngine) -> None:
    groups = generate(client, PROMPTS, SAMPLING, group_size=4, seeds=SEEDS)
    alone = [
        [generate(client, [prompt], SAMPLING, group_size=1, seeds=[seed + j])[0][0] for j in range(4)]
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    assert groups == alone
    assert len({completion.token_ids for completion in groups[0]}) == 4


def test_seeds_stay_within_64_bits(client: SglangEngine, web: ScriptedServer) -> None:
    generate(client, [[5]], SAMPLING, group_size=3, seeds=[2**63 - 2])
    asked = [settings["sampling_seed"] for settings in web.requests[0].body["sampling_params"]]
    assert asked == [2**63 - 2, 2**63 - 1, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.4])
def test_logprobs_are_those_of_the_sampling_distribution(client: SglangEngine, temperature: float) -> None:
    sampling = SamplingParams(max_new_tokens=6, temperature=temperature)
    for prompt, group in zip(PROMPTS, generate(client, PROMPTS, sampling, group_size=3, seeds=SEEDS), strict=True):
        for completion in group:
            for position, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                logits = logits_after([*prompt, *completion.token_ids[:position]])
                assert logprob == pytest.approx(
                    log_softmax([logit / temperature for logit in logits])[token], abs=1e-12
                )


def test_logprobs_have_the_repetition_penalty_in_them(client: SglangEngine) -> None:
    [[completion]] = generate(
        client, [[1, 3]], SamplingParams(max_new_tokens=6, repetition_penalty=1.8), group_size=1, seeds=[3]
    )
    first, second, *_ = completion.token_ids
    logits = logits_after([1, 3, first])
    logits[3] *= 1.8 if logits[3] < 0 else 1 / 1.8
    assert completion.logprobs[0] == pytest.approx(log_softmax(logits_after([1, 3]))[first], abs=1e-12)
    assert completion.logprobs[1] == pytest.approx(log_softmax(logits)[second], abs=1e-12)


# Control


@pytest.mark.parametrize("version", ["0.6.0", "nightly"])
def test_versions_that_are_not(client: SglangEngine, fake: FakeSglang, version: str) -> None:
    fake.version = version
    with pytest.raises(ConfigError, match=rf"SGLang {version} answers there, and .*; see generation.base_url$"):
        client.start("m", {})


def test_a_server_that_ignores_seeds_is_noticed(client: SglangEngine, fake: FakeSglang) -> None:
    assert client.lacks("full") is None
    fake.is_deterministic = False
    assert client.lacks("full") == "ignores the seeds of requests (--enable-deterministic-inference)"


def test_loading_weights_cannot_end_the_server(client: SglangEngine, fake: FakeSglang, web: ScriptedServer) -> None:
    fake.is_dirty = True
    client.load_weights("/some/folder", tag="1", pause_mode="abort")
    assert (fake.is_dead, fake.is_paused, fake.num_aborts) == (False, False, 1)
    assert [request.path for request in web.requests] == [
        *("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"),
    ]
