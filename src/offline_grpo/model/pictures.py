"""Pictures in prompts: what a model's processor makes of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from typing import Any, NamedTuple

import transformers
from PIL import Image, ImageOps

from offline_grpo.errors import ConfigError, RequestError, reason_of
from offline_grpo.model.layers import is_composite
from offline_grpo.types import Picture


class Encoded(NamedTuple):
    """A text with pictures, in tokens."""

    ids: list[int]  # with as many tokens in the place of a picture as the model computes of it
    unexpanded_ids: list[int]  # with one placeholder in the place of a picture


@dataclass(frozen=True, eq=False)
class Vision:
    """The eyes of a model: its processor, which is made of the files beside the weights."""

    processor: Any

    @property
    def placeholder(self) -> str:
        """The text in whose place the processor puts a picture's tokens."""
        return self.processor.image_token

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Texts of which the processor makes pictures, films or sounds; in what somebody says they are text."""
        return re.compile("|".join(map(re.escape, {self.placeholder, *self.processor.all_special_multimodal_tokens})))

    def encode(self, text: str, pictures: tuple[Picture, ...]) -> Encoded:
        """The tokens of a text that a chat template wrote. Raises RequestError unless it has a place for each picture,
        or if one of them is no image.
        """
        unexpanded = self.processor.tokenizer.encode(text, add_special_tokens=False)
        if (found := text.count(self.placeholder)) != len(pictures):
            raise RequestError(f"the chat template writes {found} of {len(pictures)} pictures")
        if not pictures:
            return Encoded(unexpanded, [])
        images = [[opened(picture) for picture in pictures]]
        ids = self.processor(text=[text], images=images, add_special_tokens=False)["input_ids"][0]
        return Encoded([*ids], unexpanded)


def opened(picture: Picture) -> Image.Image:
    """The pixels, upright and in RGB; what is transparent is white. Raises RequestError for what is no image."""
    try:
        image = ImageOps.exif_transpose(Image.open(BytesIO(picture.data)))
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError(f"a picture of {len(picture.data)} bytes is no image ({reason_of(error)})") from error


def vision_of(model_id: str, config: Any, *, trust_remote_code: bool = False) -> Vision | None:
    """What the model sees with; None for a model of text alone. Raises ConfigError if its processor is not there."""
    if not is_composite(config):
        return None
    try:
        processor = transformers.AutoProcessor.from_pretrained(model_id, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        fix = "copy the files of its processor (preprocessor_config.json, processor_config.json) beside the model"
        raise ConfigError(f"model.train_id={model_id}: has no processor ({reason_of(error)}); {fix}") from error
    return Vision(processor)
