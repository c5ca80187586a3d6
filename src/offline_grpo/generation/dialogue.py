"""The tokens of an episode: what the policy is asked, turn by turn, and what it said."""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from offline_grpo.errors import RequestError
from offline_grpo.model.text import THINKING_ENDS, ChatFormat
from offline_grpo.model.tool_calls import arguments_of, is_deep
from offline_grpo.seeding import derive_seed
from offline_grpo.types import (
    Completion,
    FinishReason,
    Message,
    Picture,
    Reply,
    Rollout,
    Rules,
    SamplingParams,
    SamplingRequest,
    Schema,
    Score,
    Turn,
    joined_routes,
    num_pictures,
    pictures_in,
    text_of,
)

OVER = Reply(is_cut=True)  # the answer to whoever asks for more than the limits allow: nothing, and that it is cut
_LONGEST_TOKEN = 64
"""Characters that a token has at most, on average: of longer texts nothing is encoded to find that they do not fit."""


@dataclass(eq=False)
class Ask:
    """One request of the policy, and where it stands in its dialogue."""

    request: SamplingRequest
    parent: Ask | None
    messages: tuple[Message, ...]  # all, the reply too once it is there
    key: tuple[Any, ...]  # of those, see `_canonical`
    tools: tuple[Schema, ...]
    is_short: bool = False  # its program wants fewer tokens than the run would allow
    completion: Completion | None = None
    reply: Reply = OVER
    reward: float = 0.0

    @property
    def path(self) -> list[Ask]:
        """From the first turn to this one."""
        path: list[Ask] = [self]
        parent = self.parent
        while parent is not None:
            path.append(parent)
            parent = parent.parent
        return path[::-1]

    @property
    def hit_limit(self) -> bool:
        """Whether the reply was cut, and not because its program wanted it short."""
        return self.reply.is_cut and not self.is_short

    @property
    def num_sampled(self) -> int:
        """Tokens, of all turns up to this one."""
        return sum(len(ask.completion.token_ids) for ask in self.path if ask.completion is not None)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt, and what was sampled after it."""
        return self.request.prompt_ids + (self.completion.token_ids if self.completion is not None else ())

    @property
    def unexpanded_ids(self) -> tuple[int, ...]:
        """The same, with one placeholder in the place of a picture."""
        begun = self.request.unexpanded_ids or self.request.prompt_ids
        return begun + (self.completion.token_ids if self.completion is not None else ())


@dataclass(eq=False)
class Dialogue:
    """All that is asked in an episode, as a tree: messages that go on after a reply get that reply's ids and new ones
    behind them, and all others, such as a history that was rewritten, begin another sequence. The leaves of the tree
    are the sequences of a `Rollout`.

    Args:
        first_ids: the prompt of the problem, beside which `Rules.max_environment_tokens` counts. Both, and the tokens
            that may be sampled, fit into the model's context.
        seed: of the episode's tokens. A prompt's depends on its ids, and on how often it was asked.
    """

    chat: ChatFormat
    sampling: SamplingParams
    rules: Rules
    first_ids: Sequence[int]
    seed: int
    _answered: list[Ask] = field(default_factory=list, init=False)
    _num_asked: Counter[tuple[int, ...]] = field(default_factory=Counter, init=False)
    _hit_limit: bool = field(default=False, init=False)

    def ask(self, messages: Sequence[Message], tools: Sequence[Schema], longest: int | None = None) -> Ask | None:
        """What is to be sampled for a conversation, at most `longest` tokens; None beyond the limits.

        Raises:
            RequestError: the model's chat template refuses it, or has no calls of tools.
        """
        # 1. What a program sends is data: what has another form is refused in a sentence.
        try:
            messages = [*map(_read, messages)]
            key = tuple(map(_canonical, messages))
            roles, named = [each["role"] for each in messages], [tool["function"]["name"] for tool in tools]
            if is_deep([key, messages, tools]) or not all(isinstance(name, str) for name in [*roles, *named]):
                raise ValueError("roles and names must be text, and only a few lists and objects be within each other")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RequestError(f"messages and tools must be as OpenAI's API has them ({error!r:.80})") from error
        if named and self.chat.fault is not None:
            raise RequestError(self.chat.fault)
        # 2. The conversation goes on after the reply that it has the most of; without one it begins anew.
        begun = [ask for ask in self._answered if key[: len(ask.key)] == ask.key and len(key) > len(ask.key)]
        begun = [ask for ask in begun if list(ask.tools) == list(tools)]
        parent = max(begun, key=lambda ask: len(ask.key), default=None)
        # 3. No turn is left, or the text is so long that to encode it would tell nothing.
        rules, path = self.rules, [] if parent is None else parent.path
        new = messages if parent is None else messages[len(parent.key) :]
        num_sampled = 0 if parent is None else parent.num_sampled
        most = len(self.first_ids) + rules.max_environment_tokens  # of what is not sampled
        length = len(str([*new, *tools]))
        if len(path) >= rules.max_turns or (path and path[-1].hit_limit) or length > most * _LONGEST_TOKEN:
            self._hit_limit = True
            return None
        # 4. Ids so far are kept as they are; only what is new is encoded.
        if parent is None:
            added, ids, unexpanded, pictures = self.chat.first(messages, tools), (), (), ()
        else:
            ids, unexpanded, pictures = parent.token_ids, parent.unexpanded_ids, parent.request.pictures
            added = self.chat.following(parent.reply, ids[-1], new, tools)
        ids, pictures = ids + tuple(added.ids), pictures + tuple(pictures_in(new))
        unexpanded += tuple(added.unexpanded_ids or added.ids)
        limit = min(rules.max_turn_tokens or inf, self.sampling.max_new_tokens - num_sampled)
        if limit < 1 or len(ids) - num_sampled > most:
            self._hit_limit = True
            return None
        # 5. Equal prompts are drawn with other seeds each time.
        seed = derive_seed(self.seed, hashlib.sha256(np.array(ids).tobytes()).hexdigest(), self._num_asked[ids])
        self._num_asked[ids] += 1
        is_short = longest is not None and longest < limit
        limit = int(max(longest, 1) if longest is not None and is_short else limit)
        own: Any = {"pictures": pictures, "unexpanded_ids": unexpanded} if pictures else {}
        request = SamplingRequest(ids, 1, seed, limit, self.seed, **own)
        return Ask(request, parent, tuple(messages), key, tuple(tools), is_short)

    def answer(self, ask: Ask, completion: Completion) -> Reply:
        """The policy's reply."""
        turn = 0 if ask.parent is None else len(ask.parent.path)
        ask.completion = completion
        reply = self.chat.read(completion, self.sampling, ask.tools, turn)
        sizes = len(ask.request.prompt_ids), len(completion.token_ids)
        ask.reply = replace(reply, num_prompt_tokens=sizes[0], num_tokens=sizes[1])
        ask.messages += (ask.reply.message,)
        ask.key += (_canonical(ask.reply.message),)
        self._answered.append(ask)
        return ask.reply

    def pay(self, reward: float) -> None:
        """Add a reward to the last turn."""
        if self._answered:
            self._answered[-1].reward += reward

    def rollout(self, score: Score) -> Rollout:
        """The episode as a rollout, its own numbers among those that `score` measured. Without a turn it is the
        problem's prompt alone, and teaches nothing.
        """
        # 1. A sequence for each reply that no other goes on after. A reply of several sequences is trained in the first
        #    of them.
        inner = {ask.parent for ask in self._answered}
        leaves = [ask for ask in self._answered if ask not in inner]
        token_ids, starts, turns = list[int](), list[int](), dict[Ask, Turn]()
        for leaf in leaves:
            starts.append(len(token_ids))
            token_ids += leaf.token_ids
            for ask in leaf.path:
                start, end = starts[-1] + len(ask.request.prompt_ids), starts[-1] + len(ask.token_ids)
                turns.setdefault(ask, Turn(start, end, ask.reward))
        token_ids = token_ids or [*self.first_ids]
        is_sampled, logprobs, versions = [False] * len(token_ids), [0.0] * len(token_ids), [0] * len(token_ids)
        alternatives: list[Sequence[int]] = [()] * len(token_ids)
        for ask, turn in turns.items():
            assert ask.completion is not None
            own = slice(turn.start, turn.end)
            is_sampled[own] = [True] * (turn.end - turn.start)
            logprobs[own], versions[own] = ask.completion.logprobs, ask.completion.versions
            alternatives[own] = ask.completion.alternatives or alternatives[own]
        # 2. What came in between. An agent may send a prompt of its own in place of the problem's, or with words before
        #    and behind it.
        num_others = 0
        for ask in self._answered:
            if ask.parent is None:
                num_others += (Counter(ask.request.prompt_ids) - Counter(self.first_ids)).total()
            else:
                num_others += len(ask.request.prompt_ids) - len(ask.parent.token_ids)
        measured = {
            "turns": float(len(turns)),
            "sequences": float(len(leaves)),
            "calls": float(sum(len(ask.reply.calls) for ask in turns)),
            "malformed_calls": float(sum(ask.reply.num_malformed for ask in turns)),
            "environment_tokens": float(num_others),
        }
        was_cut = self._hit_limit or any(leaf.hit_limit for leaf in leaves)
        return Rollout(
            token_ids=tuple(token_ids),
            is_sampled=tuple(is_sampled),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            temperature=self.sampling.temperature,
            finish_reason=FinishReason.LENGTH if was_cut else FinishReason.STOP,
            text="\n".join(transcript(leaf.messages[len(leaf.path[0].messages) - 1 :]) for leaf in leaves),
            score=replace(score, measured={**score.measured, **measured}),
            turns=tuple(turns[ask] for ask in self._answered),
            conversation=tuple(map(_plain, leaves[-1].messages)) if leaves else (),
            starts=tuple(starts or [0]),
            alternatives=tuple(alternatives) if self.sampling.needs_alternatives else None,
            pictures=pictures if any(pictures := tuple(leaf.request.pictures for leaf in leaves)) else (),
            routes=joined_routes(
                len(token_ids),
                [
                    (start, 0 if ask.parent is None else len(ask.parent.token_ids) - 1, ask.completion.routes)
                    for start, leaf in zip(starts, leaves, strict=True)
                    for ask in leaf.path
                    if ask.completion is not None
                ],
            ),
        )


