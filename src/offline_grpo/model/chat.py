"""Conversations of several turns: what comes after a reply, as token ids, and the calls of tools in it.

A later prompt is the ids so far, and behind them the ids of the text that the chat template writes between a reply and
the next one. So nothing that was sampled is ever encoded, whatever a template does to old messages.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.types import Call, Completion, FinishReason, Message, Reply, SamplingParams, Schema

if TYPE_CHECKING:
    from offline_grpo.model.text import TokenizerCodec

log = logging.getLogger(__name__)

MARK, NEXT = "Zq7wEnd", "Zq7wNext"
"""Texts that no template writes, in place of a reply and of what comes after it."""
USER: Message = {"role": "user", "content": "?"}
PROBE: Schema = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "count": {"type": "integer", "description": "A number."},
            },
            "required": ["text", "count"],
        },
    },
}
PROBE_CALL = Call("000000000", "probe", {"text": 'a "b" c', "count": 3})
THINKING_ENDS = "</think>"


def _json(text: str) -> Any:
    return json.JSONDecoder().raw_decode(text)[0]


def _gemma(text: str) -> Any:
    """JSON with bare keys, and texts between tokens of their own."""
    parts = text.split('<|"|>')
    parts[::2] = [re.sub(r"(?<=[{,])\s*(\w+)\s*:", r'"\1":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return _json("".join(parts))


def _python(text: str) -> Any:
    """A list of calls with keywords."""
    calls = [call for call in getattr(ast.parse(text, mode="eval").body, "elts", []) if isinstance(call, ast.Call)]
    named = [
        (ast.unparse(call.func), {each.arg: ast.literal_eval(each.value) for each in call.keywords}) for call in calls
    ]
    return json.loads(json.dumps([{"name": name, "arguments": arguments} for name, arguments in named]))


@dataclass(frozen=True)
class Reader:
    """A format of calls.

    Args:
        call: finds a call. Its groups: `name`, or without it `value` has the name; and `rest`, where arguments begin.
        pair: finds an argument in `rest`: key and value; None where `value` reads all.
        value: what `rest` says.
    """

    call: str
    pair: str | None = None
    value: Callable[[str], Any] = _json

    def calls(self, text: str, tools: Sequence[Schema]) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
        """Where each call begins, its name and arguments. One that is malformed is none."""
        for found in re.finditer(self.call, text, re.DOTALL):
            name = found.groupdict().get("name")
            if self.pair is not None:
                pairs = re.findall(self.pair, found["rest"], re.DOTALL)
                yield found.start(), str(name), {key: _typed(value, key, str(name), tools) for key, value in pairs}
                continue
            try:
                value = self.value(found["rest"])
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # the last: a thousand brackets
                continue
            for each in value if isinstance(value, list) else [value]:
                own = {"name": name, "arguments": each} if name else each if isinstance(each, dict) else {}
                arguments = own.get("arguments", own.get("parameters", {}))
                if isinstance(own.get("name"), str) and isinstance(arguments, dict):
                    yield found.start(), own["name"], arguments


READERS = (
    Reader(r"<tool_call>\s*(?P<rest>\{.*?\})\s*</tool_call>"),  # Hermes, Qwen 2.5 and 3
    Reader(  # Qwen 3.5, Nemotron 3
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>(?P<rest>.*?)</function>\s*</tool_call>",
        r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>",
    ),
    Reader(  # GLM 4.5
        r"<tool_call>\s*(?P<name>[^<\s]+)(?P<rest>.*?)</tool_call>",
        r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    ),
    Reader(r"\A\s*(?:<\|python_tag\|>)?\s*(?P<rest>\{\s*\"name\".*\})\s*\Z"),  # Llama 3
    Reader(r"\[TOOL_CALLS\]\s*(?P<rest>\[.*)"),  # Mistral, and its later form
    Reader(r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](?P<rest>\{.*?)(?=\[TOOL_CALLS\]|\Z)"),
    Reader(r"to=functions\.(?P<name>[\w.-]+)[^{]*?<\|message\|>(?P<rest>\{.*)"),  # gpt-oss
    Reader(  # DeepSeek V3, and V3.1
        r"<.tool▁call▁begin.>(?:function<.tool▁sep.>)?(?P<name>[\w.-]+)(?:<.tool▁sep.>|\s*```json)\s*(?P<rest>\{.*?)"
        r"<.tool▁call▁end.>"
    ),
    Reader(r"<\|tool_call>call:(?P<name>[\w.-]+)(?P<rest>\{.*?\})<tool_call\|>", value=_gemma),  # Gemma 4
    Reader(r"<\|tool_call_start\|>\s*(?P<rest>\[.*?\])\s*<\|tool_call_end\|>", value=_python),  # LFM2
    Reader(  # Muse
        r"(?:<atem:function_calls>\s*)?<atem:invoke name=\"(?P<name>[^\"]+)\">(?P<rest>.*?)</atem:invoke>",
        r"<atem:parameter name=\"([^\"]+)\">(.*?)</atem:parameter>",
    ),
)


class ChatFormat:
    """How a model's chat template goes on after a reply, and writes calls.

    Without a template, messages are lines, and there are no calls.
    """

    def __init__(self, codec: TokenizerCodec) -> None:
        self._codec, self._tokenizer = codec, codec.tokenizer
        added = self._tokenizer.added_tokens_decoder.values()
        special = {*self._tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True) if name)
        self._special = re.compile(names or r"(?!)")
        self._ends = {self._codec.decode([token], skip_special_tokens=False) for token in codec.end_ids} - {""}
        self._closing = self._closing_of(())
        if self._closing is not None:  # of a reply that ends with another token than the model's, such as gpt-oss's
            self._ends.add(self._closing[1])
        self._call_closing = self._closing_of((PROBE_CALL,))
        self._reader = None if self._call_closing is None else self._reader_that_fits()

    def check(self, *, has_tools: bool) -> None:
        """Raise ConfigError if conversations cannot go on, or calls cannot be read."""
        other = "take a template that can (model.chat_template=FILE)"
        if self._tokenizer.chat_template is not None and self._closing is None:
            raise ConfigError(f"model.train_id: its chat template does not go on after a reply; {other}")
        if has_tools:
            self.check_tools()
        if self._drops_thinking():
            kept = "this run keeps it, because what was sampled is never written anew"
            log.info("the chat template leaves earlier thinking out where the user speaks again; %s", kept)

    def check_tools(self) -> None:
        """Raise ConfigError if calls of tools cannot be written or read."""
        if self._reader is None:
            can = "cannot write calls of tools" if self._call_closing is None else "writes calls in an unknown form"
            fix = "take a template that can (model.chat_template=FILE), or play without tools, by `respond(self, text)`"
            raise ConfigError(f"task: it has tools, and the model's chat template {can}; {fix} (docs/environments.md)")

    def _drops_thinking(self) -> bool:
        """Whether the template knows of thinking, and leaves that of a reply out once the user speaks again."""
        knows = any(
            name in str(self._tokenizer.chat_template) for name in ("thinking", "reasoning_content", "</think>")
        )
        reply = {"role": "assistant", "content": NEXT, "reasoning_content": MARK, "thinking": MARK}
        return knows and MARK not in self._codec.apply([USER, reply, USER])

    def first(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The ids of a conversation, and of what begins the next reply. Raises ConfigError as `TextCodec.encode`."""
        return self._codec.encode([self._safe(each) for each in messages], tools)

    def following(self, reply: Reply, last_id: int, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The ids between a reply, whose last one is `last_id`, and the next reply.

        Raises:
            ConfigError: the template refuses the messages, or writes something else before them than it did at first.
        """
        ids = self._tokenizer.encode(self._text_after(reply.calls, messages, tools), add_special_tokens=False)
        # a reply ends with what the template writes at the end of one
        return ids[1:] if last_id in self._codec.end_ids and ids[:1] == [last_id] else ids

    def read(self, completion: Completion, sampling: SamplingParams, tools: Sequence[Schema], turn: int) -> Reply:
        """A completion as a reply. What was cut calls nothing.

        Args:
            turn: number of turns before it, for the ids of calls.
        """
        text, ids = self._codec.judged(completion.token_ids, sampling), list(completion.token_ids)
        reasoning, mark, content = text.rpartition(THINKING_ENDS)
        thinking = reasoning.strip().removeprefix("<think>").strip()
        is_cut = completion.finish_reason is FinishReason.LENGTH
        if is_cut or not tools or self._reader is None:
            return Reply(text, content.strip() if mark else content, thinking, (), is_cut)
        if ids and ids[-1] in self._codec.end_ids:
            ids.pop()
        whole = self._codec.decode(ids, skip_special_tokens=False).rpartition(THINKING_ENDS)[2]
        found = list(self._reader.calls(whole, tools))
        if found:  # text of one turn: what comes before its calls
            content = self._special.sub("", whole[: found[0][0]])
        # nine digits: Mistral's templates want them
        calls = tuple(Call(f"{turn:05}{n:04}", name, arguments) for n, (_, name, arguments) in enumerate(found))
        return Reply(text, content.strip() if mark or calls else content, thinking, calls)

    def _text_after(self, calls: Sequence[Call], messages: Sequence[Message], tools: Sequence[Schema]) -> str:
        safe = [self._safe(each) for each in messages]
        if self._tokenizer.chat_template is None:
            return "".join(f"\n{each['content']}" for each in safe) + self._codec.assistant_prefix
        has_results = any(each["role"] == "tool" for each in safe)
        closing = self._call_closing if has_results and calls else self._closing
        written = self._rendered(calls if has_results else (), safe, tools)
        if closing is None or isinstance(written, Exception) or not written.startswith(closing[0]):
            roles = ", ".join(each["role"] for each in safe)
            reason = f": {reason_of(written)}" if isinstance(written, Exception) else ""
            raise ConfigError(f"the model's chat template refuses messages of {roles} after a reply{reason}")
        return written.removeprefix(closing[0]) + self._codec.assistant_prefix

    def _rendered(
        self, calls: Sequence[Call], messages: Sequence[Message], tools: Sequence[Schema] = ()
    ) -> str | Exception:
        """What the template writes after a reply with these calls. Their arguments are a mark, because one that was
        sampled may be written in another way than it was sampled.
        """
        error: Exception = ConfigError("it leaves out what the policy says")
        # templates differ in whether they take several calls, empty contents, and arguments as JSON
        for some, content, as_json in product((calls, calls[-1:]), ("", None), (False, True)):
            arguments = json.dumps({"text": MARK}) if as_json else {"text": MARK}
            functions = [{"name": call.name, "arguments": arguments} for call in some]
            own = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(some, functions, strict=True)
            ]
            reply = {"role": "assistant", **({"content": content, "tool_calls": own} if calls else {"content": MARK})}
            try:
                text = self._codec.apply([USER, reply, *messages], tools)
            except (TemplateError, TypeError, AttributeError, KeyError) as raised:
                error = raised
                continue
            if MARK in text:
                return text[text.rindex(MARK) + len(MARK) :]
        return error

    def _closing_of(self, calls: Sequence[Call]) -> tuple[str, str] | None:
        """What the template writes between a reply and its end, such as what closes a call, and that end. None where it
        does not write the reply, or what comes after it.
        """
        result = {"role": "tool", "name": "probe", "tool_call_id": PROBE_CALL.id, "content": NEXT}
        if self._tokenizer.chat_template is None:
            return None
        written = self._rendered(calls, [result if calls else {**USER, "content": NEXT}], (PROBE,) if calls else ())
        if isinstance(written, Exception) or NEXT not in written:
            return None
        between = written[: written.index(NEXT)]
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
        plain = self._codec.apply([USER, {"role": "assistant", "content": MARK}])
        for content, as_json in product(("", None), (False, True)):
            arguments = json.dumps(PROBE_CALL.arguments) if as_json else dict(PROBE_CALL.arguments)
            call = {"id": PROBE_CALL.id, "type": "function", "function": {"name": "probe", "arguments": arguments}}
            reply = {"role": "assistant", "content": content, "tool_calls": [call]}
            try:
                text = self._codec.apply([USER, reply])
            except (TemplateError, TypeError, AttributeError, KeyError):
                continue
            start = next((i for i, (a, b) in enumerate(zip(plain, text, strict=False)) if a != b), 0)
            written = text[start:]
            end = min((written.index(end) for end in self._ends if end and end in written), default=len(written))
            written = written[:end].rpartition(THINKING_ENDS)[2]
            for reader in READERS:
                if [each[1:] for each in reader.calls(written, (PROBE,))] == [("probe", PROBE_CALL.arguments)]:
                    return reader
        return None

    def _safe(self, value: Any) -> Any:
        """The same with special tokens broken by a space of no width, and without halves of characters: what a tool or
        a user says is text.
        """
        if isinstance(value, str):
            text = value.encode(errors="replace").decode()
            return self._special.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)
        if isinstance(value, Mapping):
            return {key: self._safe(each) for key, each in value.items()}
        return [self._safe(each) for each in value] if isinstance(value, (list, tuple)) else value


def _typed(value: str, key: str, name: str, tools: Sequence[Schema]) -> Any:
    """An argument as its tool's schema has it; text where that is not JSON."""
    functions = (tool["function"] for tool in tools)
    parameters = next((each["parameters"] for each in functions if each["name"] == name), {})
    if parameters.get("properties", {}).get(key, {}).get("type", "string") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value, value)  # as Qwen 3.5's template writes them
