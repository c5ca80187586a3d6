"""Scores completions, and plays episodes, in processes that can be killed: of this machine (`Scorers`), or of all
machines of a Ray cluster (`ClusterScorers`). What runs in those processes is `scoring_worker.py`.

A worker has one score at a time, or one episode. A score that turns out to be async lets its worker go on: that one
awaits many of them, and takes others meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo.engine.http import LOOPBACK
from offline_grpo.engine.ray_actor import connect, fate
from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.generation.judging import about_completion, warn_once
from offline_grpo.generation.scoring_worker import MESSAGE_BYTES, Opening, Setup, failed, frame
from offline_grpo.interfaces import Task, TaskFacts
from offline_grpo.settings import ScoringConfig
from offline_grpo.types import Problem, Reply, Score, Split

if TYPE_CHECKING:
    from offline_grpo.generation.episodes import Episode

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""An async score has so much beyond its deadline, which its worker keeps: that may be busy with another one."""
CLOSE_S = 15.0
LONGEST_LINE = 2**31  # bytes of what a worker says: an episode's program asks with its whole conversation
LOOK_INTERVAL_S = 60.0
"""How often machines are looked for that have none of our actors: new ones, and lost ones, which Ray may still count
for as long."""
MAX_ANSWERS = 4096  # to completions that may be seen again
MAX_LOST = 3  # so many machines may be lost with a completion before it counts as one that kills them
MAX_TRIED = 20  # so many machines may turn out to be lost while a process for an episode is started

Asked = str | tuple[str, ...]
"""A completion's text, or the texts of a group of them."""


class IsolatedTask:
    """A `Task` like `task`, whose `score` is async and asks `scorers`.

    Code that takes longer than `timeout_s`, needs more than `memory_mib`, ends its process or raises costs one score,
    which says so (`Score.failure`). The first failure of each cause is logged.
    """

    def __init__(
        self, task: Task, scorers: Scorers | ClusterScorers, settings: ScoringConfig, num_live: int = 0
    ) -> None:
        self._task, self._scorers, self.num_live, self.own_address = task, scorers, num_live, scorers.own_address
        self._on_failure = settings.on_failure
        facts = TaskFacts.of(task)
        self.rewards_groups, self._is_deterministic = facts.rewards_groups, facts.is_deterministic
        self._answers: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}
        self.said: set[str] = set()  # what was logged once in this run, and is not again
        self._causes = {
            "memory": f"needed more than {settings.memory_mib} MiB (scoring.memory_mib)",
            "crashed": "killed its process",
            "raised": "failed",
            "none": "gave no reward (None)",
        }

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._task.problems(split)

    async def score(self, problem: Problem, text: str) -> Score:
        return self._score(await self._answer(problem, text), about_completion(problem, text))

    async def _answer(self, problem: Problem, text: str) -> dict[str, Any]:
        if not self._is_deterministic:
            return await self._scorers.answer(problem, text)
        key = (problem.problem_id, text)
        if key not in self._answers:
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            self._answers[key] = asyncio.ensure_future(self._scorers.answer(problem, text))
        answer = await asyncio.shield(self._answers[key])  # others may wait for it, too
        if "failure" in answer:  # of the machine, perhaps: the next time may be better
            self._answers.pop(key, None)
        return answer

    async def score_group(self, problem: Problem, texts: tuple[str, ...]) -> list[Score]:
        """See `Task`. A failure is one of all completions."""
        answer = await self._scorers.answer(problem, texts)
        if "failure" in answer:
            return [self._score(answer, about_completion(problem, texts))] * len(texts)
        pairs = zip(answer["scores"], texts, strict=True)
        return [self._score(each, about_completion(problem, text)) for each, text in pairs]

    async def play(self, problem: Problem, episode: Episode) -> Score:
        return self._score(await self._scorers.answer(problem, episode), f"problem {problem.problem_id}")

    def _score(self, answer: dict[str, Any], about: str) -> Score:
        # Without a failure it is a score; else the first of its cause is logged, with its traceback.
        failure = answer.get("failure")
        if failure is None:
            return Score(answer["reward"], answer["is_correct"], answer["parts"], measured=answer["measured"])
        details = answer["details"].rstrip()
        what = self._causes.get(failure, details)
        get = f"scoring.on_failure={self._on_failure}; scoring/num_failed_{failure} counts them"
        text = f"the code that scores {what}; {about}. {get}.\n{details.removeprefix(what)}"
        warn_once(self.said, failure, text.rstrip())
        raised = details.partition("\n")[0] if failure == "raised" else ""
        return Score.unscored(failure if failure == "none" else f"{failure}: {raised or what:.300}")

    def close(self) -> None:
        """End all processes that score."""
        self._scorers.close()


