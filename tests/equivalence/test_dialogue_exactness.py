"""Episodes are trained on exactly what was sampled: whatever the template, the replies, and what comes between them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from dialogues import BUY, NAMES, call_text, codec_of, model_of, nasty_text, split_at_random
from torch.nn.utils.rnn import pad_sequence

from offline_grpo.errors import ConfigError, RequestError
from offline_grpo.generation.dialogue import Ask, Dialogue
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.rollouts.rows import group_rows, groups_of, parquet, table_of
from offline_grpo.types import Completion, FinishReason, Message, Rollout, RolloutGroup, Rules, SamplingParams, Score

SAMPLING = SamplingParams(max_new_tokens=40)
RULES = Rules(max_turns=4, max_turn_tokens=20, max_environment_tokens=1500, timeout_s=60, tools=())
QUICK = ("gemma4", "gptoss", "lfm2_v2", "llama3_1", "qwen2_5", "qwen3_5_think")
"""A template of each way to write calls."""
COUNT = int(os.environ.get("DIALOGUES", 12))
"""Of each template. DIALOGUES=300 takes minutes."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """So small a model waits for threads most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logprobs_of(
    model: Any, sequences: Sequence[Sequence[int]], wanted: Sequence[Sequence[bool]]
) -> list[tuple[float, ...]]:
    """Of the tokens that are wanted, each sequence in one forward pass."""
    found: list[tuple[float, ...]] = []
    for i in range(0, len(sequences), 32):
        ids, mask = (
            pad_sequence([torch.tensor(row) for row in rows[i : i + 32]], batch_first=True)
            for rows in (sequences, wanted)
        )
        with torch.no_grad():  # causal: padding on the right is not seen
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][mask[:, 1:]]
            logprobs = model.lm_head(hidden).log_softmax(-1).gather(1, ids[:, 1:][mask[:, 1:]][:, None])
        found += [tuple(own.tolist()) for own in logprobs.squeeze(1).split(mask[:, 1:].sum(1).tolist())]
    return found


class Play:
    """One episode, whose next message is drawn from what the last reply was."""

    def __init__(self, name: str, number: int) -> None:
        self.rng, self.codec = random.Random(f"{name} {number}"), codec_of(name)
        self.tools = [BUY] if self.codec.chat._reader is not None and number % 4 else []
        self.messages: list[Message] = [{"role": "user", "content": nasty_text(self.rng, self.codec)}]
        first_ids = self.codec.encode([{"role": "user", "content": ""}])
        self.dialogue = Dialogue(self.codec.chat, SAMPLING, RULES, first_ids, number)
        self.asks: list[Ask] = []

    def ask(self) -> Ask | None:
        ask = self.dialogue.ask(self.messages, self.tools)
        if ask is not None and ask.parent is not None:
            before = ask.parent.token_ids
            assert ask.request.prompt_ids[: len(before)] == before
            new = self.messages[len(ask.parent.key) :]
            assert self.special(ask.request.prompt_ids[len(before) :]) == self.special(
                self.codec.chat.following(
                    ask.parent.reply, before[-1], [{**each, "content": "ok"} for each in new], self.tools
                ).ids
            )
        return ask

    def special(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self.codec.tokenizer.added_tokens_decoder]

    def script(self) -> list[int] | None:
        """The ids of a reply that calls a tool, or two, or whose call is not closed; None: the model writes it."""
        if not self.tools or self.rng.random() < 0.4:
            return None
        text = call_text(self.codec, self.rng.choice((1, 1, 2)))
        assert text is not None
        text = text[:-3] if self.rng.random() < 0.1 else text
        end = self.rng.choice(sorted(self.codec.end_ids)) if self.rng.random() < 0.9 else None
        pieces = self.codec.tokenizer.encode(text, add_special_tokens=False)
        if self.rng.random() < 0.5 and not self.special(pieces):
            pieces = split_at_random(self.rng, self.codec, text)
        return pieces + ([] if end is None else [end])

    def hear(self, ask: Ask, completion: Completion) -> None:
        reply = self.dialogue.answer(ask, completion)
        self.asks.append(ask)
        self.messages.append(reply.message)
        if reply.calls and self.rng.random() < 0.9:
            for call in reply.calls:
                result = {"role": "tool", "name": call.name, "tool_call_id": call.id}
                self.messages.append({**result, "content": nasty_text(self.rng, self.codec)})
        else:
            self.messages.append({"role": "user", "content": nasty_text(self.rng, self.codec)})


