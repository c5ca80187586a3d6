"""Optimizers, and the one whose state is in the host's memory against the resident one."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
from factories import make_qwen2, make_updater
from torch import nn

from offline_grpo.errors import ConfigError
from offline_grpo.model.masters import MasterWeights
from offline_grpo.train import optimizer as offload
from offline_grpo.train.optimizer import AdamW, AdamW8bit, OffloadedAdamW

SETTINGS = {"lr": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "paged": False}


def test_8_bit_adamw_without_bitsandbytes_says_what_to_do(monkeypatch):
    """It must never fall back to another optimizer in silence."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=r"^train/optimizer=adamw_8bit: "):
        AdamW8bit(**SETTINGS)


FACTORY = AdamW(lr=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-8, offload=False)
SHAPES = {"a": (7, 33), "bias": (5,), "b": (40, 31), "norm": (129,), "scalar": (), "c": (2, 3, 11)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(offload, "CHUNK_ELEMENTS", 384)  # most tensors lie across several, some chunks have several


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for name, shape in SHAPES.items()}


def pair():
    """Masters and optimizer: resident, offloaded."""
    resident, offloaded = MasterWeights(parameters().items()), MasterWeights(parameters().items(), offload=True)
    offloading = OffloadedAdamW(FACTORY.create(offloaded.parameters.values()), offloaded)
    return (resident, FACTORY.create(resident.parameters.values())), (offloaded, offloading)


def take_steps(masters, optimizer, *, seed, num_steps=3, without=()):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for name, parameter in masters.parameters.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if name in without else gradient
        optimizer.step()
        masters.publish()


def same(resident, offloaded):
    (a, first), (b, second) = resident, offloaded
    for name, value in a.values.items():
        assert torch.equal(value, b.values[name]), name
        assert torch.equal(a._working[name], b._working[name]), name
    states = first.state_dict(), second.state_dict()
    assert states[0].keys() == states[1].keys()
    for number, state in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][number][key]) for key, value in state.items()), number


def test_steps_are_torchs_own_bit_for_bit():
    resident, offloaded = pair()
    for masters, optimizer in (resident, offloaded):
        take_steps(masters, optimizer, seed=1)
        optimizer.param_groups[1]["lr"] = 3e-3
        take_steps(masters, optimizer, seed=2)
    same(resident, offloaded)
    before = parameters()
    assert all((offloaded[0]._working[name] != before[name]).any() for name in SHAPES)


def test_what_has_no_gradient_stays_as_it_is():
    (masters, optimizer) = pair()[1]
    before = {name: value.clone() for name, value in masters.values.items()}
    take_steps(masters, optimizer, seed=1, without=("b", "norm"))
    assert [name for name in SHAPES if torch.equal(before[name], masters.values[name])] == ["b", "norm"]
    assert optimizer.state[masters.parameters["b"]]["step"] == 0


@pytest.mark.parametrize("source", [0, 1], ids=["from_resident", "from_offloaded"])
def test_a_checkpoint_of_either_goes_on_with_the_other(source, tmp_path):
    first = pair()[source]
    take_steps(*first, seed=1)
    torch.save({"optimizer": first[1].state_dict(), "masters": first[0].state_dict()}, tmp_path / "state.pt")
    take_steps(*first, seed=2)
    for masters, optimizer in pair():
        take_steps(masters, optimizer, seed=3)  # what is there is replaced
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
        optimizer.load_state_dict(saved["optimizer"])
        masters.load_state_dict(saved["masters"])
        take_steps(masters, optimizer, seed=2)
        assert all(torch.equal(value, first[0].values[name]) for name, value in masters.values.items())


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.bfloat16, "bf16"), pytest.param(torch.float16, "fp16", marks=pytest.mark.slow)],
    ids=["bf16", "fp16"],
)
def test_updates_of_a_model_are_the_same(tmp_path, token_batch, dtype, precision):
    """Clipped gradients, several microbatches and updates, and updates that are refused: those of fp16 while its scale
    is too large.
    """
    settings = {
        "precision": precision,
        "dtype": dtype,
        "batch_size": 5,
        "epochs": 2,
        "grad_clip": 0.01,
        "max_bad_updates": 40,
    }
    updaters = [make_updater(tmp_path, offload=offloaded, **settings) for offloaded in (False, True)]
    bad = replace(token_batch, advantages=token_batch.advantages * math.inf)
    batches = [token_batch, bad, token_batch, *[token_batch] * (20 if precision == "fp16" else 0)]
    metrics = [
        [updater.run(updater.passes.score(batch), iteration=i) for i, batch in enumerate(batches)]
        for updater in updaters
    ]
    assert metrics[0] == metrics[1]
    assert updaters[0].counters == updaters[1].counters
    assert updaters[1].counters.num_refused >= 2
    one, other = ((updater.passes.policy.masters, updater.optimizer) for updater in updaters)
    same(one, other)
    assert (one[0].values["model.norm.weight"] != make_qwen2().model.norm.weight).any()
