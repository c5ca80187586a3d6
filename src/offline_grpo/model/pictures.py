"""Pictures in prompts: what a model's processor makes of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from io import BytesIO
from itertools import chain
from typing import Any

import torch
import transformers
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import pad

from offline_grpo.errors import ConfigError, RequestError, reason_of, require
from offline_grpo.model.layers import is_composite
from offline_grpo.types import Encoded, Picture

FAMILIES = (
    *("gemma3", "gemma4", "glm4v", "idefics3", "internvl", "lfm2_vl", "llava", "llava_next", "mistral3", "qwen2_vl"),
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "smolvlm"),
)
"""By their `model_type`. A test shows of each that a batch with pictures has the logprobs and gradients of one sequence
at a time. It fails for LLaVA-OneVision, which sees a picture less sharply beside another one.
"""
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values of photographs whose width is the height of what the camera saw."""
NUM_KEPT = 128
"""Pictures whose tensors stay in memory: the rows of a group, and the passes over a batch, look at the same ones."""
STAND_INS = ("image_token_id", "video_token_id", "audio_token_id")
"""Of composites: tokens in whose place features of a tower come."""
NEVER = -1e4
"""The logit of what is never sampled: finite, so that it times its probability, 0, is 0."""


@dataclass(frozen=True, eq=False)
class Vision:
    """The eyes of a model: its processor, which is made of the files beside the weights."""

    processor: Any
    arguments: frozenset[str]  # of the model's forward
    stand_ins: tuple[int, ...]
    """Tokens in whose place features come. They are never sampled, because no picture would belong to them: neither the
    sampler nor the trainer has them in its softmax.
    """
    _texts: dict[tuple[int, int], str] = field(default_factory=dict)

    @property
    def placeholder(self) -> str:
        """The text in whose place the processor puts a picture's tokens."""
        return self.processor.image_token

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Texts of which the processor makes pictures, films or sounds; in what somebody says they are text."""
        own = self.processor.tokenizer.convert_ids_to_tokens(self.stand_ins)
        known = {self.placeholder, *own, *self.processor.all_special_multimodal_tokens}
        return re.compile("|".join(map(re.escape, known)))

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
            self._texts[size] = self.processor.tokenizer.decode([*map(int, ids)], skip_special_tokens=False)
        return self._texts[size]

    def forward(self, lm: Any, pictures: Sequence[Picture], input_ids: Tensor, **how: Any) -> Any:
        """The output of the model below the head for rows of tokens [S, L] and all their pictures, in this order."""
        return lm.base_model(input_ids=input_ids, **self.inputs(input_ids, pictures, lm.dtype), **how)

    def inputs(self, rows: Tensor, pictures: Sequence[Picture], dtype: torch.dtype) -> dict[str, Tensor]:
        """What the model's forward takes beside the rows: pixels, their sizes, and which tokens are a picture's."""
        parts = [tensors_of(self, picture) for picture in pictures]
        joined = {name: _joined([part[name] for part in parts]) for name in parts[0]}
        is_picture = torch.isin(rows, torch.tensor(self.processor.image_token_ids, device=rows.device))
        types = {name: is_picture.long() for name in ("mm_token_type_ids", "token_type_ids") if name in self.arguments}
        moved = {name: x.to(rows.device, dtype if x.is_floating_point() else None) for name, x in joined.items()}
        return moved | types

    def bias(self, weight: Tensor) -> Tensor:
        """Of the head whose weights [V, H] these are: [V], `NEVER` for what is never sampled, else 0."""
        bias = weight.new_zeros(len(weight))
        bias[[*self.stand_ins]] = NEVER
        return bias


def size_of(picture: Picture) -> tuple[int, int]:
    """Width and height in pixels, upright. Raises RequestError for what is no image."""
    with _as_request(picture):
        image = Image.open(BytesIO(picture.data))
        is_turned = image.getexif().get(ORIENTATION, 1) in TURNED
        return (image.height, image.width) if is_turned else image.size


@lru_cache(maxsize=NUM_KEPT)
def tensors_of(vision: Vision, picture: Picture) -> dict[str, Tensor]:
    """What the processor makes of a picture, as far as the model takes it."""
    found = vision.processor(text=[vision.placeholder], images=[[opened(picture)]], return_tensors="pt")
    of_text = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
    return {name: found[name] for name in found.keys() & vision.arguments - of_text}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Pictures, or their patches or tiles, one after the other, and zeros where one is smaller than others."""
    sizes = [max(own) for own in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([_padded(part, sizes) for part in parts])


def _padded(part: Tensor, sizes: Sequence[int]) -> Tensor:
    blanks = [size - own for size, own in zip(sizes, part.shape[1:], strict=True)]
    return pad(part, [n for blank in reversed(blanks) for n in (0, blank)])


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
    fault = f"transformers shows a {config.model_type} pictures in a way that is not known here; choose another model"
    require(config.model_type in FAMILIES, "model.train_id", model_id, fault)
    try:
        processor = transformers.AutoProcessor.from_pretrained(model_id, trust_remote_code=trust_remote_code)
    except ImportError as error:
        fix = "install what it needs, in this repository by uv sync --extra images"
        raise ConfigError(
            f"model.train_id={model_id}: its processor cannot be made ({reason_of(error)}); {fix}"
        ) from error
    except (OSError, ValueError) as error:
        fix = "copy the files of its processor (preprocessor_config.json, processor_config.json) beside the model"
        raise ConfigError(f"model.train_id={model_id}: has no processor ({reason_of(error)}); {fix}") from error
    model_class: Any = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    arguments = inspect.signature(model_class.forward).parameters
    known = range(config.get_text_config().vocab_size)
    stand_ins = tuple(number for name in STAND_INS if (number := getattr(config, name, -1)) in known)
    return Vision(processor, frozenset(arguments), stand_ins)
