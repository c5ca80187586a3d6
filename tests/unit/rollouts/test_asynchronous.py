"""What is sampled while a trainer trains, on a client that takes its time and whose completions are a function of their
seeds.
"""

import random
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
from dialogues import CODEC, SAMPLING, Server, on_policy, problem_of
from factories import compose_config
from omegaconf import OmegaConf
from runs import wait_until
from worlds import environment

from offline_grpo.config.compose import typed
from offline_grpo.errors import ConfigError, EngineDied
from offline_grpo.rollouts.asynchronous import Asynchronous
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.types import Completion, FinishReason, SamplingParams, Score, ServedWeights

PROBLEMS_PER_ITERATION = 3


class Client:
    """An engine that takes `seconds()` for a call, whose tokens are of their seeds; `close` ends what is waited for."""

    def __init__(self, seconds=lambda: 0.0):
        self.seconds, self.weights, self.error, self.calls = seconds, ServedWeights(), None, 0
        self._closed = threading.Event()

    def generate(self, requests, sampling):
        closed, weights, error = self._closed, self.weights, self.error
        self.calls += 1  # last: who has seen the call may change those
        if error is not None:
            raise error
        if closed.wait(self.seconds()):
            raise RuntimeError("closed")
        for index, request in enumerate(requests):
            draws = [random.Random(request.seed + j).choices(range(9), k=4) for j in range(request.num_completions)]
            versions = (weights.version,) * 4
            yield index, [Completion(tuple(ids), (0.0,) * 4, FinishReason.STOP, versions) for ids in draws]

    def close(self):
        self._closed.set()
        self._closed = threading.Event()


class Sums:
    def score(self, problem, text):
        return Score(float(sum(map(int, text))), True, {})


class Trainer:
    """What the loop does to a source, with updates that take `seconds()`."""

    def __init__(self, client=None, *, updates=1, interval=1, seconds=lambda: 0.0, iterations=6, **settings):
        self.client, self.updates, self.interval, self.seconds = client or Client(), updates, interval, seconds
        self.version = 0
        common = on_policy(problems_per_iteration=PROBLEMS_PER_ITERATION, group_size=2, sampling=SamplingParams(4))
        common |= {"client": self.client, "task": Sums()}
        common |= {name: settings.pop(name) for name in common.keys() & settings.keys()}
        self.on_policy = OnPolicy(**common | {"client": type(self.client)()})
        ahead = {"max_staleness": updates * interval, "buffer_size": None, "in_flight": "keep"} | settings
        self.source = Asynchronous(
            **common,
            **ahead,
            trainer_version=lambda: self.version,
            updates_per_iteration=updates,
            num_iterations=iterations,
        )

    def begin(self, iteration=0):
        self.push()
        self.source.start(iteration, None)

    def train(self, iteration):
        groups = self.source.next(iteration)
        time.sleep(self.seconds())
        self.version += self.updates
        if (iteration + 1) % self.interval == 0:
            self.push()
        return groups

    def push(self):
        self.client.weights = ServedWeights(self.version)
        self.source.weights_changed(self.version)


def answers(groups):
    return [(group.problem.problem_id, [rollout.text for rollout in group.rollouts]) for group in groups]


@pytest.mark.parametrize(
    ("updates", "interval", "extra", "settings"),
    [(2, 1, 3, {}), (1, 2, 1, {"rank": 1, "world_size": 2}), (1, 1, 9, {"resample_zero_signal": True})],
)
def test_what_is_trained_on_is_what_on_policy_draws_and_never_too_old(updates, interval, extra, settings):
    draw = random.Random(updates + interval + extra)
    bound = updates * interval + extra

    def soon():
        return draw.uniform(0, 0.02)

    settings |= {"updates": updates, "interval": interval, "iterations": 12, "max_staleness": bound}
    trainer = Trainer(Client(soon), seconds=soon, **settings)
    trainer.begin()
    ages = []
    for iteration in range(12):
        version = trainer.version
        groups = trainer.train(iteration)
        assert answers(groups) == answers(trainer.on_policy.next(iteration))
        ages.append(max(version - v for group in groups for r in group.rollouts for v in r.versions[1:]))
        assert trainer.source.metrics()["async/age_max"] == ages[-1] <= bound
    assert max(ages) > 0
    assert trainer.client.calls >= 12
    trainer.source.close()


class Talking(Server):
    """Answers turns of episodes, with the weights that it has then."""

    async def ask(self, request, sampling):
        weights = self.weights
        [completion] = await super().ask(request, sampling)
        return [replace(completion, versions=(weights.version,) * len(completion.token_ids))]


def test_weights_change_between_the_turns_of_an_episode_and_none_is_too_old():
    task = environment()
    problems = [replace(problem_of(task, turns=1 + 3 * (i % 3)), problem_id=str(i)) for i in range(40)]
    played = {"task": task, "problems": problems, "codec": CODEC, "sampling": SAMPLING}
    trainer = Trainer(Talking(), seconds=lambda: 0.01, iterations=10, max_staleness=3, **played)
    trainer.begin()
    turns, discarded = [], 0.0
    for iteration in range(10):
        version = trainer.version
        groups = trainer.train(iteration)
        assert answers(groups) == answers(trainer.on_policy.next(iteration))
        turns += [[version - r.versions[turn.start] for turn in r.turns] for group in groups for r in group.rollouts]
        discarded += trainer.source.metrics()["async/num_discarded"]
    trainer.source.close()
    assert max(map(max, turns)) <= 3
    assert any(len(set(ages)) > 1 for ages in turns)
    assert discarded == 0


