"""Tiny models of every family that looks at pictures here, with real processors beside them; and pictures."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from architectures import build_composite
from PIL import Image

from offline_grpo.model.pictures import opened
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import Picture

QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
GEMMA = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
IDEFICS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}
QWEN_SIZES: dict[str, Any] = {"size": {"shortest_edge": 64, "longest_edge": 1024}, "patch_size": 4}
TILES: dict[str, Any] = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
PROCESSORS: dict[str, tuple[dict[str, str], str, str, dict[str, Any], str, dict[str, Any]]] = {
    "qwen2_5_vl": (QWEN, "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", QWEN_SIZES, "Qwen2VLVideoProcessor", {}),
    "qwen3_vl": (QWEN, "Qwen3VLProcessor", "Qwen2VLImageProcessor", QWEN_SIZES, "Qwen3VLVideoProcessor", {}),
    "qwen3_5": (QWEN, "Qwen3VLProcessor", "Qwen2VLImageProcessor", QWEN_SIZES, "Qwen3VLVideoProcessor", {}),
    "gemma3": (
        GEMMA,
        "Gemma3Processor",
        "Gemma3ImageProcessor",
        {"size": {"height": 16, "width": 16}},
        "",
        {"image_seq_length": 4},
    ),
    "idefics3": (IDEFICS, "Idefics3Processor", "Idefics3ImageProcessor", TILES, "", {"image_seq_len": 1}),
    "smolvlm": (
        IDEFICS,
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        TILES,
        "SmolVLMVideoProcessor",
        {"image_seq_len": 1},
    ),
}
"""Tokens; processor; its part for images, and how that is made; its part for videos; what else it is made with."""


def save_seeing(model_type: str, folder: Path) -> Path:
    """A model with random weights, and its processor."""
    tokens, name, images_name, how_images, videos_name, how = PROCESSORS[model_type]
    tokenizer: Any = build_char_tokenizer(512)
    tokenizer._set_model_specific_special_tokens(special_tokens=tokens)
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)] if tokens is IDEFICS else []
    tokenizer.add_tokens([*tokens.values(), *rows], special_tokens=True)
    images = getattr(transformers, images_name)(**how_images)
    videos = {"video_processor": getattr(transformers, videos_name)()} if videos_name else {}
    processor = getattr(transformers, name)(image_processor=images, tokenizer=tokenizer, **videos, **how)
    tokenizer = processor.tokenizer
    config = transformers.AutoConfig.for_model(model_type)
    ids = {f"{n}_id": tokenizer.convert_tokens_to_ids(t) for n, t in tokens.items()}
    known = {n: i for key, i in ids.items() for n in (key, key.replace("_id", "_index")) if hasattr(config, n)}
    model: Any = build_composite(model_type, text={"vocab_size": len(tokenizer)}, **known)
    for parameter in model.parameters():
        if not parameter.any():  # Gemma 3's projector begins with zeros
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
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
