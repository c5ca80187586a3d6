"""Between text and tokens: a conversation as token ids, where a completion ends, its text as a task sees it, and how
the conversation goes on after a reply.

A later prompt is the ids so far, and behind them the ids of the text that the chat template writes between a reply and
the next one. So nothing that was sampled is ever encoded, whatever a template does to old messages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo.errors import ConfigError, RequestError, reason_of, require
from offline_grpo.model.tool_calls import READERS, Reader, arguments_of
from offline_grpo.types import (
    Call,
    Completion,
    Encoded,
    FinishReason,
    Message,
    Picture,
    Reply,
    SamplingParams,
    Schema,
    pictures_in,
)

if TYPE_CHECKING:  # see types.py
    from transformers import GenerationConfig
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from offline_grpo.model.pictures import Vision

log = logging.getLogger(__name__)

MARK, NEXT = "Zq7wEnd", "Zq7wNext"
"""Texts that no template writes, in place of a reply and of what comes after it."""
USER: Message = {"role": "user", "content": "?"}
_TEXT, _COUNT = {"type": "string", "description": "A text."}, {"type": "integer", "description": "A number."}
_PARAMETERS = {"type": "object", "properties": {"text": _TEXT, "count": _COUNT}, "required": ["text", "count"]}
PROBE: Schema = {"type": "function", "function": {"name": "probe", "description": "Probe.", "parameters": _PARAMETERS}}
PROBE_CALL = Call("000000000", "probe", {"text": 'a "b" c', "count": 3})
THINKING_ENDS = "</think>"
OURS = ("messages", "add_generation_prompt")
"""Arguments of a chat template that are no setting."""


@dataclass(eq=False)
class TokenizerCodec:
    """Between text and tokens, for one model."""

    tokenizer: PreTrainedTokenizerBase
    end_ids: Collection[int] = ()  # tokens that end a completion, which no text shows
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # such as `enable_thinking`
    assistant_prefix: str = ""  # begins every answer: the end of each prompt, and the beginning of each judged text
    vision: Vision | None = None  # of a model that gets pictures

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
        """Prompt token ids of a conversation, and of what begins the answer (`task.assistant_prefix`); without a chat
        template, of the contents, line by line. Raises ConfigError if the template refuses it.
        """
        return self.encode_with(messages, (), tools).ids

    def encode_with(
        self, messages: Sequence[Message], pictures: Sequence[Picture], tools: Sequence[Schema] = ()
    ) -> Encoded:
        """The same of a conversation with pictures, those of its parts in their order."""
        if pictures and self.vision is None:
            raise ConfigError("model.train_id: reads no pictures, and the problem has some; choose a model that does")
        try:
            has_calls = any(message.get("tool_calls") for message in messages)
            text = self.rendered(self.chat.in_form(messages) if has_calls else messages, tools)
            if self.vision is not None:
                return self.vision.encode(text, pictures)
        except RequestError as error:
            fix = "take another template (model.chat_template=FILE)"
            fix = f"set task.system_prompt=null, or {fix}" if messages[0]["role"] == "system" else fix
            raise ConfigError(f"{error}; {fix}") from error
        return Encoded(self.tokenizer.encode(text, add_special_tokens=self.tokenizer.chat_template is None), [])

    @cached_property
    def chat(self) -> ChatFormat:
        """How conversations go on."""
        return ChatFormat(self)

    def rendered(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> str:
        """The text that `encode` makes tokens of. Raises RequestError if the chat template refuses it."""
        if self.vision is not None:
            messages, tools = as_text([messages, tools], self.vision.marks)
        if self.tokenizer.chat_template is None:
            return "\n".join(str(message["content"]) for message in messages) + self.assistant_prefix
        return self.apply(messages, tools) + self.assistant_prefix

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template leaves out contents that are plain text, as some of models with images do."""
        probe = [{"role": "user", "content": "Hello"}]
        return "Hello" not in self.apply(probe, as_parts=False) and "Hello" in self.apply(probe, as_parts=True)

    def apply(self, messages: Sequence[Message], tools: Sequence[Schema] = (), *, as_parts: bool | None = None) -> str:
        """What the chat template writes, of contents in parts where it leaves out plain text. Raises RequestError if it
        refuses the messages.
        """
        conversation: list[Any] = [dict(message) for message in messages]
        if self._takes_parts if as_parts is None else as_parts:
            contents = (each["content"] or "" for each in conversation)
            parts = (own if isinstance(own, list) else [{"type": "text", "text": own}] for own in contents)
            conversation = [{**each, "content": own} for each, own in zip(conversation, parts, strict=True)]
        given = {**self.chat_template_kwargs, **({"tools": [dict(each) for each in tools]} if tools else {})}
        try:
            text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **given)
        except Exception as error:  # templates are code that is not ours
            roles = ", ".join(message["role"] for message in messages)
            raise RequestError(f"the model's chat template refuses messages of {roles}: {reason_of(error)}") from error
        assert isinstance(text, str)
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def judged(self, token_ids: Sequence[int], sampling: SamplingParams) -> str:
        """What a task sees of a completion: the whole answer, with what begins it, cut at the first stop string."""
        ids, skips = list(token_ids), sampling.skip_special_tokens
        if not skips and ids and ids[-1] in self.end_ids:
            ids.pop()
        # after the prefix's tokens, because some decoders drop a blank at the start
        before = self.tokenizer.encode(self.assistant_prefix, add_special_tokens=False) if self.assistant_prefix else []
        text = self.decode(before + ids, skip_special_tokens=skips)
        text = text.removeprefix(self.decode(before, skip_special_tokens=skips))
        return self.assistant_prefix + cut_at_stop(text, sampling.stop, keeps_it=sampling.include_stop_str_in_output)