@dataclass(eq=False)
class _Worker:
    """The run's end of a connection to a worker."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    kill: Callable[[], None]  # it, with all that it started
    is_shared: bool  # it takes any request; otherwise it was started for one
    is_alive: bool = True
    inboxes: dict[int, asyncio.Queue[dict[str, Any] | None]] = field(default_factory=dict)  # of open requests
    listening: asyncio.Task[None] | None = None

    def reply(self, reply: asyncio.Future[Reply]) -> None:
        """Pass on what the policy says to an episode's program."""
        if self.is_alive and not reply.cancelled():
            self.writer.write(frame(reply.exception() or reply.result()))


class Host:
    """The process above the workers of this machine. It starts now, because it imports what they need.

    Not `pebble` or `multiprocessing`: a worker awaits many async scores at a time, processes that a score has started
    are killed with it, and nothing outlives a run that is killed.
    """

    def __init__(self, setup: Setup) -> None:
        self._numbers = count()
        self._control, theirs = socket.socketpair()
        with theirs:
            run = f"from offline_grpo.generation.scoring_worker import main; main({theirs.fileno()})"
            self._host = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {run}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._host.stdin is not None
        with self._host.stdin as stdin:  # its settings come by a pipe
            pickle.dump(setup, stdin)

    @property
    def is_closed(self) -> bool:
        return self._control.fileno() < 0

    @property
    def has_died(self) -> bool:
        return self._host.poll() is not None

    async def begin(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Callable[[], None]]:
        """Start a worker: our end of a connection to it, and what kills it."""
        ours, theirs = socket.socketpair()
        number = self.start(theirs)
        return *await asyncio.open_connection(sock=ours, limit=LONGEST_LINE), partial(self.end, number)

    def start(self, theirs: socket.socket) -> int:
        """Start a worker at this end of a connection: its number."""
        number = next(self._numbers)
        with theirs, suppress(OSError):  # the process that starts them has ended, and nobody answers
            socket.send_fds(self._control, [number.to_bytes(MESSAGE_BYTES, "big")], [theirs.fileno()])
        return number

    def end(self, number: int) -> None:
        """Kill a worker with all that it started."""
        with suppress(OSError):  # nothing is left of it where the process that started it has ended
            self._control.send(number.to_bytes(MESSAGE_BYTES, "big"))

    def close(self) -> None:
        """End all processes of it."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._host.wait(CLOSE_S)
        self._host.kill()  # its workers die with it
        self._host.wait()


class Scorers:
    """Has workers started when they are needed, asks them, and has those ended that fail.

    Args:
        host: starts and ends workers; without one this machine's own.
    """

    def __init__(self, setup: Setup, host: Host | ClusterScorers | None = None) -> None:
        self._setup, self._host, self.own_address = setup, host or Host(setup), LOOPBACK
        self._numbers = count()
        self._num_to_start = setup.num_workers
        self._free: asyncio.Queue[_Worker | None] = asyncio.Queue()  # None, or one that has ended: start another
        self._room_alone = asyncio.Semaphore(setup.num_workers)

    async def answer(self, problem: Problem, asked: Asked | Episode) -> dict[str, Any]:
        """A worker's answer: the fields of a `Score`, or of `failed`. To cancel it ends the worker of a score that is
        not async, or of an episode.

        Raises:
            ScoreError: no worker can make the task, or the process above them has ended.
        """
        # Workers start one by one, as long as none is free.
        if self._free.empty() and self._num_to_start > 0:
            self._num_to_start -= 1
            self._free.put_nowait(None)
        worker = await self._free.get()
        if worker is None or not worker.is_alive:
            try:
                worker = await self._start(is_shared=True)
            except BaseException:  # it cannot be started, or the caller has given up
                self._free.put_nowait(None)
                raise
        answer = await self._ask(worker, problem, asked)
        if answer is None:
            # A worker that is killed, or dies, takes all async scores with it that it awaits. Which one is to blame
            # shows when each is scored again, alone.
            async with self._room_alone:
                worker = await self._start(is_shared=False)
                try:
                    answer = await self._ask(worker, problem, asked)
                finally:
                    self._end(worker)
        assert answer is not None  # it was alone
        return answer

    def close(self) -> None:
        """End all processes of it."""
        self._host.close()

    async def _start(self, *, is_shared: bool) -> _Worker:
        worker = _Worker(*await self._host.begin(), is_shared)
        # It says first whether it can make the task: if not, no other one can.
        try:
            first = json.loads(await worker.reader.readline() or '{"broken": "one has died"}')
            if "broken" in first:
                mib = self._setup.memory_bytes // 2**20
                fix = f"scoring.memory_mib={mib} may be too little for what they import; scoring.workers=0 needs none"
                raise ScoreError(f"the processes that score do not work ({fix}): {first['broken']}")
            worker.listening = asyncio.create_task(self._listen(worker))
        finally:
            if worker.listening is None:
                self._end(worker)
        return worker

    async def _listen(self, worker: _Worker) -> None:
        """Hand each message to the request that it is about, until the worker ends."""
        with suppress(OSError, ValueError):  # also what is no message: foreign code has found the connection
            while line := await worker.reader.readline():
                message = json.loads(line)
                if (inbox := worker.inboxes.get(message["number"])) is not None:  # else its caller has given up
                    inbox.put_nowait(message)
        self._end(worker, None if self._host.is_closed else failed("crashed"))

    def _end(self, worker: _Worker, answer: dict[str, Any] | None = None) -> None:
        """Kill a worker with all that it started. `answer` is the one to its request, if it has one alone."""
        if not worker.is_alive:
            return
        worker.is_alive = False
        worker.kill()
        worker.writer.close()
        for inbox in worker.inboxes.values():
            inbox.put_nowait(answer if len(worker.inboxes) == 1 else None)

    async def _ask(self, worker: _Worker, problem: Problem, asked: Asked | Episode) -> dict[str, Any] | None:
        """The worker's answer; None where it ended while it had several requests."""
        number = next(self._numbers)
        inbox = worker.inboxes[number] = asyncio.Queue()
        limit_s, is_awaited, is_answered, message = self._setup.timeout_s, False, False, None
        began = time.monotonic()
        deadline = began + limit_s
        episode = None if isinstance(asked, (str, tuple)) else asked
        opening = asked if isinstance(asked, (str, tuple)) else Opening(asked.seed, asked.base_url, asked.api_key)
        try:
            worker.writer.write(frame(problem, opening, number))
            while not is_answered:
                # 1. How long its code may go on. An episode has a limit for what its program does between two replies
                # of the policy, and one for all of it.
                left_s, limit, place = deadline - time.monotonic(), f"{limit_s:g} s (scoring.timeout_s)", ""
                if episode is not None:
                    assert problem.rules is not None
                    left_s, place = max(left_s, limit_s - episode.working_s), f" {episode.place}"
                    whole_s = problem.rules.timeout_s
                    if began + whole_s - time.monotonic() < left_s:
                        left_s = began + whole_s - time.monotonic()
                        limit = f"{whole_s:g} s (task.episode_timeout_s)"
                if left_s < 0:
                    self._end(worker, failed("timeout", f"took more than {limit}{place}"))
                # 2. The next message; a worker that has ended has left its last one.
                try:
                    message = await asyncio.wait_for(inbox.get(), left_s if worker.is_alive else None)
                except TimeoutError:
                    continue
                # 3. What its code asks of the policy is passed on; all else is an answer.
                if message is not None and "awaits" in message:
                    # The score is async: others may be begun in this worker meanwhile.
                    is_awaited, deadline = True, time.monotonic() + limit_s + GRACE_S
                    if worker.is_shared:
                        self._free.put_nowait(worker)
                elif message is not None and "say" in message:
                    assert episode is not None
                    asyncio.wrap_future(episode.ask(*message["say"])).add_done_callback(worker.reply)
                elif message is not None and "pay" in message:
                    assert episode is not None
                    episode.pay(message["pay"])
                else:
                    is_answered = True
            return message
        finally:
            # Code that needed too much memory, or whose caller has given up, may hold its worker.
            is_full = is_answered and message is not None and message.get("failure") == "memory"
            if is_full or not (is_answered or is_awaited):
                self._end(worker)
            del worker.inboxes[number]
            if worker.is_shared and not is_awaited:
                self._free.put_nowait(worker)


