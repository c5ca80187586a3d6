"""Composites on a real server, with their towers: their text is pushed by every strategy, and proven tensor by tensor;
what follows pictures, too, has the trainer's logprobs. On a GPU by those, too, that a CPU does not have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from architectures import SERVED, load_composite, save_served
from cameras import picture
from engines import (
    CPU,
    GPU,
    IPC_ARGS,
    IPC_ENV,
    LORA_ARGS,
    Where,
    deploy,
    distance,
    make_client,
    make_server,
    preloaded_python,
    running,
    sample,
    train,
)
from factories import strategy
from transformers import AutoConfig

from offline_grpo.model.layouts import Padded
from offline_grpo.model.pictures import vision_of
from offline_grpo.types import SamplingParams, SamplingRequest
from offline_grpo.weight_sync.proof import probe_difference, sample_probe, scored

pytestmark = pytest.mark.slow  # a start of a server each

OPTIONS: Any = [
    pytest.param(CPU, ("lora_hotswap", "shared_vllm", "reload"), LORA_ARGS, {}, id="cpu"),
    pytest.param(GPU, ("shared_vllm", "ipc", "reload"), IPC_ARGS, IPC_ENV, id="gpu", marks=pytest.mark.gpu),
    pytest.param(GPU, ("lora_hotswap",), LORA_ARGS, {}, id="gpu-lora", marks=pytest.mark.gpu),
]
"""A server's strategies, one after the other; what it needs for them."""


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("place", "options", "args", "env"), OPTIONS)
def test_every_strategy_serves_what_was_trained(
    name: str,
    place: Where,
    options: tuple[str, ...],
    args: dict[str, Any],
    env: dict[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    subtests: pytest.Subtests,
) -> None:
    folder = save_served(name, tmp_path / "model", place.dtype)
    changes = {"python": preloaded_python(tmp_path)} if place is CPU else {}
    settings = {"args": {**args, "max_model_len": 256, "enforce_eager": True}, "env": env, **changes}
    how = {"device": place.device, "precision": "fp32" if place is CPU else "bf16", "layout": Padded()}
    vision = vision_of(str(folder), AutoConfig.from_pretrained(folder))
    assert vision is not None
    requests = []
    for number, sizes in enumerate([(), ((24, 16),), ((16, 40), (24, 16)), ((16, 16),) * 3]):
        pictures = tuple(picture(number + i, *size) for i, size in enumerate(sizes))
        ids, unexpanded = map(tuple, vision.encode("7" + f" {vision.placeholder} and" * len(sizes), pictures))
        requests.append(SamplingRequest(ids, 1, number, pictures=pictures, unexpanded_ids=unexpanded))
    with running(make_server(place, tmp_path, **settings), folder) as server:
        for seed, option in enumerate(options):
            with subtests.test(option), caplog.at_level("INFO"):
                client = make_client(server)
                sync = strategy(option, f"weight_sync.tolerance_nats={place.tolerance_nats}")
                is_lora = option == "lora_hotswap"
                adapters = ["all-linear"] if is_lora else None
                policy = load_composite(folder, lora=adapters, shares_weights=sync.requires.shares_weights, **how)
                policy.scoring.vision, client.banned_ids = vision, vision.stand_ins
                deployment = deploy(sync, client)
                deployment.connect(policy)
                policy.make_masters()
                before = sample(client)
                train(policy, seed=seed)
                deployment.push(policy, version=1)
                after = distance(policy, sample(client))
                print(f"{name}, {option}: {distance(policy, before):.2g} nats before the push, {after:.2g} after it")
                assert after < min(place.tolerance_nats, distance(policy, before) / 3)
                seen = sample_probe(client, requests, SamplingParams(1))
                apart = [probe_difference(scored(policy, [rollout])).abs().mean().item() for rollout in seen]
                other = replace(seen[1], pictures=((picture(9, 24, 16),),))
                unlike = probe_difference(scored(policy, [other])).abs().mean().item()
                print(f"after 0 to 3 pictures: {max(apart):.2g} nats, and {unlike:.2g} after another picture")
                assert max(apart) < min(place.tolerance_nats, unlike)  # of single tokens, which bf16 sees less well
                assert unlike > place.tolerance_nats or place is GPU
                deployment.close()
                num = len(policy.trained_parameters())
                expected = f"{num} of {num} tensors equal bit for bit"
                assert ("base model" if is_lora else expected) in caplog.text
                caplog.clear()
