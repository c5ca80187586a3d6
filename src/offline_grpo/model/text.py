"""Between text and tokens: a conversation as token ids, where a completion ends, and its text as a task sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offline_grpo.types import Message

if TYPE_CHECKING:  # see types.py
    from transformers import GenerationConfig
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


@dataclass(eq=False)
class TokenizerCodec:
    """A `TextCodec`. For its methods see the functions."""

    tokenizer: PreTrainedTokenizerBase

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return encode(self.tokenizer, messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        return decode(self.tokenizer, token_ids)


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, ready for the answer; without a chat template, of the contents, line by line."""
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(message["content"] for message in messages))
    conversation = [dict(message) for message in messages]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Text without special tokens: what a task may see."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the `stop` strings.

    Example: `cut_at_stop("4\\n\\nQ: 2+3", ("Q:", "\\n\\n"))` is `"4"`.
    """
    found = [position for position in map(text.find, stop) if position >= 0]
    return text[: min(found)] if found else text


def end_ids(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of end of sequence, of the model's generation config and of the tokenizer."""
    configured = config.eos_token_id if config is not None else None
    ids = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    return sorted({token for token in ids if isinstance(token, int)})
