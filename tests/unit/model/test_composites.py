"""Text models with a tower for images are trained on text and saved as what they were: every family, by transformers'
own forward and loader.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import EVERY_COMPOSITE, build_composite, load_composite, save_composite
from engines import full_weights
from factories import generate, make_rollout
from run_folders import make_checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from offline_grpo.checkpoint.pretrained import export_model, find_model
from offline_grpo.errors import ConfigError
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model.layers import decoder_of, text_parameters
from offline_grpo.model.load import read_model_config
from offline_grpo.model.policy import Policy, save_policy
from offline_grpo.train.batch import build_batch
from offline_grpo.train.metrics import update_flops
from offline_grpo.types import SamplingParams

PROMPTS = [[9, 11, 30, 31, 32, 33, 34, 35, 36], [17, 8]]
IDS = torch.arange(8, 30)[None]


def train(policy: Policy) -> None:
    """Sample, compare with the model's own forward, and update once, with a weight decay that would show in a tower."""
    client = TransformersClient(model=policy.model, tokenizer=policy.tokenizer, batch_size=8)
    generate(client, PROMPTS, SamplingParams(max_new_tokens=8), group_size=2, seeds=[1, 2])  # other rows than the next
    groups = generate(client, PROMPTS, SamplingParams(max_new_tokens=8), group_size=3, seeds=[100, 200])
    rollouts = [make_rollout(p, one) for p, group in zip(PROMPTS, groups, strict=True) for one in group]
    batch = build_batch(rollouts)
    found = policy.scoring(batch).logprobs
    expected = []
    with torch.no_grad():
        for ids in batch.token_ids.split(batch.sequence_lengths):
            logprobs = policy.causal_lm(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            expected += [torch.zeros(1), logprobs.gather(1, ids[1:, None]).squeeze(1)]
    for others in (torch.cat(expected), batch.rollout_logprobs):
        torch.testing.assert_close(found, others * batch.completion_mask, atol=2e-5, rtol=1e-4)
    masters = policy.make_masters()
    found.sum().backward()
    masters.accumulate()
    for parameter in masters.parameters.values():  # as `Sharding.reduce_gradients` does
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    torch.optim.AdamW(masters.parameters.values(), lr=0.01, weight_decay=0.1).step()
    masters.publish()


def changed(model: Any, other: Any) -> set[str]:
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return {name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def loaded_whole(folder: Path) -> Any:
    """As anybody loads it who knows nothing of us."""
    is_sound = "qwen2_audio" in (folder / "config.json").read_text()
    auto: Any = AutoModelForMultimodalLM if is_sound else AutoModelForImageTextToText
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert (folder / "preprocessor_config.json").exists()
    return model


@pytest.mark.parametrize("name", EVERY_COMPOSITE)
def test_the_text_is_trained_and_the_tower_stays(name: str, tmp_path: Path) -> None:
    policy = load_composite(save_composite(name, tmp_path / "source"), gradient_checkpointing=1.0)
    text = text_parameters(policy.causal_lm)
    assert set(policy.trained_parameters()) == set(text)
    assert not [parameter for parameter in text if re.search("vis|audio|projector", parameter)]
    train(policy)
    save_policy(policy, full_weights(policy), tmp_path / "out")
    after = loaded_whole(tmp_path / "out")
    torch.testing.assert_close(logits(after), logits(policy.causal_lm), rtol=0, atol=0)
    head = after.get_output_embeddings().weight
    tied = {key for key, p in after.named_parameters(remove_duplicate=False) if p is head}
    assert changed(build_composite(name), after) == text.keys() | tied


@pytest.mark.parametrize("name", EVERY_COMPOSITE)
def test_adapters_are_on_the_text_alone(name: str, tmp_path: Path) -> None:
    source, folder = save_composite(name, tmp_path / "source"), tmp_path / "iter_000"
    policy = load_composite(source, lora=["all-linear"])
    in_decoder = {id(p) for p in decoder_of(policy.causal_lm).parameters()}
    assert len(policy.trained_parameters()) >= 8
    assert {id(p) for p in policy.trained_parameters().values()} <= in_decoder
    train(policy)
    save_policy(policy, full_weights(policy), folder)
    expected = logits(policy.model)
    assert (expected - logits(build_composite(name))).abs().max() > 1e-3
    resumed = load_composite(source, lora=["all-linear"], checkpoint=folder)
    torch.testing.assert_close(logits(resumed.model), expected, rtol=0, atol=0)
    export_model(find_model(str(make_checkpoint(folder))), tmp_path / "out", merge=True, dtype=None, card="")
    merged = loaded_whole(tmp_path / "out")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert changed(build_composite(name), merged) <= text_parameters(merged).keys()


def test_a_block_is_one_of_the_text(tmp_path: Path) -> None:
    """The tower has as many, with layers of the same names."""
    source = save_composite("gemma3", tmp_path / "source")
    assert {
        name.split(".layers.")[0] for name in load_composite(source, train_layer_indices="1").trained_parameters()
    } == {"model.language_model"}


def test_the_tower_takes_no_operations() -> None:
    composite = build_composite("llava")
    text = AutoModelForCausalLM.from_config(composite.config.get_text_config())
    assert update_flops(composite, [10, 20]) == update_flops(text, [10, 20])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        *(
            (name, f"transformers has no causal .* of the type {name}; choose")
            for name in ("paligemma", "t5gemma2", "t5")
        ),
        ("blip-2", "a blip-2 reads no text without an image; choose"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(name: str, told: str, tmp_path: Path) -> None:
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^model.train_id=\S*: {told}"):
        read_model_config(str(tmp_path), "model.train_id")
