"""A tiny model that sees: the tiny Llama with the tower of an Idefics3, whose processor needs no torchvision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

from offline_grpo.errors import require
from offline_grpo.model.tiny import TinyModel, special_ids

IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


@dataclass(frozen=True)
class TinyVisionModel(TinyModel):
    """The tiny model with a tower that makes one token of each picture."""

    picture_size: int
    patch_size: int
    tower_hidden_size: int
    tower_layers: int

    name: ClassVar[str] = "tiny_vl"
    sees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = f"must divide model.tiny.picture_size={self.picture_size}"
        require(self.picture_size % self.patch_size == 0, "model.tiny.patch_size", self.patch_size, fix)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = super().tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TOKENS]})
        return tokenizer

    def _reader(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        return make_processor(tokenizer, self.picture_size, tokens_per_picture=1)

    def _model(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        tower = {
            "hidden_size": self.tower_hidden_size,
            "intermediate_size": 2 * self.tower_hidden_size,
            "num_hidden_layers": self.tower_layers,
            "num_attention_heads": self.num_heads,
            "image_size": self.picture_size,
            "patch_size": self.patch_size,
            "initializer_range": self.initializer_range,
        }
        image: Any = tokenizer.convert_tokens_to_ids("<image>")
        return Idefics3ForConditionalGeneration(
            Idefics3Config(
                vision_config=tower,
                text_config=self._text_config(tokenizer).to_dict(),
                image_token_id=image,
                scale_factor=self.picture_size // self.patch_size,
                tie_word_embeddings=True,
                dtype="float32",
                **special_ids(tokenizer),
            )
        )


def make_processor(tokenizer: Any, picture_size: int, *, tokens_per_picture: int) -> Idefics3Processor:
    """Brings each picture to one size; the tokenizer gets the tokens that it lacks."""
    tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TOKENS]})
    size = {"longest_edge": picture_size}
    pixels = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    own = {"image_seq_len": tokens_per_picture, "chat_template": tokenizer.chat_template}
    return Idefics3Processor(pixels, tokenizer, **own)
