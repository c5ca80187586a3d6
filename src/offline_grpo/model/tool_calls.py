"""Calls of tools in what a policy says: the formats in which chat templates write them, and their arguments."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

from offline_grpo.types import Schema

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
            # Whatever is not well-formed makes a parser raise, or is no name with an object: then it is no call.
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
    Reader(_within("<tool_call>", r"\s*+", "</tool_call>")),  # Hermes, Qwen 2.5 and 3
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
            r"(?:function<.tool▁sep.>)?(?P<name>[\w.-]+)(?:<.tool▁sep.>|\s*```json)\s*+",
            "<.tool▁call▁end.>",
        )
    ),
    Reader(_within(r"<\|tool_call>", r"call:(?P<name>[\w.-]+)", r"<tool_call\|>", IN_GEMMA), value=_gemma),  # Gemma 4
    Reader(_within(r"<\|tool_call_start\|>", r"\s*+", r"<\|tool_call_end\|>", IN_PYTHON), value=_python),  # LFM2
    Reader(  # Muse
        r"(?:<atem:function_calls>\s*)?<atem:invoke"
        rf"(?: name=\"(?P<name>[^\"]+)\">(?P<rest>(?:{MUSE})*+)\s*</atem:invoke>)?",
        MUSE,
    ),
)


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
