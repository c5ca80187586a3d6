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
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import islice, product
from typing import TYPE_CHECKING, Any

from offline_grpo.errors import ConfigError, RequestError
from offline_grpo.types import Call, Completion, FinishReason, Message, Reply, SamplingParams, Schema

if TYPE_CHECKING:
    from offline_grpo.model.text import TokenizerCodec

log = logging.getLogger(__name__)

MARK, NEXT = "Zq7wEnd", "Zq7wNext"
"""Texts that no template writes, in place of a reply and of what comes after it."""
USER: Message = {"role": "user", "content": "?"}
_TEXT, _COUNT = {"type": "string", "description": "A text."}, {"type": "integer", "description": "A number."}
_PARAMETERS = {"type": "object", "properties": {"text": _TEXT, "count": _COUNT}, "required": ["text", "count"]}
PROBE: Schema = {"type": "function", "function": {"name": "probe", "description": "Probe.", "parameters": _PARAMETERS}}
PROBE_CALL = Call("000000000", "probe", {"text": 'a "b" c', "count": 3})
THINKING_ENDS = "</think>"
MAX_DEPTH, MAX_CALLS = 64, 100
"""Lists and objects within each other: more may overflow a stack. Calls of a reply: more are a policy in a loop."""
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
"""Of JSON, beside null."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RecursionError, MemoryError)
"""What the policy's words make parsers raise; the last: a thousand brackets."""
IN_JSON, IN_GEMMA = r'"(?:\\.|[^"\\\n])*"?', r'<\|"\|>.*?(?:<\|"\|>|\Z)'
IN_PYTHON = r"""'(?:\\.|[^'\\])*(?:'|\Z)|"(?:\\.|[^"\\])*(?:"|\Z)"""
"""Texts, in which nothing is the end of a call."""


def _json(text: str) -> Any:
    return json.JSONDecoder().raw_decode(text)[0]


