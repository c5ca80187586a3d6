"""Every family that looks at pictures here, by transformers' own forward on what its own processor makes of text and
pictures.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import load_composite
from factories import make_rollout
from seeing import picture, save_seeing
from torch import Tensor
from transformers import AutoConfig

from offline_grpo.errors import ConfigError
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model.pictures import FAMILIES, opened, vision_of
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import BaseScoring, prepare_for_gradients
from offline_grpo.model.text import Encoded
from offline_grpo.train.batch import build_batch
from offline_grpo.types import Completion, Picture, Rollout, SamplingParams, SamplingRequest, Score, TokenBatch

PICTURES = [picture(0, 16, 24), picture(1, 40, 16), picture(2, 16, 16), picture(3, 24, 48)]
ANSWERS = ["yes", "ab", "7", "none-of-it,of-course"]


class Seeing:
    """A policy that sees, and prompts with 2, 0, 3 and 1 pictures of several sizes."""

    def __init__(self, name: str, folder: Path, **how: Any) -> None:
        self.policy: Policy = load_composite(save_seeing(name, folder), **how)
        found = vision_of(str(folder), self.policy.causal_lm.config)
        assert found is not None
        self.policy.scoring.vision = self.vision = found
        mark = self.vision.placeholder
        self.texts = [f"see {mark}, and {mark}?", "see nothing?", f"x{mark}y{mark}z{mark}!", f"the picture {mark} is"]
        a, b, c, d = PICTURES
        self.pictures: list[tuple[Picture, ...]] = [(a, b), (), (c, b, d), (d,)]

    def prompts(self) -> list[Encoded]:
        return [self.vision.encode(*each) for each in zip(self.texts, self.pictures, strict=True)]

    def batch(self) -> TokenBatch:
        tokenizer = self.vision.processor.tokenizer
        answers = [tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS]
        rollouts = [make_rollout(p.ids, a, temperature=1.3) for p, a in zip(self.prompts(), answers, strict=True)]
        return replace(build_batch(rollouts), pictures=tuple(self.pictures))

    def expected(self) -> Tensor:
        """Logprobs of all answers, from text and pictures, one after the other."""
        found = []
        for text, own, answer in zip(self.texts, self.pictures, ANSWERS, strict=True):
            images = [[opened(each) for each in own]] if own else None
            inputs = self.vision.processor(text=[text + answer], images=images, return_tensors="pt")
            logits = self.policy.causal_lm(**inputs, use_cache=False).logits[0, -len(answer) - 1 : -1]
            logits = logits.index_fill(1, torch.tensor(self.vision.stand_ins), -torch.inf)
            logprobs = (logits / 1.3).log_softmax(-1)
            found.append(logprobs.gather(1, inputs["input_ids"][0, -len(answer) :, None])[:, 0])
        return torch.cat(found)


def gradients(policy: Policy, logprobs: Tensor) -> dict[str, Tensor]:
    """Of a sum in which errors do not cancel."""
    policy.model.zero_grad()
    (logprobs @ torch.linspace(-1, 1, len(logprobs))).backward()
    return {name: p.grad.clone() for name, p in policy.trained_parameters().items() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpointing", [0.0, 1.0])
def test_a_batch_is_one_sequence_at_a_time(name: str, checkpointing: float, tmp_path: Path) -> None:
    seeing = Seeing(name, tmp_path, gradient_checkpointing=checkpointing)
    policy, batch = seeing.policy, seeing.batch()
    expected = seeing.expected()
    wanted = gradients(policy, expected)
    prepare_for_gradients(policy.model)
    found = policy.scoring(batch).logprobs[batch.completion_mask]
    with policy.scoring.attention(batch):
        got = gradients(policy, found)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert got.keys() == wanted.keys()
    largest = max(float(x.abs().max()) for x in wanted.values())
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, atol=1e-5 * largest, rtol=1e-4)
    # a microbatch in which nobody sees anything
    among = policy.scoring.logprobs(batch).split(batch.sequence_lengths)[1]
    torch.testing.assert_close(policy.scoring.logprobs(batch.select([1])), among, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pictures_are_looked_at(name: str, tmp_path: Path) -> None:
    seeing = Seeing(name, tmp_path)
    batch, others = seeing.batch(), list(seeing.pictures)
    others[3] = (picture(9, 24, 48),)
    first, second = (seeing.policy.scoring.logprobs(each) for each in (batch, replace(batch, pictures=tuple(others))))
    differs = ((first - second).abs() > 1e-3).split(batch.sequence_lengths)
    assert [bool(each.any()) for each in differs] == [False, False, False, True]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_sampled_has_the_logprobs_of_training(name: str, tmp_path: Path) -> None:
    seeing = Seeing(name, tmp_path)
    policy, vision = seeing.policy, seeing.vision
    head = policy.scoring.output.weight
    with torch.no_grad():
        head[[*vision.stand_ins]] *= 5  # what is never sampled would often be
    requests = [
        SamplingRequest(tuple(prompt.ids), 3, 10 * i, 3 if i < 3 else None, pictures=own)  # most rows end early
        for i, (prompt, own) in enumerate(zip(seeing.prompts(), seeing.pictures, strict=True))
    ]
    # the same tokens, with another picture
    requests.append(replace(requests[3], pictures=(picture(9, 24, 48),)))

    def sampled(batch_size: int, **how: Any) -> list[list[Completion]]:
        sampling = SamplingParams(max_new_tokens=12, temperature=0.8, **how)
        client = TransformersClient(policy.model, policy.tokenizer, batch_size, vision)
        return [group for _, group in sorted(client.generate(requests, sampling), key=lambda pair: pair[0])]

    groups = sampled(64)
    alone = sampled(1)
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in alone]
    assert groups[3] != groups[4]
    how: dict[str, Any] = {"temperature": 0.8, "text": "", "score": Score(0.0, False, {})}
    for found in (groups, sampled(64, top_k=90, needs_alternatives=True)):
        pairs = [(request, each) for request, group in zip(requests, found, strict=True) for each in group]
        batch = build_batch([Rollout.of_one_turn(r.prompt_ids, c, pictures=r.pictures, **how) for r, c in pairs])
        drawn = {*batch.token_ids[batch.completion_mask].tolist()}
        drawn |= set() if batch.alternatives is None else {*batch.alternatives.tolist()}
        assert not drawn & {*vision.stand_ins}
        expected = batch.rollout_logprobs * batch.completion_mask
        torch.testing.assert_close(policy.scoring.logprobs(batch), expected, atol=2e-5, rtol=1e-4)


def test_without_its_adapters_a_policy_sees_as_before(tmp_path: Path) -> None:
    plain, adapted = (Seeing("qwen2_5_vl", tmp_path, lora=lora) for lora in (None, ["all-linear"]))
    parameters = adapted.policy.trained_parameters()
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter, std=0.2)
    batch, before = plain.batch(), plain.policy.logprobs(plain.batch())
    torch.testing.assert_close(BaseScoring(adapted.policy.scoring).logprobs(batch), before)
    stats = adapted.policy.scoring(batch)
    assert (stats.logprobs - before).abs().max() > 0.1
    stats.logprobs.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in parameters.values())


def test_a_family_that_looks_at_pictures_in_another_way_is_refused(tmp_path: Path) -> None:
    """LLaVA-OneVision sees a picture less sharply beside another one."""
    config = AutoConfig.for_model("llava_onevision")
    with pytest.raises(ConfigError, match="shows a llava_onevision pictures in a way that is not known here"):
        vision_of(str(tmp_path), config)
