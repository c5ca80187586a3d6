"""`restart` and `reload` with SGLang, against a stand-in written from its source that serves a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CLIENT, deploy
from factories import make_policy, make_qwen2, strategy
from fake_sglang import FakeSglang
from scripted_server import ScriptedServer
from transformers import AutoModelForCausalLM

from offline_grpo.engine.sglang import SglangEngine
from offline_grpo.errors import EngineError
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import ServedWeights
from offline_grpo.weight_sync.snapshot import weights_tag


def load(folder: str) -> Callable[[list[int]], list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def logits(token_ids: list[int]) -> list[float]:
        return model(torch.tensor([token_ids])).logits[0, -1].double().tolist()

    return logits


class OurEngine(SglangEngine):
    """A server of our own, as far as a strategy can tell; its process is the stand-in."""

    def __init__(self, fake: FakeSglang, **settings: Any) -> None:
        super().__init__(**CLIENT, **settings)
        self.fake, self.max_retries, self.is_managed = fake, 0, True

    def start(self, model: str, args: Mapping[str, Any]) -> None:
        assert not args
        self.fake.model = load(model)
        self.fake.weight_version = "default"
        self.fake.loaded.append(model)


@pytest.fixture
def fake() -> FakeSglang:
    return FakeSglang(load=load)


@pytest.fixture
def client(fake: FakeSglang, tmp_path: Path) -> Iterator[SglangEngine]:
    with ScriptedServer(fake) as web:
        client = OurEngine(fake, base_url=web.base_url, log_dir=tmp_path / "run")
        yield client
        client.stop()


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    model = make_qwen2(vocab_size=100, max_position_embeddings=256)
    tokenizer = build_char_tokenizer(64)
    model.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    model.config._name_or_path = model.name_or_path = str(tmp_path / "start")
    return make_policy(model, tokenizer)


def train(policy: Policy, factor: float = 0.5) -> None:
    with torch.no_grad():
        for parameter in policy.make_masters().parameters.values():
            parameter.mul_(factor)
    policy.masters.publish()


@pytest.mark.parametrize(("option", "overrides"), [("restart", ()), ("reload", ("weight_sync.pause_mode=abort",))])
def test_weights_and_version_arrive(
    option: str, overrides: tuple[str, ...], policy: Policy, client: SglangEngine, fake: FakeSglang
) -> None:
    sync = deploy(strategy(option, *overrides), client)
    sync.connect(policy)
    sync.push(policy, version=0)
    train(policy)
    report = sync.push(policy, version=1)
    assert (report.version, client.weights, fake.weight_version) == (1, ServedWeights(1), weights_tag(1))
    assert report.alignment["sync/probe_diff_max"] < 1e-4
    assert report.alignment["sync/num_tensors_proven"] == 0
    assert report.num_bytes > 0
    assert len(fake.loaded) == (2 if option == "restart" else 3)
    sync.close()


@pytest.mark.parametrize(
    ("factor", "why"), [(0.5, "above weight_sync.tolerance"), (0.999, "nearer to the weights before")]
)
def test_stale_weights_are_found(
    factor: float, why: str, policy: Policy, client: SglangEngine, fake: FakeSglang
) -> None:
    """Also those that the tolerance would let pass."""
    sync = deploy(strategy("reload", "weight_sync.pause_mode=abort"), client)
    sync.connect(policy)
    sync.push(policy, version=0)
    stale = fake.model
    fake.load = lambda _: stale
    train(policy, factor)
    with pytest.raises(EngineError, match=rf"MISMATCH.*{why}"):
        sync.push(policy, version=1)


def test_a_push_of_somebody_else_is_found(policy: Policy, client: SglangEngine, fake: FakeSglang) -> None:
    """Of one whose samples are under way: the server then has what it had, and goes on."""
    sync = deploy(strategy("reload", "weight_sync.pause_mode=abort"), client)
    sync.connect(policy)
    sync.push(policy, version=0)
    fake.weight_version = "9 of run somebody"
    loaded = list(fake.loaded)
    with pytest.raises(EngineError, match=r"has version 9 of run somebody, where 0 of run .* was pushed"):
        sync.push(policy, version=1, amid_requests=True)
    assert (fake.loaded, fake.is_paused) == (loaded, False)
    assert sync.push(policy, version=1).version == 1