def _gemma(text: str) -> Any:
    """JSON with bare keys, and texts between tokens of their own."""
    parts = text.split('<|"|>')
    parts[::2] = [re.sub(r"\bNone\b(?!\s*:)", "null", part) for part in parts[::2]]
    parts[::2] = [re.sub(r'(?<=[{,])\s*([^:,{}\[\]"\s]+)\s*:', r'"\1":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return _json("".join(parts))


def _python(text: str) -> Any:
    """A list of calls with keywords. Templates write line breaks in texts as they are, and what is in lists as JSON."""
    names = {"true": "True", "false": "False", "null": "None"}
    lines = str.maketrans({"\n": r"\n", "\r": r"\r"})
    text = re.sub(rf"{IN_PYTHON}|\w+", lambda found: names.get(found[0], found[0].translate(lines)), text)
    calls: list[Any] = getattr(ast.parse(text, mode="eval").body, "elts", [])
    if any(call.args for call in calls):
        raise ValueError("an argument has no name")
    named = [
        (ast.unparse(call.func), {each.arg: ast.literal_eval(each.value) for each in call.keywords}) for call in calls
    ]
    return json.loads(json.dumps([{"name": name, "arguments": arguments} for name, arguments in named]))


@dataclass(frozen=True)
class Reader:
    """A format of calls.

    Args:
        call: finds what opens a call, and all of a call that is well-formed. Its groups: `name`, or without it `value`
            has the name; and `rest`, where arguments begin.
        pair: finds an argument in `rest`: key and value; None where `value` reads all.
        value: what `rest` says.
    """

    call: str
    pair: str | None = None
    value: Callable[[str], Any] = _json

    def calls(self, text: str, tools: Sequence[Schema]) -> Iterator[tuple[int, int, list[tuple[str, Any]]]]:
        """Where each begins and ends, with names and arguments; without any where it is malformed."""
        for found in islice(re.finditer(self.call, text, re.DOTALL), MAX_CALLS):
            calls: list[tuple[str, Any]] = []
            with suppress(*UNREADABLE):
                name, rest = found.groupdict().get("name"), found["rest"]
                if self.pair is None:
                    value = self.value(rest)
                else:
                    pairs = re.findall(self.pair, rest, re.DOTALL)
                    value = {key: _typed(text, key, str(name), tools) for key, text in pairs}
                own = [{"name": name, "arguments": value}] if name else value if isinstance(value, list) else [value]
                calls = [(each["name"], arguments_of({"arguments": each.get("parameters"), **each})) for each in own]
                if not all(isinstance(n, str) and isinstance(value, dict) and not is_deep(value) for n, value in calls):
                    calls = []
            yield found.start(), found.end(), calls


def _within(mark: str, head: str, end: str, text: str = IN_JSON) -> str:
    """A call, or what opens it alone if it has no end. In what matches `text` nothing is an end."""
    return rf"{mark}(?:{head}(?P<rest>(?>{text}|(?!{mark}|{end}).)*+)(?:{end}))?"


# what looks like the end of an argument is none if neither another one nor the end of all comes next
QWEN = (
    r"\s*<parameter=([^>\n]+)>\n?((?:(?!</function>\s*</tool_call>).)*?)\n?</parameter>"
    r"(?=\s*(?:<parameter=|</function>|\Z))"
)
GLM = (
    r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!</tool_call>\s*<tool_call>).)*?)</arg_value>"
    r"(?=\s*(?:<arg_key>|</tool_call>|\Z))"
)
MUSE = (
    r"\s*<atem:parameter name=\"([^\"]+)\">((?:(?!</atem:invoke>\s*</?atem:).)*?)</atem:parameter>"
    r"(?=\s*(?:<atem:parameter|</atem:invoke>|\Z))"
)
READERS = (
    Reader(_within("<tool_call>", r"\s*", "</tool_call>")),  # Hermes, Qwen 2.5 and 3
    Reader(  # Qwen 3.5, Nemotron 3
        rf"<tool_call>(?:\s*<function=(?P<name>[^>\n]+)>(?P<rest>(?:{QWEN})*+)\s*</function>\s*</tool_call>)?", QWEN
    ),
    Reader(rf"<tool_call>(?:\s*(?P<name>[^<\s]+)(?P<rest>(?:{GLM})*+)\s*</tool_call>)?", GLM),  # GLM 4.5
    Reader(  # Llama 3: a reply begins with one, and others follow
        r"(?:\A|(?<=\}))[\s;]*(?:<\|python_tag\|>\s*)?(?=\{\s*\"(?:name|type)\")"
        rf"(?P<rest>(?>{IN_JSON}|(?!(?<=\}})[\s;]*[{{<]).)*+)"
    ),
    Reader(r"\[TOOL_CALLS\]\s*(?P<rest>(?:\[.*)?)"),  # Mistral, and its later form
    Reader(_within(r"\[TOOL_CALLS\]", r"(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]", r"\Z|(?=\[TOOL_CALLS\])")),
    Reader(  # gpt-oss
        _within(r"to=functions\.", r"(?P<name>[\w.-]+)[^{]*?<\|message\|>", r"\Z|<\|(?:call|end)\|>")
    ),
    Reader(  # DeepSeek V3, and V3.1
        _within(
            "<.tool▁call▁begin.>",
            r"(?:function<.tool▁sep.>)?(?P<name>[\w.-]+)(?:<.tool▁sep.>|\s*```json)\s*",
            "<.tool▁call▁end.>",
        )
    ),
    Reader(_within(r"<\|tool_call>", r"call:(?P<name>[\w.-]+)", r"<tool_call\|>", IN_GEMMA), value=_gemma),  # Gemma 4
    Reader(_within(r"<\|tool_call_start\|>", r"\s*", r"<\|tool_call_end\|>", IN_PYTHON), value=_python),  # LFM2
    Reader(  # Muse
        r"(?:<atem:function_calls>\s*)?<atem:invoke"
        rf"(?: name=\"(?P<name>[^\"]+)\">(?P<rest>(?:{MUSE})*+)\s*</atem:invoke>)?",
        MUSE,
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
        names = [re.escape(name) for name in sorted(special, key=len, reverse=True) if name]
        self._special = re.compile("|".join([*names, MARK, NEXT]))
        self._ends = {self._codec.decode([token], skip_special_tokens=False) for token in codec.end_ids} - {""}
        self._closing = self._closing_of(())
        if self._closing is not None:  # of a reply that ends with another token than the model's, such as gpt-oss's
            self._ends.add(self._closing[1])
        # templates differ in whether a content may be empty beside calls, and arguments be objects or JSON
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

    def first(self, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The ids of a conversation, and of what begins the next reply. Raises RequestError as `following`."""
        return self._codec.ids_of(self._codec.rendered(self._safe(self.in_form(messages)), self._safe(tools)))

    def following(self, reply: Reply, last_id: int, messages: Sequence[Message], tools: Sequence[Schema]) -> list[int]:
        """The ids between a reply, whose last one is `last_id`, and the next reply.

        Raises:
            RequestError: the template refuses the messages, leaves out calls, or writes something else before them than
                it did at first.
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
        ids = self._tokenizer.encode(text + self._codec.assistant_prefix, add_special_tokens=False)
        # a reply ends with what the template writes at the end of one
        return ids[1:] if last_id in self._codec.end_ids and ids[:1] == [last_id] else ids

    def read(self, completion: Completion, sampling: SamplingParams, tools: Sequence[Schema], turn: int) -> Reply:
        """A completion as a reply. What was cut calls nothing.

        Args:
            turn: number of turns before it, for the ids of calls.
        """
        text, ids = self._codec.judged(completion.token_ids, sampling), list(completion.token_ids)
        thinking, mark, content = text.partition(THINKING_ENDS) if THINKING_ENDS in text else ("", "", text)
        is_cut = completion.finish_reason is FinishReason.LENGTH
        found: list[tuple[int, int, list[tuple[str, Any]]]] = []
        if tools and self._reader is not None and not is_cut:
            ids = ids[:-1] if ids and ids[-1] in self._codec.end_ids else ids
            whole = self._codec.decode(ids, skip_special_tokens=False)
            found = [*self._reader.calls(whole, tools)]
            # thinking, which may quote calls, ends at the first mark that is in none
            spans = [(begin, end) for begin, end, calls in found if calls]
            marks = [mark.span() for mark in re.finditer(THINKING_ENDS, whole)]
            start = next((b for a, b in marks if not any(begin < a < end for begin, end in spans)), 0)
            found = [*self._reader.calls(whole[start:], tools)] if start else found
            if begin := [begin for begin, _, calls in found if calls]:  # text of one turn: what comes before its calls
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
        result = {"role": "tool", "name": "probe", "tool_call_id": PROBE_CALL.id, "content": NEXT}
        if self._tokenizer.chat_template is None:
            return None
        try:
            written = self._rendered(calls, [result if calls else {**USER, "content": NEXT}], (PROBE,) if calls else ())
            between = written[: written.index(NEXT)]
        except (RequestError, ValueError):
            return None
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
        function = {"name": PROBE_CALL.name, "arguments": PROBE_CALL.arguments}
        reply = {"role": "assistant", "tool_calls": [{"id": PROBE_CALL.id, "function": function}]}
        try:
            plain = self._codec.apply([USER, {"role": "assistant", "content": MARK}])
            text = self._codec.apply([USER, *self.in_form([reply])])
        except RequestError:
            return None
        start = next((i for i, (a, b) in enumerate(zip(plain, text, strict=False)) if a != b), 0)
        written = text[start:]
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
        """The same with special tokens broken by a space of no width, and without halves of characters: what a tool or
        a user says is text.
        """
        if isinstance(value, str):
            text = value.encode(errors="replace").decode()
            return self._special.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)
        if isinstance(value, Mapping):
            return {self._safe(key): self._safe(each) for key, each in value.items()}
        return [self._safe(each) for each in value] if isinstance(value, (list, tuple)) else value


def arguments_of(function: Mapping[str, Any], *, as_json: bool = False) -> Any:
    """Of a call: an object, or its JSON. Text that is not JSON stays."""
    value = function.get("arguments") or {}
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    return json.dumps(value, ensure_ascii=False) if as_json and not isinstance(value, str) else value


def is_deep(value: Any, left: int = MAX_DEPTH) -> bool:
    """Whether more than `MAX_DEPTH` lists and objects are within each other."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return left < 0 or any(is_deep(each, left - 1) for each in inner)


def _typed(text: str, key: str, name: str, tools: Sequence[Schema]) -> Any:
    """An argument as its tool's schema has it: what it is as JSON where the schema allows that, or else text."""
    root = next((tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), None) or {}
    if key not in (root.get("properties") or {}):
        return text
    kinds = _kinds(root["properties"][key], root, set()) or {*KINDS.values(), "null"}
    try:
        value = json.loads(text)
    except ValueError:
        value = {"True": True, "False": False, "None": None}.get(text, text)  # as Qwen 3.5's template writes them
    kind = KINDS.get(type(value), "null")
    is_allowed = kind in kinds or (kind == "integer" and "number" in kinds)
    return text if "string" in kinds and (kind == "string" or not is_allowed) else value


def _kinds(schema: Any, root: Any, seen: set[int]) -> set[str]:
    """The types that a schema names, or what it refers to or chooses from does."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return set()
    seen.add(id(schema))
    inner = [each for name in ("anyOf", "oneOf", "allOf") for each in schema.get(name) or ()]
    if "$ref" in schema:  # such as #/$defs/Item
        inner.append(reduce(lambda place, name: place.get(name, {}), schema["$ref"].split("/")[1:], root))
    values = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    named = schema.get("type") or [KINDS.get(type(each), "null") for each in values]
    own = {named} if isinstance(named, str) else {*named}
    return (own | ({"null"} if schema.get("nullable") else set())).union(*(_kinds(each, root, seen) for each in inner))
