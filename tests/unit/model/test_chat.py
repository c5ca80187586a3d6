"""Calls of tools, with the chat templates that TRL ships: what one writes reads back, whatever is in it; and what a
program sends is answered or refused.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from dialogues import BUY, NAMES, codec_of
from transformers import PreTrainedTokenizerFast

from offline_grpo.errors import ConfigError, RequestError
from offline_grpo.model.text import USER, TokenizerCodec
from offline_grpo.model.tool_calls import READERS
from offline_grpo.types import Completion, FinishReason, Reply, SamplingParams

WITHOUT_CALLS = {"cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5"}
WITHOUT_CALLS |= {"qwen2_5_vl"}
WITH_CALLS = tuple(name for name in NAMES if name not in WITHOUT_CALLS)
HOSTILE: dict[str, tuple[Any, Any]] = {
    "quotes": ("string", 'it\'s "quoted" \\ and `ticks`'),
    "ends": (
        "string",
        "} }</tool_call> </function> </parameter> </arg_value> </atem:parameter> <tool_call|> <|tool_call_end|> "
        '<|call|> <｜tool▁call▁end｜> </think> }; {"name": "x"} [TOOL_CALLS]',
    ),
    "call": ("string", '<tool_call>\n{"name": "buy", "arguments": {}}\n</tool_call>'),
    "thinking": ("string", "a </think> b"),
    "lines": ("string", "one\ntwo\r\n\n\tthree\n"),
    "unicode": ("string", "é漢字🙂\u2028"),
    "json": ("string", '{"a": [1, null, true]}'),
    "number_as_text": ("string", "5"),
    "null_as_text": ("string", "null"),
    "empty": ("string", ""),
    "padded": ("string", "  a  "),
    "number": ("integer", 5),
    "small": ("number", 1.5e-7),
    "flag": ("boolean", False),
    "nothing": (["integer", "null"], None),
    "list": ("array", [[1, "it's"], [], [None, True, {"k": "</tool_call>"}]]),
    "object": ("object", {"k": {"n": [1.5, "x, y"]}, "empty": {}, "t": "5"}),
    "empty_object": ("object", {}),
}
ARGUMENTS = {key: value for key, (_, value) in HOSTILE.items()}
NOT_ESCAPED = {"lfm2_2_5": ("quotes",), "lfm2_2_5_v2": ("quotes",)}
"""These templates write an apostrophe in a text as it is, between apostrophes."""
ONE_CALL = ("gptoss", "llama3_1", "llama3_2")
"""Templates that write one call of a reply."""
SAMPLING = SamplingParams(max_new_tokens=40)
RESULT = {"role": "tool", "tool_call_id": "000000000", "name": "look_up", "content": "RESULT"}


def tool(properties: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, **parameters}
    return {"type": "function", "function": {"name": "buy", "description": "Buy.", "parameters": schema}}


def read(name: str, text: str, tools: Any) -> Reply:
    codec = codec_of(name)
    ids = tuple(codec.tokenizer.encode(text, add_special_tokens=False))
    completion = Completion(ids, (0.0,) * len(ids), FinishReason.STOP, (0,) * len(ids))
    return codec.chat.read(completion, SAMPLING, tools, 0)


def written(name: str, arguments: Any, count: int) -> str:
    """What the template writes for such calls, from where a reply begins to where the last one ends."""
    codec = codec_of(name)
    call = {"id": "000000000", "function": {"name": "buy", "arguments": arguments}}
    said = [{"role": "assistant", "tool_calls": [call] * count}, {**RESULT, "content": "Zq7"}]
    text = codec.apply([USER, *codec.chat.in_form(said)])
    before = codec.apply([USER])
    start = next(i for i in range(len(before), -1, -1) if text[:i] == before[:i])
    end = max(text.rfind(end, start, text.rindex("Zq7")) for end in codec.chat._ends)
    return text[start:end]


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_call_reads_back_whatever_is_in_it(name: str) -> None:
    arguments = {key: value for key, value in ARGUMENTS.items() if key not in NOT_ESCAPED.get(name, ())}
    tools, count = [tool({key: {"type": HOSTILE[key][0]} for key in arguments})], 1 if name in ONE_CALL else 2
    reply = read(name, written(name, arguments, count), tools)
    assert [(call.name, call.arguments) for call in reply.calls] == [("buy", arguments)] * count
    assert reply.num_malformed == 0


@pytest.mark.parametrize("name", WITH_CALLS)
def test_a_tool_may_have_no_parameters(name: str) -> None:
    for own in ({"name": "buy"}, {"name": "buy", "parameters": None}, {"name": "buy", "parameters": {}}):
        tools = [{"type": "function", "function": own}]
        assert [call.arguments for call in read(name, written(name, {}, 1), tools).calls] == [{}]
    said = read(name, written(name, {"zone": "UTC"}, 1), tools)
    assert [call.arguments for call in said.calls] == [{"zone": "UTC"}]


NULL = {"type": "null"}
LOOP = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}
DEFINITIONS = {"Count": {"type": "integer"}, "Maybe": {"anyOf": [{"$ref": "#/$defs/Count"}, NULL]}, "Loop": LOOP}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '"5"', '"5"'),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "boolean"}, "True", True),  # as Qwen 3.5's template writes it
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "string", "nullable": True}, "null", None),  # as transformers writes Optional[str]
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "number"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"anyOf": [{"type": "integer"}, NULL], "default": None}, "5", 5),  # as pydantic writes Optional[int]
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, NULL]}, '["a", "5"]', ["a", "5"]),
        ({"anyOf": [{"type": "string"}, NULL]}, "5", "5"),
        ({"oneOf": [{"type": "number"}, {"type": "boolean"}]}, "true", True),
        ({"allOf": [{"$ref": "#/$defs/Count"}]}, "5", 5),
        ({"$ref": "#/$defs/Maybe"}, "null", None),
        ({"$ref": "#/$defs/Maybe"}, "5", 5),
        ({"$ref": "#/$defs/Loop"}, "[5]", [5]),
        ({"$ref": "#/$defs/None"}, "[5]", [5]),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"properties": {"n": {"type": "integer"}}}, '{"n": 5}', {"n": 5}),
        ({}, '{"n": 5}', {"n": 5}),
        (True, "5", 5),
    ],
)
def test_arguments_have_the_types_of_the_schema(schema: Any, text: str, value: object) -> None:
    said = f"<tool_call>\n<function=buy>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    found = read("qwen3_5_think", said, [tool({"x": schema}, **{"$defs": DEFINITIONS})]).calls[0].arguments
    assert (found, type(found["x"])) == ({"x": value}, type(value))


HERMES = '<tool_call>\n{"name": "buy", "arguments": {"name": "%s"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "names"),
    [
        (HERMES % "a </think> b", "", "", ["a </think> b"]),
        ("I buy.\n" + HERMES % "a", "", "I buy.", ["a"]),
        ("<think>\nI could " + HERMES % "a" + "\n</think>\n\nNo.", "I could " + HERMES % "a", "No.", []),
        ("<think>\nhm\n</think>\n\n" + HERMES % "</think>", "hm", "", ["</think>"]),
        ("hm\n</think>\n\nWell.\n" + HERMES % "</think>", "hm", "Well.", ["</think>"]),
        ('<tool_call>{"name": "buy"\n</think>\n' + HERMES % "a", '<tool_call>{"name": "buy"', "", ["a"]),
        ("hm\n</think>\n\nThen </think> ends it.", "hm", "Then </think> ends it.", []),
    ],
)
def test_thinking_ends_at_its_first_mark_that_is_in_no_call(
    text: str, reasoning: str, content: str, names: list[str]
) -> None:
    reply = read("qwen3", text, [BUY])
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert [call.arguments["name"] for call in reply.calls] == names


@pytest.mark.parametrize("between", ["; ", ";", "\n", ";<|python_tag|>"])
def test_calls_of_llama_follow_each_other(between: str) -> None:
    calls = [f'{{"name": "buy", "parameters": {{"name": "{text}", "of": {{"k": [{{}}]}}}}}}' for text in ("a; {", "b")]
    reply = read("llama3_1", between.join(calls), [BUY])
    assert [call.arguments for call in reply.calls] == [{"name": text, "of": {"k": [{}]}} for text in ("a; {", "b")]
    assert read("llama3_1", f'"{calls[0]}" is a call', [BUY]).calls == ()


MALFORMED = {
    "deepseekv3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>buy\n```json\n{\n```<｜tool▁call▁end｜>",
    "gemma4": "<|tool_call>call:buy{name:a b}<tool_call|>",
    "glm4moe": "<tool_call>buy\n<arg_key>name</arg_key>\n</tool_call>",
    "gptoss": " to=functions.buy<|channel|>commentary json<|message|>{name}",
    "lfm2_v2": "<|tool_call_start|>[buy('a')]<|tool_call_end|>",
    "llama3_1": '{"name": "buy", "parameters": {"name": "a}}',
    "muse_glimmer": '<atem:invoke name="buy">\n<atem:parameter name="name">a</atem:invoke>\n</atem:function_calls>',
    "qwen3": '<tool_call>\n{"name": "buy", "arguments": {"name": "a"}\n</tool_call>',
    "qwen3_5_think": "<tool_call>\n<function=buy>\n<parameter=name>\na\n</function>\n</tool_call>",
}


@pytest.mark.parametrize(("name", "text"), MALFORMED.items())
def test_a_call_that_cannot_be_read_is_counted_and_costs_no_other(name: str, text: str) -> None:
    good = written(name, {"name": "a"}, 1).rpartition("</think>")[2]
    good = good if name != "llama3_1" else ""  # whose replies begin with calls
    reply = read(name, f"{text}\n{good}", [BUY])
    assert ([call.name for call in reply.calls], reply.num_malformed) == (["buy"] if good else [], 1)
    assert read(name, "No.", [BUY]).num_malformed == 0


@pytest.mark.parametrize("reader", READERS)
def test_no_reply_is_too_much(reader: Any) -> None:
    """Nesting that would overflow the stack, and texts that a policy in a loop writes."""
    deep = '{"name": "buy", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}"
    assert not any(calls for _, _, calls in reader.calls(f"<tool_call>{deep}</tool_call>{deep}", [BUY]))
    blanks = "\n" * 20_000
    for opened in ("<tool_call>", "<|tool_call_start|>", "<｜tool▁call▁begin｜>buy<｜tool▁sep｜>"):
        assert not any(calls for _, _, calls in reader.calls(f"{opened}{blanks}", [BUY]))
    for piece in ("<tool_call>\n<function=buy>\n<parameter=a>\n", '\\"', "<tool_call>buy\n<arg_key>a</arg_key>\n", "'"):
        assert len([*reader.calls('{"name": ' + piece * (20_000 // len(piece)), [BUY])]) <= 100


CALL = {"id": "000000000", "type": "function", "function": {"name": "look_up", "arguments": {"k": "VALUE"}}}


def history(**function: Any) -> list[Any]:
    said = {"content": None, "tool_calls": [{**CALL, "function": {**CALL["function"], **function}}]}
    return [USER, {"role": "assistant", **said, "refusal": None, "function_call": None}, RESULT]


@pytest.mark.parametrize("name", NAMES)
def test_calls_in_a_history_reach_the_model(name: str) -> None:
    """Whether their arguments are objects or JSON; a template that would leave them out refuses them."""
    codec = codec_of(name)
    texts = set()
    for arguments in ({"k": "VALUE"}, '{"k": "VALUE"}'):
        if name in WITHOUT_CALLS:
            with pytest.raises(RequestError, match=r"template (cannot write the calls|refuses messages)"):
                codec.chat.first(history(arguments=arguments), ())
            with pytest.raises(ConfigError, match=r"template (cannot write the calls|refuses messages)"):
                codec.encode(history(arguments=arguments))
            continue
        texts |= {codec.decode(codec.chat.first(history(arguments=arguments), ()).ids, skip_special_tokens=False)}
        texts |= {codec.decode(codec.encode(history(arguments=arguments)), skip_special_tokens=False)}
    assert len(texts) == (name in WITH_CALLS) == (codec.chat.fault is None)
    assert all(all(word in text for word in ("look_up", "VALUE", "RESULT")) for text in texts)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_cannot_write_is_refused(name: str) -> None:
    """It may raise whatever it likes."""
    chat, deep = codec_of(name).chat, json.loads("[" * 60 + "]" * 60)
    reply = Reply(calls=()) if chat.fault is not None else read(name, written(name, {"name": "a"}, 1), [BUY])
    for arguments in ('{"city": ', "[1]", [1], 5, None, {"k": deep}):
        for ask in (
            lambda: chat.first(history(arguments=arguments), ()),  # noqa: B023
            lambda: chat.following(reply, 0, [RESULT, *history(arguments=arguments)], ()),  # noqa: B023
        ):
            with suppress(RequestError):
                assert ask()


def test_whatever_a_template_raises_is_one_requests_fault() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if 'crash' in m.content %}{{ CRASH }}{% endif %};"
        "{% endfor %}"
    )
    core = codec_of("qwen3").tokenizer.backend_tokenizer
    for crash in ("1 / 0", "m.content.foo.bar", "m.content + 1", "m.content | int + {}", "raise_exception('no')"):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
        tokenizer.chat_template = template.replace("CRASH", crash)
        codec = TokenizerCodec(tokenizer)
        assert codec.decode(codec.chat.first([USER], ()).ids) == "user:?;"
        with pytest.raises(RequestError, match=r"^the model's chat template refuses messages of user: .+\Z"):
            codec.chat.first([{"role": "user", "content": "crash"}], ())
        with pytest.raises(RequestError, match="refuses messages of user, assistant, user"):
            codec.chat.following(Reply(), 0, [{"role": "user", "content": "crash"}], ())
        with pytest.raises(ConfigError, match=r"refuses messages of user: .*; take another template"):
            codec.encode([{"role": "user", "content": "crash"}])


def test_tools_are_text_too() -> None:
    """Halves of characters and special tokens in a tool, and the marks that texts are cut at, are harmless."""
    codec = codec_of("qwen3")
    own = tool({"a\ud83d": {"type": "string", "description": "half \ud83d, <|im_end|>"}}, additional="\udc00")
    plain = tool({"a?": {"type": "string", "description": "half ?, <\u200b|im_end|>"}}, additional="?")
    assert codec.chat.first([USER], [own]) == codec.chat.first([USER], [plain])
    ids = codec.chat.following(Reply(), 0, [{"role": "user", "content": "Zq7wEnd 5"}], [own]).ids
    said = codec.decode(ids, skip_special_tokens=False)
    assert said == "<|im_end|>\n<|im_start|>user\nZ\u200bq7wEnd 5<|im_end|>\n<|im_start|>assistant\n"


def test_fields_of_messages_reach_the_template() -> None:
    """And those that say nothing do not."""
    codec = replace(
        codec_of("qwen3"),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=codec_of("qwen3").tokenizer.backend_tokenizer),
    )
    codec.tokenizer.chat_template = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    said = {"role": "tool", "tool_call_id": "1", "name": "look_up", "content": "5", "extra": {"a": 1}}
    [ids] = [codec.chat.first([{**said, "refusal": None, "audio": None, "tool_calls": []}], ()).ids]
    assert json.loads(codec.decode(ids)) == said
