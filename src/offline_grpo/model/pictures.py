"""Pictures in prompts: what a model's processor makes of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from PIL import Image, ImageOps
from torch import Tensor

from offline_grpo.errors import ConfigError, RequestError, reason_of, require
from offline_grpo.installed import install_command
from offline_grpo.model.layers import STAND_INS, is_composite
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
MAX_SEEN_BYTES = 1 << 30
"""Of what a model has made of pictures; when there is more it begins anew."""
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
    _seen: WeakKeyDictionary[Any, dict[str, Features]] = field(default_factory=WeakKeyDictionary)

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
        """The output of the model below the head for rows of tokens [S, L] and all their pictures, in this order. The
        tower, which is frozen, looks at each picture once, and not at those of every rollout and pass.
        """
        # Which tokens are a picture's, and its size in patches: positions in the text depend on them.
        is_picture = torch.isin(input_ids, torch.tensor(self.processor.image_token_ids, device=input_ids.device))
        types = {name: is_picture.long() for name in ("mm_token_type_ids", "token_type_ids") if name in self.arguments}
        seen = _joined([self._seen_by(lm, picture) for picture in pictures])
        inputs = {"input_ids": input_ids, **types, **seen.sizes}

        # Told that there are pixels, the model asks what they show, whatever transformers it is of.
        model = lm.base_model
        model.get_image_features = lambda *_, **__: seen
        try:
            return model(pixel_values=input_ids.new_empty(1), **inputs, **how)
        finally:
            del model.get_image_features

    @torch.no_grad()
    def _seen_by(self, lm: Any, picture: Picture) -> Features:
        """What the model's text reads in the place of a picture."""
        known = self._seen.setdefault(lm, {})
        if picture.key not in known:
            if sum(each.num_bytes for each in known.values()) > MAX_SEEN_BYTES:
                known.clear()
            pixels = self.processor(text=[self.placeholder], images=[[opened(picture)]], return_tensors="pt")
            given = {n: x.to(lm.device, lm.dtype if x.is_floating_point() else None) for n, x in pixels.items()}
            look = lm.base_model.get_image_features
            taken = given.keys() & inspect.signature(look).parameters.keys()
            found = look(**{name: given[name] for name in taken}, return_dict=True)
            sizes = {name: given[name] for name in given if name == "image_grid_thw"}
            known[picture.key] = Features(found.pooler_output, getattr(found, "deepstack_features", ()), sizes)
        return known[picture.key]

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


@dataclass(frozen=True)
class Features:
    """What a tower and the layer behind it make of pictures."""

    pooler_output: Tensor | Sequence[Tensor]  # [N, ...], or of each picture [n, H]
    deepstack_features: Sequence[Tensor | Sequence[Tensor]]  # the same for several layers of the text
    sizes: Mapping[str, Tensor]  # in patches [N, 3], which positions in the text depend on

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for own in (self.pooler_output, *self.deepstack_features) for x in own)


def _joined(parts: Sequence[Features]) -> Features:
    """Those of several pictures, one after the other."""

    def join(own: Sequence[Any]) -> Tensor | Sequence[Tensor]:
        return torch.cat([*own]) if isinstance(own[0], Tensor) else [*chain.from_iterable(own)]

    of_layers = zip(*(part.deepstack_features for part in parts), strict=True)
    sizes = {name: torch.cat([part.sizes[name] for part in parts]) for name in parts[0].sizes}
    return Features(join([part.pooler_output for part in parts]), [join(own) for own in of_layers], sizes)


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
        fix = f"install what it needs by {install_command('images')}"
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
