"""Plays problems in turns: between the programs, which ask whenever they like, and the client, which samples."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import closing, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from offline_grpo import progress
from offline_grpo.engine.background import in_background
from offline_grpo.errors import ConfigError, ScoreError, told
from offline_grpo.generation.dialogue import OVER, Ask, Dialogue
from offline_grpo.generation.judging import background_loop, checked
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.seeding import derive_seed
from offline_grpo.types import (
    Message,
    Problem,
    Reply,
    RolloutGroup,
    SamplingParams,
    SamplingRequest,
    Schema,
    Score,
)

NUM_LIVE = 64
"""Episodes at a time where they share the run's process (`scoring.workers=0`)."""
GATHER_S = 0.05
"""How long a client that samples in this process waits for programs that work, so that more is sampled together."""


@dataclass(eq=False)
class Episode:
    """One play of a problem. `ask` and `pay` may be called from any thread; this is the run's side of a `Chat`."""

    problem: Problem
    seed: int
    dialogue: Dialogue
    events: SimpleQueue[tuple[Episode, _Question | None]]  # None: it is over
    score: Future[Score] = field(init=False)
    open: set[Future[Reply]] = field(default_factory=set)

    def ask(self, messages: Sequence[Message], tools: Sequence[Schema]) -> Future[Reply]:
        """The reply, once it is there."""
        question = _Question(messages, tools)
        self.open.add(question.reply)
        self.events.put((self, question))
        return question.reply

    def say(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> Reply:
        """See `Chat`, for a program in the run's process."""
        return self.ask(messages, tools).result()

    def pay(self, reward: float) -> None:
        """See `Chat`."""
        self.dialogue.pay(reward)

    def start(self, task: Any) -> None:
        """Let the task's program play, in the background."""
        if inspect.iscoroutinefunction(task.play):
            self.score = asyncio.run_coroutine_threadsafe(task.play(self.problem, self), background_loop())
        else:
            self.score = in_background(lambda: task.play(self.problem, self))
        self.score.add_done_callback(lambda _: self.events.put((self, None)))

    def result(self) -> Score:
        """The score, which must be there. Raises ScoreError where the program failed in the run's process."""
        try:
            return checked(self.score.result())
        except ScoreError:
            raise
        except (Exception, SystemExit) as error:  # whatever code of the user's own raises
            fix = "HYDRA_FULL_ERROR=1 shows the traceback"
            raise ScoreError(f"problem {self.problem.problem_id} cannot be played, {told(error)}; {fix}") from error

    def cancel(self) -> None:
        """End the program, as far as it can be ended."""
        self.score.cancel()
        for future in self.open:
            future.cancel()


@dataclass(eq=False)
class _Question:
    messages: Sequence[Message]
    tools: Sequence[Schema]
    reply: Future[Reply] = field(default_factory=Future)

    def answer(self, reply: Reply | ConfigError) -> None:
        with suppress(InvalidStateError):  # its program has been ended
            self.reply.set_exception(reply) if isinstance(reply, ConfigError) else self.reply.set_result(reply)


def play_groups(
    client: RolloutClient,
    task: Any,
    codec: TokenizerCodec,
    draws: Sequence[tuple[Problem, int]],
    sampling: SamplingParams,
    *,
    group_size: int,
    on_scored: Callable[[float], None],
) -> Iterator[tuple[int, RolloutGroup]]:
    """As `sample_groups`, for problems with `rules`. As many episodes are live as there is room for
    (`scoring.episodes`); the client takes what they ask as it comes. Which ones are sampled together changes no token.
    """
    num_live = getattr(task, "num_live", NUM_LIVE)
    members = [(index, j) for index in range(len(draws)) for j in range(group_size)]
    episodes: dict[int, list[Episode]] = {index: [] for index in range(len(draws))}
    owners: dict[Episode, int] = {}
    live: set[Episode] = set()
    events: SimpleQueue[tuple[Episode, _Question | None]] = SimpleQueue()
    ready: deque[tuple[Episode, _Question, Ask]] = deque()
    sent: dict[int, tuple[Episode, _Question, Ask]] = {}
    num_sent, answered_s = 0, time.perf_counter()
    done: list[int] = []

    def begin() -> None:
        index, j = members[len(owners)]
        problem, seed = draws[index]
        assert problem.rules is not None
        first_ids = codec.encode(problem.messages)
        dialogue = Dialogue(codec.chat, sampling, problem.rules, first_ids, seed + j)
        episode = Episode(problem, derive_seed(seed, "environment"), dialogue, events)
        owners[episode] = index
        episodes[index].append(episode)
        live.add(episode)
        episode.start(task)

    def handle(episode: Episode, question: _Question | None) -> None:
        if question is not None:
            try:
                ask = episode.dialogue.ask(question.messages, question.tools)
            except ConfigError as error:  # the program's own fault: the problem's prompt was looked at before
                question.answer(error)
                return
            if ask is None:
                question.answer(OVER)
            else:
                ready.append((episode, question, ask))
            return
        live.remove(episode)
        progress.report(len(owners) - len(live), len(members), "episodes")
        index = owners[episode]
        if len(episodes[index]) == group_size and live.isdisjoint(episodes[index]):
            done.append(index)

    def requests() -> Iterator[SamplingRequest | None]:
        nonlocal num_sent
        while live or ready or len(owners) < len(members):
            while len(live) < num_live and len(owners) < len(members):
                begin()
            if ready:
                asked = ready.popleft()
                if asked[0] in live:  # else its program has ended
                    sent[num_sent] = asked
                    num_sent += 1
                    yield asked[2].request
                continue
            num_working = len(live) - len(sent)
            can_wait = num_working > 0 and (client.engine_name is None or not sent)
            try:
                handle(*(events.get(timeout=GATHER_S) if can_wait else events.get_nowait()))
            except Empty:
                yield None

    def groups() -> Iterator[tuple[int, RolloutGroup]]:
        while done:
            index = done.pop()
            rollouts = (episode.dialogue.rollout(episode.result()) for episode in episodes[index])
            yield index, RolloutGroup(draws[index][0], tuple(rollouts))

    progress.report(0, len(members), "episodes")
    try:
        with closing(client.generate(requests(), sampling)) as answers:
            for number, [completion] in answers:
                answered_s = time.perf_counter()
                episode, question, ask = sent.pop(number)
                question.answer(episode.dialogue.answer(ask, completion))
                yield from groups()
        yield from groups()
        on_scored(time.perf_counter() - answered_s)
    finally:
        for episode in live:
            episode.cancel()