def transcript(messages: Sequence[Message]) -> str:
    """A conversation for people, from the policy's side."""
    lines = []
    for message in messages:
        if message["role"] != "assistant":
            lines.append(f"[{message['role']}] {'[image] ' * num_pictures(message)}{text_of(message)}")
            continue
        if thinking := message.get("reasoning_content"):
            lines.append(f"<think>\n{thinking}\n</think>")
        if message.get("content"):
            lines.append(message["content"])
        for call in (call["function"] for call in message.get("tool_calls") or ()):
            lines.append(f"-> {call['name']}({json.dumps(call.get('arguments'), ensure_ascii=False)})")
    return "\n".join(lines)


def _read(message: Message) -> Message:
    """A message of OpenAI's API, with each picture as the bytes that its data URL has. Raises RequestError for one that
    is none.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    from offline_grpo.model.pictures import opened  # which imports torch

    parts = list[Any]()
    for part in content:
        if "image_url" in part:
            head, _, data = part["image_url"]["url"].partition(";base64,")
            if not head.startswith("data:"):
                raise RequestError("image_url: only data URLs are read (data:image/png;base64,...)")
            part = {"type": "image", "image": Picture(b64decode(data, validate=True))}
            opened(part["image"])  # a broken one ends nothing but its episode's request
        parts.append(part)
    return {**message, "content": parts}


def _plain(message: Message) -> Message:
    """A message whose parts have places for pictures alone."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": "image"} if "image" in part else part for part in content]}


def _canonical(message: Message) -> tuple[Any, ...]:
    """Equal for messages that say the same. Of the policy's, ids, white space at both ends, how arguments are written,
    and thinking, which clients leave out or move into the content, say nothing.
    """
    role, content = message["role"], message.get("content") or ""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], arguments_of(function)) for function in functions]
    return role, content.rpartition(THINKING_ENDS)[2].strip() if role == "assistant" else content, calls
