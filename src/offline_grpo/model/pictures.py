"""Pictures in prompts: what a model's processor makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from itertools import chain
from typing import Any

import transformers
from PIL import Image, ImageOps

from offline_grpo.errors import ConfigError, RequestError, reason_of
from offline_grpo.model.layers import is_composite
from offline_grpo.model.text import Encoded
from offline_grpo.types import Picture

ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values of photographs whose width is the height of what the camera saw."""


@dataclass(frozen=True, eq=False)
class Vision:
    """The eyes of a model: its processor, which is made of the files beside the weights."""

    processor: Any
    _texts: dict[tuple[int, int], str] = field(default_factory=dict)

    @property
    def placeholder(self) -> str:
        """The text in whose place the processor puts a picture's tokens."""
        return self.processor.image_token

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Texts of which the processor makes pictures, films or sounds; in what somebody says they are text."""
        return re.compile("|".join(map(re.escape, {self.placeholder, *self.processor.all_special_multimodal_tokens})))

    def encode(self, text: str, pictures: Sequence[Picture]) -> Encoded:
        """The tokens of a text that a chat template wrote. Raises RequestError unless it has a place for each picture,
        or if one of them is no image.
        """
        tokenizer, pieces = self.processor.tokenizer, text.split(self.placeholder)
        if len(pieces) != len(pictures) + 1:
            raise RequestError(f"the model's chat template writes {len(pieces) - 1} of {len(pictures)} pictures")
        texts = map(self._expanded, map(size_of, pictures))
        whole = pieces[0] + "".join(chain.from_iterable(zip(texts, pieces[1:], strict=True)))
        unexpanded = tokenizer.encode(text, add_special_tokens=False) if pictures else []
        return Encoded(tokenizer.encode(whole, add_special_tokens=False), unexpanded)

    def _expanded(self, size: tuple[int, int]) -> str:
        """What the processor writes in the place of a picture of this width and height: its pixels change nothing."""
        if size not in self._texts:
            blank = [[Image.new("RGB", size)]]
            ids = self.processor(text=[self.placeholder], images=blank, add_special_tokens=False)["input_ids"][0]
            self._texts[size] = self.processor.tokenizer.decode(ids, skip_special_tokens=False)
        return self._texts[size]


def size_of(picture: Picture) -> tuple[int, int]:
    """Width and height in pixels, upright. Raises RequestError for what is no image."""
    with _as_request(picture):
        image = Image.open(BytesIO(picture.data))
        is_turned = image.getexif().get(ORIENTATION, 1) in TURNED
        return (image.height, image.width) if is_turned else image.size


def opened(picture: Picture) -> Image.Image:
    """The pixels, upright and in RGB; what is transparent is white. Raises RequestError for what is no image."""
    with _as_request(picture):
        image = ImageOps.exif_transpose(Image.open(BytesIO(picture.data)))
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")


@contextmanager
def _as_request(picture: Picture) -> Iterator[None]:
    """What PIL raises, as RequestError."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RequestError(f"a picture of {len(picture.data):,} bytes is no image ({reason_of(error)})") from error


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
