"""Tiny models of every family that looks at pictures here, with real processors beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import TABLE, build_composite, load_composite
from cameras import picture
from factories import make_rollout
from torch import Tensor

from offline_grpo.model.pictures import opened, vision_of
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.train.batch import build_batch
from offline_grpo.types import Completion, Encoded, Picture, Rollout, SamplingRequest, Score, TokenBatch

PROCESSORS: dict[str, Any] = TABLE["seeing"]
ANSWERS = ["yes", "ab", "7", "none-of-it,of-course"]
TILES = {"idefics3": "<row_{}_col_{}>", "smolvlm": "<row_{}_col_{}>", "lfm2_vl": "<|img_row_{}_col_{}|>"}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}> {{ message.content }}{{ eos_token }}"
    "{% elif message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)
"""A chat template of Qwen's kind."""


def save_seeing(model_type: str, folder: Path) -> Path:
    """A model with random weights, and its processor."""
    # The tokenizer knows tokens that stand for pictures, and begin and end them.
    tokens, name, images_name, how_images, videos_name, how = PROCESSORS[model_type]
    tokenizer: Any = build_char_tokenizer(512)
    tokenizer._set_model_specific_special_tokens(special_tokens={f"{each}_token": tokens[each] for each in tokens})
    tiles = (
        [TILES[model_type].format(row, column) for row in (1, 2) for column in (1, 2)] if model_type in TILES else []
    )
    tokenizer.add_tokens([*tokens.values(), *tiles], special_tokens=True)

    # The processor adds some of its own.
    parts = {"video_processor": getattr(transformers, videos_name)()} if videos_name else {}
    if model_type == "gemma4":
        parts["feature_extractor"] = transformers.Gemma4AudioFeatureExtractor()
    images = getattr(transformers, images_name)(**how_images)
    processor = getattr(transformers, name)(image_processor=images, tokenizer=tokenizer, **parts, **how)
    processor.save_pretrained(folder)

    # The model has their numbers.
    tokenizer, config = processor.tokenizer, transformers.AutoConfig.for_model(model_type)
    ids = {each: tokenizer.convert_tokens_to_ids(tokens[each]) for each in tokens}
    ids["image"] = ids.get("image", processor.image_token_id)  # InternVL's has another name
    names = {f"{each}_token_{end}": number for each, number in ids.items() for end in ("id", "index")}
    known = {each: number for each, number in names.items() if hasattr(config, each)}
    sizes = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}
    model: Any = build_composite(model_type, text=sizes, **known)
    for parameter in model.parameters():
        if not parameter.any():  # Gemma 3's projector begins with zeros
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


class Seeing:
    """A policy that sees, and prompts with 2, 0, 3 and 1 pictures of several sizes.

    Args:
        models: a folder for models, of which each family is saved once.
    """

    def __init__(self, name: str, models: Path, **how: Any) -> None:
        folder = models / name
        self.policy: Policy = load_composite(folder if folder.exists() else save_seeing(name, folder), **how)
        found = vision_of(str(folder), self.policy.causal_lm.config)
        assert found is not None
        self.policy.scoring.vision = self.vision = found
        mark = self.vision.placeholder
        self.texts = [f"see {mark}, and {mark}?", "see nothing?", f"x{mark}y{mark}z{mark}!", f"the picture {mark} is"]
        a, b, c, d = picture(0, 16, 24), picture(1, 40, 16), picture(2, 16, 16), picture(3, 24, 48)
        self.pictures: list[tuple[Picture, ...]] = [(a, b), (), (c, b, d), (d,)]

    def prompts(self) -> list[Encoded]:
        return [self.vision.encode(*each) for each in zip(self.texts, self.pictures, strict=True)]

    def requests(self) -> list[SamplingRequest]:
        """Of three completions each, most of which end early; and one of the last prompt with another picture."""
        found = [
            SamplingRequest(tuple(prompt.ids), 3, 10 * i, 3 if i < 3 else None, pictures=own)
            for i, (prompt, own) in enumerate(zip(self.prompts(), self.pictures, strict=True))
        ]
        return [*found, replace(found[3], pictures=(picture(9, 24, 48),))]

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


def batch_of(
    requests: Sequence[SamplingRequest], groups: Sequence[Sequence[Completion]], *, temperature: float
) -> TokenBatch:
    """What was sampled, to be scored."""
    how: dict[str, Any] = {"temperature": temperature, "text": "", "score": Score(0.0, False, {})}
    pairs = [(request, each) for request, group in zip(requests, groups, strict=True) for each in group]
    return build_batch([Rollout.of_one_turn(r.prompt_ids, c, pictures=r.pictures, **how) for r, c in pairs])
