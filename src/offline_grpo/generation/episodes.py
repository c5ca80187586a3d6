"""Plays problems in turns: between the programs, which ask whenever they like, and the client, which samples."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
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
from offline_grpo.generation.proxy import the_proxy
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
LOOK_S = 0.05
"""How often programs are waited for, so that signals are heard in between."""


@dataclass(eq=False)
class Episode:
    """One play of a problem. `ask` and `pay` may be called from any thread; this is the run's side of a `Chat`."""

    problem: Problem
    seed: int
    dialogue: Dialogue
    events: SimpleQueue[tuple[Episode, _Question | None]]  # None: it is over
    score: Future[Score] = field(init=False)
    base_url: str = ""
    api_key: str = ""
    open: set[Future[Reply]] = field(default_factory=set)
    is_cancelled: bool = False
    _replied_s: float = field(default_factory=time.monotonic)

    def ask(self, messages: Sequence[Message], tools: Sequence[Schema], longest: int | None = None) -> Future[Reply]:
        """The reply, once it is there, of at most `longest` tokens."""
        question = _Question(messages, tools, longest)
        self.open.add(question.reply)
        question.reply.add_done_callback(self._replied)
        self.events.put((self, question))
        if self.is_cancelled:  # nobody reads the events any more
            question.reply.cancel()
        return question.reply

    def _replied(self, reply: Future[Reply]) -> None:
        self._replied_s = time.monotonic()
        self.open.discard(reply)

    @property
    def working_s(self) -> float:
        """For how long its program has been working by itself: 0 while it waits for the policy."""
        return 0.0 if self.open else time.monotonic() - self._replied_s

    def say(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> Reply:
        """See `Chat`, for a program in the run's process."""
        return self.ask(messages, tools).result()

    def pay(self, reward: float) -> None:
        self.dialogue.pay(reward)

    def start(self, task: Any) -> None:
        """Let the task's program play, in the background."""
        if self.problem.rules is not None and self.problem.rules.has_address:
            self.base_url, self.api_key = the_proxy().open(self)
        if inspect.iscoroutinefunction(task.play):
            self.score = asyncio.run_coroutine_threadsafe(task.play(self.problem, self), background_loop())
        else:
            self.score = in_background(lambda: task.play(self.problem, self))
        self.score.add_done_callback(self._over)

    def _over(self, score: Future[Score]) -> None:
        if self.api_key:
            the_proxy().episodes.pop(self.api_key, None)
        self.events.put((self, None))
        self._cancel_open()

    def _cancel_open(self) -> None:
        for future in list(self.open):
            future.cancel()

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
        self.is_cancelled = True
        self.score.cancel()
        self._cancel_open()


@dataclass(eq=False)
class _Question:
    messages: Sequence[Message]
    tools: Sequence[Schema]
    longest: int | None
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
    (`scoring.episodes`).

    A server is asked as requests come. A client that samples in this process gets them once no program works any more,
    always in the same order: what is sampled together changes no token, but the last bits of logprobs.
    """
    num_live = getattr(task, "num_live", NUM_LIVE)
    members = [(index, j) for index in range(len(draws)) for j in range(group_size)]
    episodes: dict[int, list[Episode]] = {index: [] for index in range(len(draws))}
    owners: dict[Episode, int] = {}
    live: set[Episode] = set()
    events: SimpleQueue[tuple[Episode, _Question | None]] = SimpleQueue()
    ready: list[tuple[Episode, _Question, Ask]] = []
    waiting: Counter[Episode] = Counter()  # for replies that have been asked for
    numbers: dict[Episode, int] = {}
    waits = client.is_local
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
        numbers[episode], owners[episode] = len(numbers), index
        episodes[index].append(episode)
        live.add(episode)
        episode.start(task)

    def handle(episode: Episode, question: _Question | None) -> None:
        if question is not None:
            try:
                ask = episode.dialogue.ask(question.messages, question.tools, question.longest)
            except ConfigError as error:  # the program's own fault: the problem's prompt was looked at before
                question.answer(error)
                return
            if ask is None:
                question.answer(OVER)
            else:
                ready.append((episode, question, ask))
                waiting[episode] += 1
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
            is_waited_for = waits and not live <= waiting.keys()
            if ready and not is_waited_for:
                if waits:
                    ready.sort(key=lambda asked: numbers[asked[0]])
                asked = ready.pop(0)
                if asked[0] in live:  # else its program has ended
                    sent[num_sent] = asked
                    num_sent += 1
                    yield asked[2].request
                continue
            try:
                handle(*(events.get(timeout=LOOK_S) if is_waited_for or not sent else events.get_nowait()))
            except Empty:
                if not is_waited_for:
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
                waiting -= Counter([episode])
                question.answer(episode.dialogue.answer(ask, completion))
                yield from groups()
        yield from groups()
        on_scored(time.perf_counter() - answered_s)
    finally:
        for episode in live:
            episode.cancel()
