"""Tiny models of every family that looks at pictures here, with real processors beside them; and pictures."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from architectures import TABLE, build_composite
from PIL import Image

from offline_grpo.model.pictures import opened
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import Picture

PROCESSORS: dict[str, Any] = TABLE["seeing"]
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


def picture(seed: int, width: int, height: int) -> Picture:
    """Random squares of 8 pixels."""
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    file = BytesIO()
    Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)[:height, :width]).save(file, "PNG")
    return Picture(file.getvalue())


class Camera:
    """Shows a picture in the row, one when it begins, and another one after each reply."""

    def reset(self, number: int, **row: Any) -> Any:
        self.number, self.turns = number, 0
        return ["See: ", opened(picture(100 * number, 24, 24))]

    def respond(self, text: str) -> Any:
        self.turns += 1
        return None if self.turns == 3 else opened(picture(100 * self.number + self.turns, 16 * self.turns, 24))

    def get_reward(self) -> float:
        return float(self.turns + self.number % 2)
