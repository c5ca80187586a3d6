"""Dialogues: which message is the reply that was sampled, and which tokens of an episode are whose."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from dialogues import BUY, CODEC, call_text, codec_of, ids

from offline_grpo.errors import RequestError
from offline_grpo.generation.dialogue import Ask, Dialogue
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.types import Completion, FinishReason, Message, Rules, SamplingParams, SamplingRequest, Score

SAMPLING = SamplingParams(max_new_tokens=400)
RULES = Rules(max_turns=8, max_turn_tokens=None, max_environment_tokens=4000, timeout_s=60)
ASK: Message = {"role": "user", "content": "Which?"}
SAID = "<think>\nhm\n</think>\n\nI buy. \n"
"""White space before a call, which the text between them is without, and at the end of a reply."""


def dialogue_of(codec: TokenizerCodec) -> Dialogue:
    return Dialogue(codec.chat, SAMPLING, RULES, codec.encode([ASK]), 7)


def answered(dialogue: Dialogue, codec: TokenizerCodec, messages: Sequence[Message], text: str, tools: Any = ()) -> Ask:
    ask = dialogue.ask(messages, tools)
    assert ask is not None
    token_ids = (*codec.tokenizer.encode(text, add_special_tokens=False), codec.tokenizer.eos_token_id)
    completion = Completion(token_ids, (0.0,) * len(token_ids), FinishReason.STOP, (0,) * len(token_ids))
    dialogue.answer(ask, completion)
    return ask


def as_text(message: Any, change: Callable[[Any], Any] = lambda arguments: arguments) -> Any:
    functions = [call["function"] for call in message["tool_calls"]]
    functions = [{**each, "arguments": change(each["arguments"])} for each in functions]
    calls = [{"id": "1", "function": {**each, "arguments": json.dumps(each["arguments"])}} for each in functions]
    return {**message, "tool_calls": calls}


CALLED: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda m: m,
    "arguments as JSON": as_text,
    "a float that is whole": lambda m: as_text(m, lambda arguments: {"price": 3.0, "name": arguments["name"]}),
    "other ids": lambda m: {**m, "tool_calls": [{**each, "id": "call_x"} for each in m["tool_calls"]]},
    "without thinking": lambda m: {name: value for name, value in m.items() if name != "reasoning_content"},
    "fields of OpenAI's client": lambda m: {**m, **dict.fromkeys(("refusal", "annotations", "audio", "function_call"))},
}
PLAIN: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda m: m,
    "stripped": lambda m: {"role": "assistant", "content": m["content"].strip()},
    "with white space": lambda m: {**m, "content": f"\n{m['content']} "},
    "thinking in the content": lambda m: {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{m['content']}"},
    "as a completion": lambda m: {"role": "assistant", "content": SAID},
    "no calls": lambda m: {**m, "tool_calls": []},
    "null calls": lambda m: {**m, "tool_calls": None, "refusal": None},
}


@pytest.mark.parametrize("edit", [*CALLED, *(f"plain: {name}" for name in PLAIN)])
def test_a_reply_is_known_again_whatever_a_client_does_that_says_the_same(edit: str) -> None:
    codec, is_plain = codec_of("qwen3"), edit.startswith("plain: ")
    change = PLAIN[edit.removeprefix("plain: ")] if is_plain else CALLED[edit]
    dialogue, tools = dialogue_of(codec), () if is_plain else [BUY]
    text = SAID if is_plain else SAID + (call_text(codec, 1) or "").rpartition("</think>")[2].strip()
    first = answered(dialogue, codec, [ASK], text, tools)
    assert bool(first.reply.calls) != is_plain
    new = {"role": "user", "content": "Go on."} if is_plain else {"role": "tool", "content": "Bought."}
    second = answered(dialogue, codec, [ASK, change(dict(first.reply.message)), new], "Done.", tools)
    assert second.parent is first
    assert second.request.prompt_ids[: len(first.token_ids)] == first.token_ids
    measured = dialogue.rollout(Score(0.0, False, {})).score.measured
    assert (measured["turns"], measured["sequences"]) == (2.0, 1.0)


def test_a_reply_that_its_program_wanted_short_is_not_cut_by_the_run() -> None:
    """The next prompt has what the template writes at the end of a reply."""
    codec = codec_of("qwen3")
    dialogue = dialogue_of(codec)
    tokens = tuple(codec.tokenizer.encode("No", add_special_tokens=False))
    blank = (0,) * len(tokens)
    ask = dialogue.ask([ASK], (), len(tokens))
    assert ask is not None
    assert ask.request.max_new_tokens == len(tokens)
    dialogue.answer(ask, Completion(tokens, blank, FinishReason.LENGTH, blank))
    assert dialogue.rollout(Score(0.0, False, {})).finish_reason is FinishReason.STOP
    second = answered(dialogue, codec, [ASK, {"role": "assistant", "content": "No"}, ASK], "Done.")
    assert second.parent is ask
    text = codec.decode(second.request.prompt_ids, skip_special_tokens=False)
    assert "No<|im_end|>\n<|im_start|>user\nWhich?<|im_end|>" in text


@pytest.mark.parametrize(
    "rewritten",
    [
        [{**ASK, "content": "Which? "}, {"role": "assistant", "content": "I buy."}],
        [ASK, {"role": "assistant", "content": "I  buy."}],
        [ASK, {"role": "assistant", "content": ""}],
        [ASK, {"role": "user", "content": "I buy."}],
        [ASK, {"role": "assistant", "content": "I buy.", "tool_calls": [{"function": {"name": "buy"}}]}],
    ],
)
def test_what_says_something_else_is_another_sequence(rewritten: list[Message]) -> None:
    codec = codec_of("qwen3")
    dialogue = dialogue_of(codec)
    answered(dialogue, codec, [ASK], SAID)
    assert answered(dialogue, codec, [*rewritten, ASK], "Done.").parent is None


CALL = {"id": "1", "type": "function", "function": {"name": "buy", "arguments": "{}"}}
DEEP: Any = json.loads("[" * 600 + "]" * 600)


def called(call: Any) -> list[Any]:
    return [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "5"}]


REFUSED: list[tuple[Any, Any]] = [
    (called({"function": {"arguments": {}}}), ()),
    (called({"name": "buy"}), ()),
    (called("buy"), ()),
    (called({**CALL, "function": {"name": "buy", "arguments": {"a": DEEP}}}), ()),
    (called({**CALL, "function": {"name": "buy", "arguments": json.dumps({"a": DEEP})}}), ()),
    ([{"content": "?"}], ()),
    (["?"], ()),
    ([ASK, {"role": "assistant", "content": 5}], ()),
    ([ASK], "buy"),
    ([ASK], [5]),
    ([ASK], [{"type": "web_search"}]),
    ([ASK], [{"type": "function", "function": {"description": "no name"}}]),
    ([ASK], [{"type": "function", "function": {"name": "buy", "parameters": {"a": DEEP}}}]),
]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_5_think", "nemotron_3_nano", "gemma4", "deepseekv3", "phi3"])
def test_a_request_that_cannot_be_answered_costs_itself(name: str) -> None:
    codec = codec_of(name)
    dialogue = dialogue_of(codec)
    for messages, tools in [*REFUSED, *([([ASK], [BUY])] if name == "phi3" else [])]:  # phi3 writes no calls
        with pytest.raises(RequestError, match=r"^(the model's chat template|messages and tools must be as) .+\Z"):
            dialogue.ask(messages, tools)
    answered(dialogue, codec, [ASK], "Done.")
    assert dialogue.rollout(Score(0.0, False, {})).score.measured["turns"] == 1


def test_an_odd_history_is_recorded() -> None:
    """A call without arguments, and a message without content, in what the program adds."""
    codec = codec_of("qwen3")
    dialogue = dialogue_of(codec)
    reply = answered(dialogue, codec, [ASK], "Well.").reply.message
    odd = [{"role": "assistant", "tool_calls": [{"function": {"name": "buy"}}]}, {"role": "tool"}]
    answered(dialogue, codec, [ASK, reply, *odd], "Done.")
    text = dialogue.rollout(Score(0.0, False, {})).text
    assert text.splitlines() == ["Well.", "-> buy(null)", "[tool] ", "Done."]


@pytest.mark.parametrize(
    ("first", "asked", "number"),
    [
        ("1+1=", "1+1=", 4),  # 2+2=
        ("1+1=", "9-1+1=", 6),  # 9- too
        ("13579", "2+2=", 8),  # a prompt of its own, which has <bos> alone from the problem's
        ("1111111111111111", "1", 4),
    ],
)
def test_tokens_of_the_environment(first: str, asked: str, number: int) -> None:
    """Of an episode whose problem is `first`, and whose program asks `asked` and then "2+2="."""
    dialogue, start = Dialogue(CODEC.chat, SAMPLING, RULES, ids(f"<bos>{first}"), 7), {"role": "user", "content": asked}
    for messages in ([start], [start, {"role": "assistant", "content": "7"}, {"role": "user", "content": "2+2="}]):
        answered(dialogue, CODEC, messages, "7")
    measured = dialogue.rollout(Score(0.0, False, {})).score.measured
    assert (measured["turns"], measured["environment_tokens"]) == (2.0, float(number))


def test_descriptions_of_tools_are_of_the_environment() -> None:
    codec = codec_of("qwen3")
    dialogue = dialogue_of(codec)
    answered(dialogue, codec, [ASK], "Done.", [BUY])
    measured = dialogue.rollout(Score(0.0, False, {})).score.measured
    added = len(codec.encode([ASK], [BUY])) - len(codec.encode([ASK]))
    assert added > 100
    assert measured["environment_tokens"] == added


def test_calls_that_cannot_be_read_are_measured() -> None:
    codec = codec_of("qwen3")
    dialogue = dialogue_of(codec)
    malformed = '<tool_call>\n{"name": buy}\n</tool_call>\n<tool_call>5</tool_call>'
    first = answered(dialogue, codec, [ASK], malformed, [BUY])
    assert first.reply.calls == ()
    again = {"role": "user", "content": "That is no JSON."}
    answered(dialogue, codec, [ASK, first.reply.message, again], call_text(codec, 1) or "", [BUY])
    measured = dialogue.rollout(Score(0.0, False, {})).score.measured
    assert (measured["malformed_calls"], measured["calls"]) == (2.0, 1.0)


def test_an_episode_may_have_thousands_of_turns() -> None:
    ask = last = Ask(SamplingRequest((1,), 1, 0), None, (), (), ())
    for _ in range(3000):
        last = Ask(last.request, last, (), (), ())
    assert (len(last.path), last.path[0], last.path[-1]) == (3001, ask, last)
