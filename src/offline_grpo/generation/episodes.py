"""Plays problems in turns: between the programs, which ask whenever they like, and the client, which samples."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from offline_grpo import progress
from offline_grpo.engine.http import LOOPBACK
from offline_grpo.engine.streaming import in_background
from offline_grpo.errors import GrpoError, RequestError, ScoreError, told
from offline_grpo.generation.dialogue import OVER, Ask, Dialogue, transcript
from offline_grpo.generation.judging import background_loop, checked, warn_once
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.seeding import derive_seed
from offline_grpo.types import Message, Problem, Reply, RolloutGroup, SamplingParams, SamplingRequest, Schema, Score

if TYPE_CHECKING:
    from offline_grpo.generation.proxy import Proxy

NUM_LIVE = 64  # episodes at a time where they share the run's process (`scoring.workers=0`)
LOOK_S = 0.05  # how often programs are waited for, so that signals are heard in between


@dataclass(eq=False)
class Question:
    """What a program asks the policy."""

    episode: Episode
    messages: Sequence[Message]
    tools: Sequence[Schema]
    longest: int | None
    reply: Future[Reply] = field(default_factory=Future)
    ask: Ask = field(init=False)  # what is sampled for it

    def answer(self, reply: Reply | RequestError) -> None:
        with suppress(InvalidStateError):  # its program has been ended
            self.reply.set_exception(reply) if isinstance(reply, RequestError) else self.reply.set_result(reply)


@dataclass(eq=False)
class Episode:
    """One play of a problem. `ask` and `pay` may be called from any thread; this is the run's side of a `Chat`."""

    problem: Problem
    seed: int
    dialogue: Dialogue
    events: SimpleQueue[Question | Episode]  # it gets what is asked, and at the end the episode
    number: int = 0
    proxy: Proxy | None = None  # of one whose program is a client of OpenAI's API
    score: Future[Score] = field(default_factory=Future)  # of its program, once that plays
    num_asked: int = 0  # replies that the policy owes it
    base_url: str = ""
    api_key: str = ""
    open: set[Future[Reply]] = field(default_factory=set)
    is_over: bool = False
    failure: str = ""  # why it has no score, whatever its program returns
    _reply: Reply | None = None  # the last
    _replied_s: float = field(default_factory=time.monotonic)

    def start(self, task: Any) -> None:
        """Let the task's program play, in the background."""
        # Its client may ask as soon as it plays, so its address comes first.
        if self.proxy is not None:
            self.base_url, self.api_key = self.proxy.open(self.ask)
        if inspect.iscoroutinefunction(task.play):
            self.score = asyncio.run_coroutine_threadsafe(task.play(self.problem, self), background_loop())
        else:
            self.score = in_background(lambda: task.play(self.problem, self))

        def end(_: Future[Score]) -> None:
            if self.proxy is not None:
                self.proxy.end(self.api_key)
            self.events.put(self)
            self.cancel()

        self.score.add_done_callback(end)

    def ask(self, messages: Sequence[Message], tools: Sequence[Schema], longest: int | None = None) -> Future[Reply]:
        """The reply, once it is there, of at most `longest` tokens."""
        question = Question(self, messages, tools, longest)

        def note(reply: Future[Reply]) -> None:
            self._replied_s = time.monotonic()
            self.open.discard(reply)
            if not reply.cancelled() and reply.exception() is None:
                self._reply = reply.result()

        # From here on, another thread may answer or cancel it.
        self.open.add(question.reply)
        question.reply.add_done_callback(note)
        self.events.put(question)
        if self.is_over:  # nobody reads the events any more
            question.reply.cancel()
        return question.reply

    def say(self, messages: Sequence[Message], tools: Sequence[Schema] = ()) -> Reply:
        """See `Chat`, for a program in the run's process."""
        return self.ask(messages, tools).result()

    def pay(self, reward: float) -> None:
        self.dialogue.pay(reward)

    @property
    def working_s(self) -> float:
        """For how long its program has been working by itself: 0 while it waits for the policy."""
        return 0.0 if self.open else time.monotonic() - self._replied_s

    @property
    def place(self) -> str:
        """What the policy said last, such as the call of a tool that its program is busy with."""
        if self._reply is None:
            return "before the policy's first reply"
        return f"after the policy's reply {transcript([self._reply.message])!r:.300}"

    def cancel(self) -> None:
        """End the program, as far as it can be ended, and what it asks."""
        self.is_over = True
        self.score.cancel()
        for reply in list(self.open):
            reply.cancel()

    def result(self) -> Score:
        """The score, which must be there. Raises ScoreError where the program failed in the run's process."""
        if self.failure:
            return Score.unscored(self.failure)
        try:
            return checked(self.score.result())
        except (Exception, SystemExit) as error:  # whatever code of the user's own raises
            if isinstance(error, ScoreError):
                raise
            fix = "HYDRA_FULL_ERROR=1 shows the traceback"
            raise ScoreError(f"problem {self.problem.problem_id} cannot be played, {told(error)}; {fix}") from error


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

    Two sides meet here. Programs run in threads and processes of their own, and say by `events` what they ask, and that
    they are over. The client samples, and takes `requests` one by one as it has room; what it answers goes back to the
    program that asked. A server is asked as questions come. A client that samples in this process gets them once no
    program works any more, always in the same order: what is sampled together changes no token, but the last bits of
    logprobs.
    """
    num_live = getattr(task, "num_live", NUM_LIVE)
    said: set[str] = getattr(task, "said", set())  # see `warn_once`
    num_all = len(draws) * group_size
    proxy: Proxy | None = None
    events: SimpleQueue[Question | Episode] = SimpleQueue()  # what programs ask, and episodes that are over
    episodes: list[Episode] = []  # that have begun: the members of the first draw's group, then those of the second's
    live: set[Episode] = set()  # those of them that are not over
    ready: list[Question] = []  # for the policy
    sent: dict[int, Question] = {}  # to the policy, by the number of the request
    finished: list[int] = []  # draws whose episodes are all over
    answered_s = time.perf_counter()

    def requests() -> Iterator[SamplingRequest | None]:
        nonlocal proxy
        num_sent = 0
        while live or ready or len(episodes) < num_all:
            # 1. Episodes begin where there is room.
            while len(live) < num_live and len(episodes) < num_all:
                index, j = divmod(len(episodes), group_size)
                problem, seed = draws[index]
                assert problem.rules is not None
                if problem.rules.has_address and proxy is None:
                    from offline_grpo.generation.proxy import Proxy

                    proxy = Proxy(codec.chat_template_kwargs, said, getattr(task, "own_address", LOOPBACK))
                first = codec.encode_with(problem.messages, problem.pictures)
                dialogue = Dialogue(codec.chat, sampling, problem.rules, first.ids, seed + j)
                chance = derive_seed(seed, "environment")  # the same for all of a group
                own_proxy = proxy if problem.rules.has_address else None
                episode = Episode(problem, chance, dialogue, events, len(episodes), own_proxy)
                episodes.append(episode)
                live.add(episode)
                episode.start(task)
            # 2. What is ready is sampled, unless a program may still add to what is sampled together.
            is_early = client.is_local and any(episode.num_asked == 0 for episode in live)
            if ready and not is_early:
                if client.is_local:
                    ready.sort(key=lambda question: question.episode.number)
                question = ready.pop(0)
                if question.episode in live:  # else its program has ended
                    sent[num_sent] = question
                    num_sent += 1
                    yield question.ask.request
                continue
            # 3. Otherwise the next event is looked at, or waited for if there is nothing else to do.
            try:
                event = events.get(timeout=LOOK_S) if is_early or not sent else events.get_nowait()
            except Empty:
                if not is_early:
                    yield None
                continue
            if isinstance(event, Question):
                # 4. A program asks: what is within its limits is for the policy, and beyond them its reply is empty.
                try:
                    ask = event.episode.dialogue.ask(event.messages, event.tools, event.longest)
                except Exception as error:  # whatever a chat template raises at what a program sent
                    event.answer(RequestError(str(error) if isinstance(error, GrpoError) else told(error)))
                    continue
                if ask is None:
                    event.answer(OVER)
                else:
                    event.ask = ask
                    ready.append(event)
                    event.episode.num_asked += 1
            else:
                # 5. An episode is over, and perhaps the last one of its group.
                live.remove(event)
                progress.report(len(episodes) - len(live), num_all, "episodes")
                index = event.number // group_size
                members = episodes[index * group_size : (index + 1) * group_size]
                if len(members) == group_size and live.isdisjoint(members):
                    finished.append(index)

    progress.report(0, num_all, "episodes")
    try:
        with closing(client.generate(requests(), sampling)) as answers:
            for answered in chain(answers, [None]):  # at last comes what is over since the last answer
                if answered is not None:
                    # The policy's reply goes to the program that asked.
                    answered_s = time.perf_counter()
                    number, [completion] = answered
                    question = sent.pop(number)
                    episode = question.episode
                    episode.num_asked -= 1
                    try:
                        question.answer(episode.dialogue.answer(question.ask, completion))
                    except Exception as error:  # whatever reading calls raises at what the policy said
                        reason = f"a reply of the policy cannot be read, {told(error)}"
                        about = f"problem {episode.problem.problem_id}, {reason}"
                        warn_once(said, "reply", f"{about}; its episode has no score (scoring.on_failure)")
                        episode.failure = f"raised: {reason}"
                        episode.cancel()
                # Groups whose episodes are all over by now.
                while finished:
                    index = finished.pop()
                    problem, members = draws[index][0], episodes[index * group_size : (index + 1) * group_size]
                    rollouts = tuple(each.dialogue.rollout(each.result()) for each in members)
                    yield index, RolloutGroup(problem, rollouts)
        on_scored(time.perf_counter() - answered_s)
    finally:
        for episode in live:
            episode.cancel()
        if proxy is not None:
            proxy.close()