class ScoringActor:
    """The actor on each machine: the `Scorers` there, in the run's working directory where the machine sees it.

    Args:
        paths: where modules are looked for beside the machine's own places.
    """

    def __init__(self, setup: Setup, folder: Path, paths: Sequence[str]) -> None:
        with suppress(OSError):
            os.chdir(folder)
        sys.path.extend(path for path in paths if path not in sys.path)
        self._host = Host(setup)
        self._scorers = Scorers(setup, self._host)

    async def answer(self, problem: Problem, asked: Asked) -> dict[str, Any]:
        return await self._scorers.answer(problem, asked)

    async def begin(self, address: tuple[str, int], key: bytes) -> int:
        """Start a worker that plays an episode: the run itself asks and answers it, by a connection to that address."""
        theirs = socket.create_connection(address)
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs.sendall(key)
        number = self._host.start(theirs)
        if self._host.has_died:  # and no worker starts any more: this machine counts as lost
            os._exit(1)
        return number

    async def end(self, number: int) -> None:
        self._host.end(number)

    async def close(self) -> None:
        self._host.close()


@dataclass(eq=False)
class _Machine:
    name: str
    actor: Any
    num_open: int = 0  # requests, and workers that play episodes


class ClusterScorers:
    """Asks the machine with the fewest open requests. The requests of a lost machine go to another one; an episode that
    it played is lost, as one of a worker that dies is.

    Actors, because a plain Ray task would hold a Ray process for every completion that is awaited.

    Args:
        address, ray_init: see `connect`.
        setup: of the processes on each machine.
    """

    def __init__(self, address: str, ray_init: Mapping[str, Any], setup: Setup) -> None:
        self._address, self._setup = address, setup
        self._is_ours = connect(address, ray_init)
        self._machines: dict[str, _Machine] = {}  # by Ray's id of the node
        self._episodes = Scorers(setup, self)
        self.is_closed = False
        self._look()
        if not self._machines:
            self.close()
            fix = f"no machine of the Ray cluster at placement.address={address} has CPU cores; leave it at false"
            raise ConfigError(f"placement.score_on_cluster=true: {fix}")
        names = ", ".join(machine.name for machine in self._machines.values())
        log.info("scoring on %d machines of the Ray cluster: %s", len(self._machines), names)

    @property
    def own_address(self) -> str:
        """Of this machine, for the others of the cluster."""
        import ray

        return ray.util.get_node_ip_address()

    async def answer(self, problem: Problem, asked: Asked | Episode) -> dict[str, Any]:
        """See `Scorers.answer`. Raises ScoreError as there, also if no machine is left."""
        if not isinstance(asked, (str, tuple)):
            return await self._episodes.answer(problem, asked)
        for _ in range(MAX_LOST):
            _, answer = await self._asked("answer", problem, asked)
            if answer is not None:
                return answer
        return failed("crashed", f"{MAX_LOST} machines of the Ray cluster were lost while they scored it")

    async def begin(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Callable[[], None]]:
        """Start a worker for episodes: see `Host.begin`. Raises ScoreError if that ends one machine after the other."""
        for _ in range(MAX_TRIED):
            key = secrets.token_bytes(16)  # anyone may have connected
            with socket.create_server((self.own_address, 0)) as listening:
                machine, number = await self._asked("begin", listening.getsockname(), key)
                if number is None:
                    continue
                connection, _ = listening.accept()
            reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
            if await reader.read(len(key)) == key:
                machine.num_open += 1
                return reader, writer, partial(self._end, machine, number)
        raise ScoreError(f"no process that plays episodes starts: {MAX_TRIED} machines of the Ray cluster were lost")

    def _end(self, machine: _Machine, number: int) -> None:
        machine.num_open -= 1
        if not self.is_closed:  # else Ray would connect anew
            machine.actor.end.remote(number)

    async def _asked(self, method: str, *args: object) -> tuple[_Machine, Any]:
        """The machine that is least busy, and what it answers; None where it is lost."""
        from ray.exceptions import ActorUnschedulableError, RayActorError, RayTaskError

        # Now and then see whether there are new ones.
        if self.is_closed:
            raise ScoreError("the run leaves the Ray cluster, so nothing is scored there any more")
        if not self._machines or time.monotonic() - self._looked_s > LOOK_INTERVAL_S:
            self._look()
        if not self._machines:
            where = f"in the Ray cluster at placement.address={self._address}"
            raise ScoreError(f"no machine is left {where} to score on")
        node, machine = min(self._machines.items(), key=lambda item: item[1].num_open)
        machine.num_open += 1
        try:
            return machine, await getattr(machine.actor, method).remote(*args)
        except RayTaskError as error:
            raise error.cause from None
        except (RayActorError, ActorUnschedulableError) as error:  # the second: Ray does not know of it yet
            if self._machines.get(node) is machine and not self.is_closed:
                del self._machines[node]
                self._looked_s = time.monotonic()
                words = "the machine %s of the Ray cluster %s; its completions are scored on others"
                log.warning(words, machine.name, fate(error))
            return machine, None
        finally:
            machine.num_open -= 1

    def close(self) -> None:
        """End all processes of it, on every machine."""
        import ray

        self.is_closed = True
        actors = [machine.actor for machine in self._machines.values()]
        with suppress(Exception):  # the cluster may be gone
            ray.get([actor.close.remote() for actor in actors], timeout=CLOSE_S)
        for actor in actors:
            with suppress(Exception):
                ray.kill(actor)
        if self._is_ours:
            ray.shutdown()

    def _look(self) -> None:
        """Start an actor on every machine with CPU cores that has none."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._looked_s = time.monotonic()
        for node in ray.nodes():
            if node["NodeID"] not in self._machines and node["Alive"] and node["Resources"].get("CPU"):
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                # of no CPU core as Ray counts them: those are for servers, and scoring is short
                kind = ray.remote(ScoringActor).options(num_cpus=0, scheduling_strategy=there)
                actor = kind.remote(self._setup, Path.cwd(), sys.path)
                self._machines[node["NodeID"]] = _Machine(node["NodeManagerHostname"], actor)