class ChatFormat:
    """How a model's chat template goes on after a reply, and writes calls.

    Without a template, messages are lines, and there are no calls.
    """

    def __init__(self, codec: TokenizerCodec) -> None:
        self._codec, self._tokenizer = codec, codec.tokenizer
        self._has_said = False  # that it leaves tools out

        # Special tokens, which what a tool or a user says must not become.
        added = self._tokenizer.added_tokens_decoder.values()
        special = {*self._tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        names = [re.escape(name) for name in sorted(special, key=len, reverse=True) if name]
        self._special = re.compile("|".join([*names, MARK, NEXT]))

        # What the template writes at the end of a reply; it may be another token than the model's, such as gpt-oss's.
        self._ends = {self._codec.decode([token], skip_special_tokens=False) for token in codec.end_ids} - {""}
        self._closing = self._closing_of(())
        if self._closing is not None:
            self._ends.add(self._closing[1])

        # How it writes a call, by trying: templates differ in whether a content may be empty beside calls, and
        # arguments be objects or JSON.
        self._call_closing, self._reader, closing = ("", ""), None, None
        for self._blank, self._wants_json in product(("", None), (False, True)):
            closing = self._closing_of((PROBE_CALL,))
            self._reader = None if closing is None else self._reader_that_fits()
            if self._reader is not None:
                break
        self._call_closing = closing
        can = "cannot write calls of tools" if closing is None else "writes calls in an unknown form"
        self.fault = None if self._reader is not None else f"the model's chat template {can}"

    def check(self, *, has_tools: bool) -> None:
        """Raise ConfigError if conversations cannot go on, or calls cannot be read."""
        other = "take a template that can (model.chat_template=FILE)"
        if self._tokenizer.chat_template is not None and self._closing is None:
            raise ConfigError(f"model.train_id: its chat template does not go on after a reply; {other}")
        if has_tools and self.fault is not None:
            fix = f"{other}, or play without tools, by `respond(self, text)`"
            raise ConfigError(f"task: it has tools, and {self.fault}; {fix} (docs/environments.md)")
        knows_thinking = re.search("thinking|reasoning_content|</think>", str(self._tokenizer.chat_template))
        reply = {"role": "assistant", "content": NEXT, "reasoning_content": MARK, "thinking": MARK}
        if knows_thinking and MARK not in self._codec.apply([USER, reply, USER]):
            kept = "this run keeps it, because what was sampled is never written anew"
            log.info("the chat template leaves earlier thinking out where the user speaks again; %s", kept)

    def first(self, messages: Sequence[Message], tools: Sequence[Schema]) -> Encoded:
        """The ids of a conversation, and of what begins the next reply. Raises RequestError as `following`."""
        text = self._codec.rendered(self._safe(self.in_form(messages)), self._safe(tools))
        if tools and not self._has_said and tools[0]["function"]["name"] not in text:
            self._has_said = True
            log.warning("the model's chat template leaves tools out; name them in the prompt, or take another template")
        return self._encoded(text, messages, add_special_tokens=self._tokenizer.chat_template is None)

    def following(self, reply: Reply, last_id: int, messages: Sequence[Message], tools: Sequence[Schema]) -> Encoded:
        """The ids between a reply, whose last one is `last_id`, and the next reply. Raises RequestError if the template
        refuses the messages, leaves out calls, or writes something else before them than it did at first.
        """
        safe = self._safe(self.in_form(messages))
        if self._tokenizer.chat_template is None:
            text = "".join(f"\n{each['content']}" for each in safe)
        else:
            calls = reply.calls if any(each["role"] == "tool" for each in safe) else ()
            closing = self._call_closing if calls else self._closing
            text = self._rendered(calls, safe, self._safe(tools))
            if closing is None or not text.startswith(closing[0]):
                roles = ", ".join(each["role"] for each in safe)
                raise RequestError(f"the model's chat template refuses messages of {roles} after a reply")
            text = text.removeprefix(closing[0])
        found = self._encoded(text + self._codec.assistant_prefix, messages, add_special_tokens=False)
        # a reply ends with what the template writes at the end of one
        has_end = last_id in self._codec.end_ids and found.ids[:1] == [last_id]
        return Encoded(found.ids[1:], found.unexpanded_ids[1:]) if has_end else found

    def _encoded(self, text: str, messages: Sequence[Message], *, add_special_tokens: bool) -> Encoded:
        """The tokens of what the template wrote of messages with these pictures."""
        pictures = pictures_in(messages)
        if self._codec.vision is not None:
            return self._codec.vision.encode(text, pictures)
        if pictures:
            raise RequestError("the model reads no pictures")
        return Encoded(self._tokenizer.encode(text, add_special_tokens=add_special_tokens), [])

    def read(self, completion: Completion, sampling: SamplingParams, tools: Sequence[Schema], turn: int) -> Reply:
        """A completion as a reply. What was cut calls nothing. `turn`: number of turns before it, for ids of calls."""
        # Without calls: its text, and what is thinking of it.
        text, ids = self._codec.judged(completion.token_ids, sampling), list(completion.token_ids)
        thinking, mark, content = text.partition(THINKING_ENDS) if THINKING_ENDS in text else ("", "", text)
        is_cut = completion.finish_reason is FinishReason.LENGTH
        found: list[tuple[int, int, list[tuple[str, Any]]]] = []

        # With calls. Thinking, which may quote some, ends at the first mark that is in none; text of the same turn is
        # what comes before them.
        if tools and self._reader is not None and not is_cut:
            ids = ids[:-1] if ids and ids[-1] in self._codec.end_ids else ids
            whole = self._codec.decode(ids, skip_special_tokens=False)
            found = [*self._reader.calls(whole, tools)]
            spans = [(begin, end) for begin, end, calls in found if calls]
            marks = [mark.span() for mark in re.finditer(THINKING_ENDS, whole)]
            start = next((b for a, b in marks if not any(begin < a < end for begin, end in spans)), 0)
            found = [*self._reader.calls(whole[start:], tools)] if start else found
            if begin := [begin for begin, _, calls in found if calls]:
                thinking, content = (self._special.sub("", each) for each in (whole[:start], whole[start:][: begin[0]]))

        named = [call for _, _, calls in found for call in calls]
        # nine digits: Mistral's templates want them
        calls = tuple(Call(f"{turn:05}{n:04}", name, arguments) for n, (name, arguments) in enumerate(named))
        thinking = thinking.strip().removeprefix("<think>").removesuffix(THINKING_ENDS).strip()
        content = content.strip() if mark or calls else content
        return Reply(text, content, thinking, calls, is_cut, num_malformed=sum(not calls for _, _, calls in found))

    def _rendered(self, calls: Sequence[Call], messages: Sequence[Message], tools: Sequence[Schema] = ()) -> str:
        """What the template writes after a reply with these calls. Their arguments are a mark, because one that was
        sampled may be written in another way than it was sampled. Raises RequestError if it refuses them.
        """
        error = RequestError("the model's chat template leaves out what the policy says")
        for some in (calls, calls[-1:]):  # not all take several calls
            own = [{"id": c.id, "function": {"name": self._safe(c.name), "arguments": {"text": MARK}}} for c in some]
            reply = {"role": "assistant", "content": "" if calls else MARK, "tool_calls": own}
            try:
                text = self._codec.apply([USER, *self.in_form([reply]), *messages], tools)
            except RequestError as raised:
                error = raised
                continue
            if MARK in text:
                return text[text.rindex(MARK) + len(MARK) :]
        raise error

    def _closing_of(self, calls: Sequence[Call]) -> tuple[str, str] | None:
        """What the template writes between a reply and its end, such as what closes a call, and that end. None where it
        does not write the reply, or what comes after it.
        """
        # The text from the end of a reply to the mark in what comes next, a user's message or the result of a call.
        result = {"role": "tool", "name": "probe", "tool_call_id": PROBE_CALL.id, "content": NEXT}
        if self._tokenizer.chat_template is None:
            return None
        try:
            written = self._rendered(calls, [result if calls else {**USER, "content": NEXT}], (PROBE,) if calls else ())
            between = written[: written.index(NEXT)]
        except (RequestError, ValueError):
            return None

        # The end is the first text in it that ends replies; for want of one the first special token, or nothing.
        ends = [(between.index(end), -len(end), end) for end in self._ends if end in between]
        if ends:
            place, _, end = min(ends)
        elif calls:
            return None
        else:
            found = self._special.search(between)
            place, end = (found.start(), found[0]) if found else (0, "")
        return between[:place], end

    def _reader_that_fits(self) -> Reader | None:
        """The one that reads what the template writes for a call."""
        # A reply of text and one of a call are written alike up to where the call begins.
        function = {"name": PROBE_CALL.name, "arguments": PROBE_CALL.arguments}
        reply = {"role": "assistant", "tool_calls": [{"id": PROBE_CALL.id, "function": function}]}
        try:
            plain = self._codec.apply([USER, {"role": "assistant", "content": MARK}])
            text = self._codec.apply([USER, *self.in_form([reply])])
        except RequestError:
            return None
        start = next((i for i, (a, b) in enumerate(zip(plain, text, strict=False)) if a != b), 0)
        written = text[start:]

        # The call ends where the reply does; and a reader fits that reads exactly that call in it.
        end = min((written.index(end) for end in self._ends if end and end in written), default=len(written))
        written = written[:end].rpartition(THINKING_ENDS)[2]
        probe = [[(PROBE_CALL.name, PROBE_CALL.arguments)]]
        return next((r for r in READERS if [calls for _, _, calls in r.calls(written, (PROBE,))] == probe), None)

    def in_form(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template takes them: calls in the form that it writes, and no fields that say nothing. Raises
        RequestError where it would leave out calls.
        """
        found = []
        for message in messages:
            said = {"content": "", **{key: value for key, value in message.items() if value not in (None, [])}}
            if calls := [dict(call) for call in said.get("tool_calls", ())]:
                for call in calls:
                    arguments = arguments_of(call["function"], as_json=self._wants_json)
                    call |= {"type": "function", "function": {**call["function"], "arguments": arguments}}
                said |= {"content": said["content"] or self._blank, "tool_calls": calls}
            found.append(said)
            if calls and self._call_closing is None:
                raise RequestError("the model's chat template cannot write the calls of tools in the messages")
        return found

    def _safe(self, value: Any) -> Any:
        """The same with special tokens as text, see `as_text`."""
        return as_text(value, self._special)


def as_text(value: Any, special: re.Pattern[str]) -> Any:
    """The same with special tokens broken by a space of no width, and without halves of characters: what a tool or a
    user says is text.
    """
    if isinstance(value, str):
        text = value.encode(errors="replace").decode()
        return special.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)
    if isinstance(value, Mapping):
        return {as_text(key, special): as_text(each, special) for key, each in value.items()}
    return [as_text(each, special) for each in value] if isinstance(value, (list, tuple)) else value


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
