"""Between text and tokens: a conversation as token ids, where a completion ends, and its text as a task sees it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo.errors import ConfigError, RequestError, reason_of, require
from offline_grpo.types import Message, SamplingParams, Schema

if TYPE_CHECKING:  # see types.py
    from transformers import GenerationConfig
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from offline_grpo.model.chat import ChatFormat

OURS = ("messages", "add_generation_prompt")
"""Arguments of a chat template that are no setting."""


@dataclass(eq=False)
class TokenizerCodec:
    """Between text and tokens, for one model.

    Args:
        end_ids: tokens that end a completion, which no text shows.
        chat_template_kwargs: arguments of the chat template, such as `enable_thinking`.
        assistant_prefix: begins every answer: the end of each prompt, and the beginning of each text that is judged.

    Raises:
        ConfigError: arguments that the chat template does not have. `encode` raises it if the template refuses a
        conversation.
    """

    tokenizer: PreTrainedTokenizerBase
    end_ids: Collection[int] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    assistant_prefix: str = ""

    def __post_init__(self) -> None:
        key, given = "model.chat_template_kwargs", self.chat_template_kwargs
        if not given:
            return
        fix = "the model has no chat template; set it to {}, or give one (model.chat_template=FILE)"
        require(self.tokenizer.chat_template is not None, key, dict(given), fix)
        words = {*re.findall(r"\w+", self.tokenizer.get_chat_template(tools=given.get("tools")))} - {*OURS}
        unknown = next((name for name in given if name not in words), None)
        require(unknown is None, f"{key}.{unknown}", given.get(str(unknown)), "the chat template has no such argument")

    def encode(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> list[int]:
        """Prompt token ids of a conversation, and of what begins the answer; without a chat template, of its contents,
        line by line.
        """
        try:
            has_calls = any(message.get("tool_calls") for message in messages)
            return self.ids_of(self.rendered(self.chat.in_form(messages) if has_calls else messages, tools))
        except RequestError as error:
            fix = "take another template (model.chat_template=FILE)"
            fix = f"set task.system_prompt=null, or {fix}" if messages[0]["role"] == "system" else fix
            raise ConfigError(f"{error}; {fix}") from error

    def ids_of(self, rendered: str) -> list[int]:
        return self.tokenizer.encode(rendered, add_special_tokens=self.tokenizer.chat_template is None)

    @cached_property
    def chat(self) -> ChatFormat:
        """How conversations go on."""
        from offline_grpo.model.chat import ChatFormat

        return ChatFormat(self)

    def rendered(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> str:
        """The text that `encode` makes tokens of. Raises RequestError if the chat template refuses it."""
        if self.tokenizer.chat_template is None:
            return "\n".join(str(message["content"]) for message in messages) + self.assistant_prefix
        return self.apply(messages, tools) + self.assistant_prefix

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template leaves out contents that are plain text, as some of models with images do."""
        probe = [{"role": "user", "content": "Hello"}]
        return "Hello" not in self._apply(probe) and "Hello" in self._apply(probe, as_parts=True)

    def apply(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> str:
        """What the chat template writes. Raises RequestError if it refuses the messages."""
        try:
            return self._apply(messages, tools, as_parts=self._takes_parts)
        except Exception as error:  # templates are code that is not ours
            roles = ", ".join(message["role"] for message in messages)
            raise RequestError(f"the model's chat template refuses messages of {roles}: {reason_of(error)}") from error

    def _apply(self, messages: Sequence[Message], tools: Sequence[Schema] = (), *, as_parts: bool = False) -> str:
        conversation: list[Any] = [dict(message) for message in messages]
        if as_parts:
            parts = ([{"type": "text", "text": each["content"] or ""}] for each in conversation)
            conversation = [{**each, "content": own} for each, own in zip(conversation, parts, strict=True)]
        given = {**self.chat_template_kwargs, **({"tools": [dict(each) for each in tools]} if tools else {})}
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **given)
        assert isinstance(text, str)
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def judged(self, token_ids: Sequence[int], sampling: SamplingParams) -> str:
        ids, skips = list(token_ids), sampling.skip_special_tokens
        if not skips and ids and ids[-1] in self.end_ids:
            ids.pop()
        # after the prefix's tokens, because some decoders drop a blank at the start
        before = self.tokenizer.encode(self.assistant_prefix, add_special_tokens=False) if self.assistant_prefix else []
        text = self.decode(before + ids, skip_special_tokens=skips)
        text = text.removeprefix(self.decode(before, skip_special_tokens=skips))
        return self.assistant_prefix + cut_at_stop(text, sampling.stop, keeps_it=sampling.include_stop_str_in_output)


def use_template(tokenizer: PreTrainedTokenizerBase, file: str | None) -> None:
    """Give the tokenizer the chat template in a file; None leaves it its own. Raises ConfigError for no such file."""
    if file is not None:
        path = Path(file).expanduser()
        require(path.is_file(), "model.chat_template", file, "no such file; null takes the model's own template")
        tokenizer.chat_template = path.read_text(encoding="utf-8-sig")


def cut_at_stop(text: str, stop: Sequence[str], *, keeps_it: bool = False) -> str:
    """The text before the first of the `stop` strings, or with it.

    Example: `cut_at_stop("4\\n\\nQ: 2+3", ("Q:", "\\n\\n"))` is `"4"`.
    """
    found = [(begin, begin + len(string)) for string in stop if (begin := text.find(string)) >= 0]
    return text[: min(found)[keeps_it]] if found else text


def end_ids(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of end of sequence, of the model's generation config and of the tokenizer."""
    configured = config.eos_token_id if config is not None else None
    ids = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    return sorted({token for token in ids if isinstance(token, int)})