def test_sampling_and_training_overlap():
    """From the second on, each training waits for the sampling of the next iteration, and that sampling for this
    training.
    """
    both, has_trained, samplings = threading.Barrier(2, timeout=20), threading.Event(), []

    def meet(is_training):
        samplings.append(None)
        if has_trained.is_set():
            both.wait()
        if is_training:
            has_trained.set()
        return 0.0

    trainer = Trainer(Client(lambda: meet(False)), seconds=lambda: meet(True), iterations=7)
    trainer.begin()
    wait_until(lambda: len(samplings) == 2)  # of the first two iterations, before there is any training
    for iteration in range(6):
        trainer.train(iteration)
    trainer.source.close()
    assert not both.broken


@pytest.mark.parametrize(("buffer_size", "ahead"), [(2 * PROBLEMS_PER_ITERATION + 1, 2), (None, 5)])
def test_the_buffer_bounds_what_is_sampled_ahead(buffer_size, ahead):
    trainer = Trainer(max_staleness=4, buffer_size=buffer_size, iterations=20)
    trainer.begin()
    wait_until(lambda: trainer.client.calls == ahead)
    trainer.train(0)
    wait_until(lambda: trainer.client.calls == ahead + 1)
    time.sleep(0.05)
    assert trainer.client.calls == ahead + 1


def test_samples_one_version_too_old_are_drawn_again_and_an_engine_one_version_too_old_ends_the_run():
    trainer = Trainer(max_staleness=1)
    trainer.begin()
    wait_until(lambda: trainer.client.calls == 2)
    trainer.train(0)
    trainer.version += 1  # more updates than an iteration makes
    trainer.push()
    assert answers(trainer.train(1)) == answers(trainer.on_policy.next(1))
    metrics = trainer.source.metrics()
    assert (metrics["async/num_discarded"], metrics["async/age_max"]) == (PROBLEMS_PER_ITERATION, 0)
    trainer.version += 2
    with pytest.raises(ConfigError, match="the engine's weights are 2 versions old"):
        trainer.source.next(2)
    trainer.source.close()


def test_an_error_reaches_the_trainer_at_once_with_its_cause():
    """Also while it waits for an earlier iteration: a later one fails as soon as it begins."""
    client = Client(lambda: 60.0)
    trainer = Trainer(client, max_staleness=1)
    trainer.begin()
    wait_until(lambda: client.calls == 2)
    client.error = ValueError("no such thing")
    trainer.source.max_staleness = 2  # a third one may begin
    trainer.source.weights_changed(0)
    began = time.monotonic()
    with pytest.raises(ValueError, match="no such thing") as caught:
        trainer.source.next(0)
    assert "generate" in [entry.name for entry in caught.traceback]
    trainer.source.close()
    assert time.monotonic() - began < 20  # and not 60


def test_after_a_death_everything_is_sampled_again():
    trainer = Trainer(max_staleness=1)
    trainer.begin()
    wait_until(lambda: trainer.client.calls == 2)
    trainer.client.error = EngineDied("the server has ended.")
    trainer.train(0)
    wait_until(lambda: trainer.client.calls == 3)
    with pytest.raises(EngineDied):
        trainer.source.next(1)
    trainer.source.weights_lost()
    time.sleep(0.02)
    assert trainer.client.calls == 3  # nothing is asked of a server that is being started
    trainer.client.error = None
    trainer.push()
    assert answers(trainer.train(1)) == answers(trainer.on_policy.next(1))
    assert trainer.source.metrics()["async/num_discarded"] == 2 * PROBLEMS_PER_ITERATION


def test_close_ends_what_runs():
    before = set(threading.enumerate())
    trainer = Trainer(Client(lambda: 60.0))
    trainer.begin()
    began = time.monotonic()
    trainer.source.close()
    assert time.monotonic() - began < 20  # and not 60
    wait_until(lambda: set(threading.enumerate()) <= before)
    trainer.source.weights_changed(1)  # as a push that was under way may do
    assert trainer.client.calls == 2


LESS = {"train.loss.importance_correction": "none"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"engine": None}, "rollouts=async"),
        ({"train.epochs": 2}, "rollouts.max_staleness=1"),
        (LESS, "train.loss.importance_correction=none"),
        ({**LESS, "train.loss.ratio_reference": "rollout"}, None),
        ({"weight_sync.interval": 3, "rollouts.max_staleness": 3}, None),
    ],
)
def test_what_cannot_work_is_refused(changes, key):
    config = compose_config("generation=vllm_server", "weight_sync=reload", "mode=async")
    for name, value in changes.items():
        OmegaConf.update(config, name, value)
    with pytest.raises(ConfigError, match=f"^{key}: ") if key else nullcontext():
        Asynchronous.check(typed(config))