def played(name: str, count: int) -> tuple[list[Play], int]:
    """Episodes, and how many of their turns the template refused."""
    codec, num_refused = codec_of(name), 0
    model = model_of(codec)
    client = TransformersClient(model, codec.tokenizer, 512)
    plays = [Play(name, number) for number in range(count)]
    for _ in range(RULES.max_turns + 1):
        asked: list[tuple[Play, Ask, list[int] | None]] = []
        for play in plays:
            try:
                ask = play.ask()
            except RequestError:
                num_refused += 1
                continue
            if ask is not None:
                asked.append((play, ask, play.script()))
        drawn = [(play, ask) for play, ask, script in asked if script is None]
        for index, [completion] in client.generate([ask.request for _, ask in drawn], SAMPLING):
            drawn[index][0].hear(drawn[index][1], completion)
        scripted = [(play, ask, script) for play, ask, script in asked if script is not None]
        whole = [(*ask.request.prompt_ids, *script) for _, ask, script in scripted]
        masks = [[False] * len(ask.request.prompt_ids) + [True] * len(script) for _, ask, script in scripted]
        for (play, ask, script), logprobs in zip(scripted, logprobs_of(model, whole, masks), strict=True):
            reason = FinishReason.STOP if script[-1] in codec.end_ids else FinishReason.LENGTH
            play.hear(ask, Completion(tuple(script), logprobs, reason, (0,) * len(script)))
    return plays, num_refused


def check(name: str, count: int) -> tuple[int, int]:
    """How many turns have trained tokens, and calls."""
    plays, num_refused = played(name, count)
    assert num_refused <= 0.05 * count
    rollouts = [play.dialogue.rollout(Score(0.0, False, {})) for play in plays]
    found = logprobs_of(model_of(codec_of(name)), [r.token_ids for r in rollouts], [r.is_sampled for r in rollouts])
    for play, rollout, logprobs in zip(plays, rollouts, found, strict=True):
        assert rollout.num_sampled == sum(len(ask.completion.token_ids) for ask in play.asks if ask.completion)
        assert [rollout.token_ids[t.start : t.end] for t in rollout.turns] == [
            ask.completion.token_ids for ask in play.asks if ask.completion
        ]
        drawn = compress(rollout.logprobs, rollout.is_sampled)
        assert max((abs(new - old) for new, old in zip(logprobs, drawn, strict=True)), default=0.0) < 1e-5
    assert recorded(rollouts) == rollouts
    return sum(len(r.turns) for r in rollouts), sum(len(ask.reply.calls) for play in plays for ask in play.asks)


def recorded(rollouts: list[Rollout]) -> list[Rollout]:
    """As they are read from a file; logprobs, which it keeps in float32, and texts as they are."""
    table = pq.read_table(
        pa.BufferReader(parquet(table_of("train", [RolloutGroup(None, tuple(rollouts))], None, 0), {}))
    )
    [group] = groups_of(table, group_rows(table).values(), {}.__getitem__)
    pairs = zip(group.rollouts, rollouts, strict=True)
    return [replace(r, logprobs=o.logprobs, text=o.text, conversation=o.conversation) for r, o in pairs]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_what_is_trained_on_is_what_was_sampled(name: str) -> None:
    num_turns, num_calls = check(name, COUNT)
    assert num_turns > 1.5 * COUNT
    assert num_calls > 4 or codec_of(name).chat._reader is None


def test_a_reply_that_is_encoded_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test fails where what was sampled is decoded and encoded: the texts are equal, the tokens are not."""

    def encoded_again(ask: Ask) -> tuple[int, ...]:
        assert ask.completion is not None
        codec = codec_of("qwen2_5")
        text = codec.decode(ask.completion.token_ids, skip_special_tokens=False)
        return ask.request.prompt_ids + tuple(codec.tokenizer.encode(text, add_special_tokens=False))

    monkeypatch.setattr(Ask, "token_ids", property(encoded_again))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check("qwen2_5", 16)


def test_a_template_that_drops_what_the_policy_says_is_refused() -> None:
    codec = codec_of("qwen2_5")
    codec = replace(codec, tokenizer=type(codec.tokenizer)(tokenizer_object=codec.tokenizer.backend_tokenizer))
    codec.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"does not go on after a reply; take a template"):
        codec.chat.check(has_tools=False)
    with pytest.raises(ConfigError, match=r"cannot write calls of tools; take a template.*respond"):
        codec_of("phi3").chat.check(has_tools=True)
