"""Episodes of three turns beside a real vLLM server: what it has computed before, and pushes between turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import worlds
from dialogues import problem_of
from engines import CPU, distance, load, metric, train

from offline_grpo.engine.server import Server
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.generation.sample import sample_in_order
from offline_grpo.model.load import load_tokenizer
from offline_grpo.model.policy import Policy
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.types import Completion, FinishReason, Rollout, SamplingParams, Turn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("where", [pytest.param(CPU, id="cpu")], indirect=True, scope="session"),
]

LONG = "1+2=3, " * 60  # several blocks of a cache, which it keeps whole
STOP = tuple("aeiou .,0123456789")


def talk(between: Callable[[int], Any]) -> Callable[..., float]:
    """An agent of three turns."""

    def act(row: Any, url: str, key: str) -> float:
        messages = [{"role": "user", "content": LONG}]
        for turn in range(3):
            answer = httpx.post(f"{url}/chat/completions", json={"messages": messages}, timeout=120).raise_for_status()
            message = answer.json()["choices"][0]["message"]
            messages += [message, {"role": "user", "content": "2+2="}]
            between(turn)
        return 0.0

    return act


def played(client: VllmEngine, folder: Path, count: int = 1) -> list[Rollout]:
    task = worlds.agent(max_environment_tokens=1000)
    codec = TokenizerCodec(load_tokenizer(str(folder)), [2])
    sampling = SamplingParams(max_new_tokens=1000, stop=STOP)
    draws = [(problem_of(task), seed) for seed in range(count)]
    groups = sample_in_order(client, task, codec, draws, sampling, group_size=2 if count > 1 else 1)
    return [rollout for group in groups for rollout in group.rollouts]


def apart(policy: Policy, rollout: Rollout, turns: tuple[Turn, ...]) -> float:
    """Mean |policy - server| over the tokens of these turns, in nats."""
    ids = rollout.token_ids
    completions = [
        Completion(ids[t.start : t.end], rollout.logprobs[t.start : t.end], FinishReason.STOP, (0,) * (t.end - t.start))
        for t in turns
    ]
    return distance(policy, completions, [ids[: t.start] for t in turns])


def test_later_turns_find_the_earlier_ones_in_the_cache(
    full_server: Server, connect: Callable[..., Any], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[float] = []

    def count_hits(turn: int) -> None:
        hits.append(metric(full_server, "prefix_cache_hits_total"))

    sync, policy, client = connect("shared_vllm")
    sync.push(policy, version=0)
    monkeypatch.setattr(worlds, "act", talk(count_hits))
    count_hits(-1)
    [rollout] = played(client, model_folder)
    before, *after = hits
    assert len(rollout.turns) == 3
    assert before == after[0] < after[1] < after[2]
    assert apart(policy, rollout, rollout.turns) < CPU.tolerance_nats
    monkeypatch.setattr(worlds, "act", talk(lambda turn: None))
    for rollout in played(client, model_folder, count=2):
        assert apart(policy, rollout, rollout.turns) < CPU.tolerance_nats


def test_each_token_has_the_version_that_drew_it(
    connect: Callable[..., Any], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push between two turns: the later ones are of the new weights, also what these make of the tokens before."""
    sync, policy, client = connect("reload")
    sync.push(policy, version=0)
    old = load(model_folder, CPU)
    train(policy, seed=1)
    monkeypatch.setattr(worlds, "act", talk(lambda turn: sync.push(policy, version=1) if turn == 0 else None))
    [rollout] = played(client, model_folder)
    first, *others = rollout.turns
    versions = [set(rollout.versions[turn.start : turn.end]) for turn in rollout.turns]
    assert versions == [{0}, {1}, {1}]
    assert apart(old, rollout, (first,)) < CPU.tolerance_nats
    assert apart(policy, rollout, tuple(others)) < CPU.tolerance_nats < apart(old, rollout, tuple(others))
