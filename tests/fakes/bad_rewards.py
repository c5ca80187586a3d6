"""Reward functions that misbehave as the problem's answer says. They know the standard library alone."""

import asyncio
import ctypes
import os
import pickle
import subprocess
import sys
import time
import zlib
from functools import partial

STRAY_S = "7654.5"


class Task:
    """Scores with one function, by import path."""

    def __init__(self, path):
        from offline_grpo.task.rewards import load_rewards

        self.rewards = load_rewards(path, 1.0)

    def problems(self, split):
        return []

    def score(self, problem, text):
        return self.rewards.score(problem, text)


class OfGroups:
    """Rewards a completion with 1.0, and a group as the problem's answer says."""

    rewards_groups = True

    def score(self, problem, text):
        from offline_grpo.types import Score

        return Score(1.0, True, {"own": 1.0})

    def score_group(self, problem, texts):
        from offline_grpo.task.rewards import load_rewards

        path = "bad_rewards:group_later" if problem.problem_id == "later" else "bad_rewards:group"
        return load_rewards(path, 1.0, "task.group_reward").score_group(problem, texts)


def group(completions, answers):
    """0 for the first, 1 for the second, ..., unless the answer names something worse."""
    return [misbehaves(answers[0], text) * number for number, text in enumerate(completions)]


async def group_later(completions, answers):
    await asyncio.sleep(100 if answers[0] == "waits" else 0.05)
    return group(completions, answers)


class Measuring:
    """Tells of a completion more than its reward."""

    def score(self, problem, text):
        from offline_grpo.types import Score

        return Score(0.5, False, {"half": 0.5}, measured={"speed": 2.0})


kept = []


def isolated(path, printed=None, **settings):
    """A task that this function scores, in workers."""
    return in_workers(partial(Task, path), printed, **settings)


def in_workers(make, printed=None, **settings):
    """What `make` returns, in workers."""
    from offline_grpo.generation.scoring import IsolatedTask, Scorers

    settings = scoring_config(**settings)
    return IsolatedTask(make(), Scorers(setup_of(make, settings, printed)), settings)


def on_cluster(address, path, **settings):
    """A task that this function scores, on the machines of a Ray cluster."""
    from offline_grpo.generation.scoring import ClusterScorers, IsolatedTask

    settings = scoring_config(**{"workers": 2, "timeout_s": 5.0} | settings)
    setup = setup_of(partial(Task, path), settings)
    return IsolatedTask(Task(path), ClusterScorers(address, {}, setup), settings)


def scoring_config(**settings):
    from offline_grpo.settings import ScoringConfig

    defaults = {"workers": 4, "episodes": 4, "timeout_s": 2.0, "memory_mib": 256}
    defaults |= {"on_failure": "exclude", "stop_at_failed_frac": 1.0, "sandbox": "none"}
    return ScoringConfig(**defaults | settings)


def setup_of(make, settings, printed=None, preload=()):
    from offline_grpo.generation.scoring_worker import Setup

    memory_bytes = settings.memory_mib * 2**20
    return Setup(pickle.dumps(make), preload, settings.workers, settings.timeout_s, memory_bytes, printed)


def judge(task, kind):
    """A completion of a problem whose answer says what its score will do."""
    from offline_grpo.generation.judging import Judgement
    from offline_grpo.types import Problem

    return Judgement(task, Problem(f"p-{kind}", ({"role": "user", "content": "?"},), kind), ["a text"])


def misbehaves(answer, completion):
    """1.0, unless `answer` names something worse."""
    return globals().get(f"_{answer}", lambda: 1.0)()


async def misbehaves_later(answer):
    """The same with async code, and 0.5."""
    if answer == "waits":
        await asyncio.sleep(100)
    await asyncio.sleep(0.5 if answer == "later" else 0.05)
    return 0.5 * misbehaves(answer, "")


def sometimes_awaited(answer):
    """Async where the answer is `later`; otherwise it runs an event loop of its own."""
    if answer == "later":
        return misbehaves_later(answer)
    if answer == "old way":
        return asyncio.get_event_loop().run_until_complete(misbehaves_later(answer))
    return asyncio.run(misbehaves_later(answer))


def _hangs():
    while True:
        pass


def _hangs_in_c():
    ctypes.PyDLL(None).sleep(100)  # with the lock of the interpreter, so that no signal handler of Python runs


def _forks():
    os.fork()
    return 0.75


def _escapes():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            subprocess.run(["sleep", STRAY_S])
        os._exit(0)
    while True:
        pass


def _spawns():
    subprocess.Popen(["sleep", STRAY_S])
    os._exit(0)


def _keeps_a_helper():
    """1.0 if what a shell has left running is still there a second later."""
    shell = subprocess.run(["sh", "-c", f"sleep {STRAY_S} >&2 & echo $!"], stdout=subprocess.PIPE)
    time.sleep(1)
    return float(os.path.exists(f"/proc/{int(shell.stdout)}"))


def _prints():
    print("printed by a reward")
    print("and to stderr", file=sys.stderr)
    os.write(1, b"past Python\n")
    return 0.25


def _leaks():
    while True:
        kept.append(bytearray(2**26))


def _raises():
    raise ValueError("no such unit")


def _exits():
    sys.exit(3)


def _dies():
    os._exit(3)


def _segfaults():
    ctypes.string_at(0)


def _kills_group():
    os.killpg(0, 9)


def _closes_files():
    os.closerange(0, 100)
    return 1.0


def _sees():
    """What it has in common with the process that trains: 1 if that is nothing."""
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    places = {os.readlink(name) for name in names if os.path.exists(name)}
    num_sockets = sum(place.startswith("socket:") for place in places)  # its own, and two of asyncio's event loop
    is_alone = os.readlink("/proc/self/fd/0") == os.devnull and num_sockets <= 3
    return float(is_alone and "torch" not in sys.modules)


def flaky(prompt, completion):
    """Fails for a quarter of the completions; half of the others are right."""
    number = zlib.crc32((prompt + completion).encode())
    if number % 4 == 0:
        raise RuntimeError("judge away")
    return float(number % 2)


def vowels(completion):
    """The share of vowels: one that behaves."""
    return sum(letter in "aeiou" for letter in completion) / max(len(completion), 1)


def where(answer):
    """The machine of a Ray cluster that this runs on; where the answer is a path, as soon as there is such a file."""
    time.sleep(0.05)
    while os.path.isabs(answer) and not os.path.exists(answer):
        time.sleep(0.05)
    return float(os.environ["RAY_RAYLET_PID"])


def kills_ray_or_misbehaves(answer):
    """With the answer `any` it ends the process above those that score, and above their host."""
    if answer != "any":
        return misbehaves(answer, "")
    import psutil

    [*_, actor] = [process for process in psutil.Process().parents() if "ScoringActor" in " ".join(process.cmdline())]
    actor.kill()
    return time.sleep(5)
