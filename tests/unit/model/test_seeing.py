"""Every family that looks at pictures here, by transformers' own forward on what its own processor makes of text and
pictures.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cameras import picture
from seeing import Seeing, batch_of
from torch import Tensor, nn
from transformers import AutoConfig

from offline_grpo.errors import ConfigError
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model import proof
from offline_grpo.model.layers import PatchProjection
from offline_grpo.model.layouts import Tree
from offline_grpo.model.pictures import FAMILIES, vision_of
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import BaseScoring, prepare_for_gradients
from offline_grpo.types import Completion, SamplingParams


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for one model of each family."""
    return tmp_path_factory.mktemp("models")


def gradients(policy: Policy, logprobs: Tensor) -> dict[str, Tensor]:
    """Of a sum in which errors do not cancel."""
    policy.model.zero_grad()
    (logprobs @ torch.linspace(-1, 1, len(logprobs))).backward()
    return {name: p.grad.clone() for name, p in policy.trained_parameters().items() if p.grad is not None}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_batch_is_one_sequence_at_a_time(name: str, models: Path) -> None:
    """Also where blocks compute their activations again in the backward pass."""
    seeing, recomputing = (Seeing(name, models, gradient_checkpointing=frac) for frac in (0.0, 1.0))
    batch, expected = seeing.batch(), seeing.expected()
    wanted = gradients(seeing.policy, expected)
    largest = max(float(x.abs().max()) for x in wanted.values())
    for policy in (seeing.policy, recomputing.policy):
        prepare_for_gradients(policy.model)
        found = policy.scoring(batch).logprobs[batch.completion_mask]
        with policy.scoring.attention(batch):
            got = gradients(policy, found)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert got.keys() == wanted.keys()
        for key, gradient in wanted.items():
            torch.testing.assert_close(got[key], gradient, atol=1e-5 * largest, rtol=1e-4)
    # a microbatch in which nobody sees anything
    among = seeing.policy.scoring.logprobs(batch).split(batch.sequence_lengths)[1]
    torch.testing.assert_close(seeing.policy.scoring.logprobs(batch.select([1])), among, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_pictures_are_looked_at(name: str, models: Path) -> None:
    seeing = Seeing(name, models)
    batch, others = seeing.batch(), list(seeing.pictures)
    others[3] = (picture(9, 24, 48),)
    first, second = (seeing.policy.scoring.logprobs(each) for each in (batch, replace(batch, pictures=tuple(others))))
    differs = ((first - second).abs() > 1e-3).split(batch.sequence_lengths)
    assert [bool(each.any()) for each in differs] == [False, False, False, True]
    for token in seeing.vision.processor.tokenizer.convert_ids_to_tokens(seeing.vision.stand_ins):
        assert seeing.vision.marks.fullmatch(token)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_is_sampled_has_the_logprobs_of_training(name: str, models: Path) -> None:
    seeing = Seeing(name, models)
    policy, vision, requests = seeing.policy, seeing.vision, seeing.requests()
    with torch.no_grad():
        policy.scoring.output.weight[[*vision.stand_ins]] *= 5  # what is never sampled would often be

    def sampled(batch_size: int, **how: Any) -> list[list[Completion]]:
        sampling = SamplingParams(max_new_tokens=6, temperature=0.8, **how)
        client = TransformersClient(policy.model, policy.tokenizer, batch_size, vision)
        return [group for _, group in sorted(client.generate(requests, sampling), key=lambda pair: pair[0])]

    groups = sampled(64)
    alone = sampled(1)
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in alone]
    assert groups[3] != groups[4]
    for found in (groups, sampled(64, top_k=90, needs_alternatives=True)):
        batch = batch_of(requests, found, temperature=0.8)
        drawn = {*batch.token_ids[batch.completion_mask].tolist()}
        drawn |= set() if batch.alternatives is None else {*batch.alternatives.tolist()}
        assert not drawn & {*vision.stand_ins}
        expected = batch.rollout_logprobs * batch.completion_mask
        torch.testing.assert_close(policy.scoring.logprobs(batch), expected, atol=2e-5, rtol=1e-4)


def test_the_proof_of_batches_reads_text_alone(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's long sequence would have tokens that stand for films and sounds, which Gemma 4 reads as padding."""
    monkeypatch.setattr(proof, "batch_for", partial(proof.batch_for, groups=(*proof.GROUPS, proof.LONG_GROUP)))
    assert type(Seeing("gemma4", models).policy.scoring.layout) is Tree


def test_without_its_adapters_a_policy_sees_as_before(models: Path) -> None:
    plain, adapted = (Seeing("qwen2_5_vl", models, lora=lora) for lora in (None, ["all-linear"]))
    parameters = adapted.policy.trained_parameters()
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter, std=0.2)
    batch, before = plain.batch(), plain.policy.logprobs(plain.batch())
    torch.testing.assert_close(BaseScoring(adapted.policy.scoring).logprobs(batch), before)
    stats = adapted.policy.scoring(batch)
    assert (stats.logprobs - before).abs().max() > 0.1
    stats.logprobs.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in parameters.values())


def test_a_family_that_looks_at_pictures_in_another_way_is_refused(models: Path) -> None:
    """LLaVA-OneVision sees a picture less sharply beside another one."""
    config = AutoConfig.for_model("llava_onevision")
    with pytest.raises(ConfigError, match="shows a llava_onevision pictures in a way that is not known here"):
        vision_of(str(models / "none"), config)


def test_a_tower_looks_at_each_picture_once(models: Path) -> None:
    """However many rollouts and passes have it."""
    seeing = Seeing("qwen2_5_vl", models)
    model, num_patches = seeing.policy.causal_lm.base_model, list[int]()
    tower: Any = model.visual
    tower.register_forward_pre_hook(lambda _, given: num_patches.append(len(given[0])))
    batch = seeing.batch()
    first, again = (seeing.policy.scoring.logprobs(each) for each in (batch, batch.select([3, 0])))
    assert len(num_patches) == 4
    lengths = batch.sequence_lengths
    parts = first.split(lengths)
    torch.testing.assert_close(again, torch.cat([parts[3], parts[0]]), atol=1e-5, rtol=1e-5)


def test_patches_are_projected_by_one_product(models: Path) -> None:
    [projection] = [x for x in Seeing("qwen2_5_vl", models).policy.model.modules() if isinstance(x, nn.Conv3d)]
    patches = torch.randn(5, 3, *projection.kernel_size)
    assert type(projection) is PatchProjection
    torch.testing.assert_close(projection(patches), nn.Conv3d.forward(projection, patches), atol=1e-5, rtol=1e-5)
