"""The scheduler that vLLM loads for us: outputs that it holds back arrive whole, and those that somebody waits for at
once.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import random
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offline_grpo.engine.vllm import EXTENSION_FOLDER, SCHEDULER

pytest.importorskip("vllm", reason="its classes are the ones that are bundled")

Steps = list[list[Any]]
"""What vLLM's scheduler tells of each step."""


@pytest.fixture(scope="module")
def module() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXTENSION_FOLDER))
        return importlib.import_module(SCHEDULER.partition(".")[0])


def request(**params: Any) -> SimpleNamespace:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    asked = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False, "logprobs": 0, **params}
    return SimpleNamespace(sampling_params=SamplingParams(**asked))


def output(name: str, token: int, **others: Any) -> Any:
    """One token of a request; its logprob and rank can be told from the token."""
    from vllm.v1.engine import EngineCoreOutput

    return EngineCoreOutput(request_id=name, new_token_ids=[token], **others)


def logprobs(tokens: Sequence[int], num_others: int = 0) -> Any:
    """Of the tokens of a step, with `num_others` further columns."""
    from vllm.v1.outputs import LogprobsLists

    column = np.array(tokens)[:, None]
    others = np.full((len(tokens), num_others), 99)
    return LogprobsLists(np.hstack([column, others]), np.hstack([-column / 8, -others]), column[:, 0] + 1)


def passed_on(
    module: ModuleType, requests: dict[str, SimpleNamespace], steps: Steps, num_others: int = 0
) -> tuple[Steps, Any]:
    """What the HTTP server gets of each step, and the scheduler. As vLLM does, each output is given its rows of the
    step's logprobs, if there are some. A request that ends in a step is no longer among `requests` after it.
    """

    class Told:
        def __init__(self) -> None:
            self.requests = dict(requests)

        def update_from_output(self, told: SimpleNamespace, found: SimpleNamespace) -> dict[int, SimpleNamespace]:
            for row, one in enumerate(told.outputs):
                if found.logprobs is not None and self.requests[one.request_id].sampling_params.logprobs is not None:
                    one.new_logprobs = found.logprobs.slice_request(row, len(one.new_token_ids))
                if one.finish_reason is not None:
                    del self.requests[one.request_id]
            return {0: SimpleNamespace(outputs=list(told.outputs))}

    scheduler = type("Scheduler", (module.Bundling, Told), {})()
    return [take(scheduler, step, num_others) for step in steps], scheduler


def take(scheduler: Any, outputs: list[Any], num_others: int = 0, columns: Any = None) -> list[Any]:
    rows = {one.request_id: row for row, one in enumerate(outputs)}
    columns = columns or logprobs([one.new_token_ids[0] for one in outputs], num_others)
    found = SimpleNamespace(req_id_to_index=rows, logprobs=columns)
    told = SimpleNamespace(outputs=outputs, num_scheduled_tokens=dict.fromkeys(rows, 1))
    return scheduler.update_from_output(told, found)[0].outputs


def top(rows: Sequence[tuple[int, Sequence[int]]], num_columns: int) -> Any:
    """The logprobs of a step: of each row the sampled token, and the ids of the most probable, which filters left;
    others are minus infinity.
    """
    from vllm.v1.outputs import LogprobsLists

    ids = np.array([[token, *kept, *range(90, 90 + num_columns - len(kept))] for token, kept in rows], np.int32)
    values = np.array(
        [[-0.5, *[-1.0] * len(kept), *[-np.inf] * (num_columns - len(kept))] for _, kept in rows], np.float32
    )
    return LogprobsLists(ids, values, np.ones(len(rows), np.int64))


def test_what_filters_left_is_told_in_bundles_as_without(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that ask for different numbers of tokens in one step, and one for none; as our endpoint reads it,
    with vLLM's own bookkeeping in between.
    """
    from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position
    from vllm.v1.engine import FinishReason

    monkeypatch.syspath_prepend(str(EXTENSION_FOLDER))
    generate: Any = importlib.import_module("offline_grpo_generate")
    draw, most = random.Random(0), {"four": 4, "nine": 9, "none": 0}
    requests = {
        name: request(logprobs=number, extra_args={"alternatives": True} if number else None)
        for name, number in most.items()
    }
    steps, truth = [], {name: list[tuple[int, list[int]]]() for name in most}
    for _ in range(70):
        rows = []
        for name, number in most.items():
            kept = draw.sample(range(40), draw.randint(1, number or 9))
            rows.append((draw.choice([*kept, 77]), kept))  # 77 is as probable as the last one
            truth[name].append(rows[-1])
        steps.append(rows)

    def read(outputs: list[Any], number: int) -> tuple[list[int], list[float], list[list[int]]]:
        flat = FlatLogprobs()
        for one in outputs:
            for ids, values, rank in zip(*(field.tolist() for field in one.new_logprobs[:3]), strict=True):
                append_logprobs_for_next_position(flat, ids, values, itertools.repeat(None), rank, number)
        firsts, sent = flat.start_indices, [[*memoryview(ids).cast("i")][:-1] for ids in generate.alternatives(flat)]
        return [flat.token_ids[i] for i in firsts], [flat.logprobs[i] for i in firsts], sent

    def outputs_of(step: int) -> list[Any]:
        last = {"finish_reason": FinishReason.LENGTH} if step == 69 else {}
        return [output(name, steps[step][row][0], **last) for row, name in enumerate(requests)]

    _, scheduler = passed_on(module, requests, [])
    arrived = [one for t in range(70) for one in take(scheduler, outputs_of(t), columns=top(steps[t], 9))]
    for row, (name, number) in enumerate(most.items()):
        own = [one for one in arrived if one.request_id == name]
        assert len(own) <= 4
        alone = [SimpleNamespace(new_logprobs=top(step, 9).slice_request(row, 1)) for step in steps]
        for told in (read(own, number), read(alone, number or 9)):
            assert told[0] == [token for token, _ in truth[name]]
            assert told[1] == [-0.5] * 70
            if number:
                assert told[2] == [[one for one in kept if one != token] for token, kept in truth[name]]


@pytest.mark.parametrize("length", [1, 64])
def test_bundles_tell_what_their_outputs_told(module: ModuleType, length: int) -> None:
    from vllm.v1.engine import FinishReason

    first, last = (
        {"prefill_stats": "of the prompt"},
        {"finish_reason": FinishReason.LENGTH, "stop_reason": 7, "num_nans_in_logits": 3},
    )
    steps = [[output("a", t, **(first if t == 0 else {}), **(last if t == length - 1 else {}))] for t in range(length)]
    got, scheduler = passed_on(module, {"a": request()}, steps)
    bundles = [one for step in got for one in step]
    assert all(len(bundle.new_token_ids) <= module.BUNDLE_TOKENS for bundle in bundles)
    assert len(bundles) <= 2 + length / module.BUNDLE_TOKENS
    assert [token for bundle in bundles for token in bundle.new_token_ids] == list(range(length))
    ids, logprobs, ranks = (np.concatenate([bundle.new_logprobs[field] for bundle in bundles]) for field in range(3))
    assert ids.tolist() == [[token] for token in range(length)]
    assert logprobs.tolist() == [[-token / 8] for token in range(length)]
    assert ranks.tolist() == [token + 1 for token in range(length)]
    assert [bundle.prefill_stats for bundle in bundles] == ["of the prompt", *[None] * (len(bundles) - 1)]
    assert [bundle.finish_reason for bundle in bundles] == [*[None] * (len(bundles) - 1), FinishReason.LENGTH]
    assert (bundles[-1].stop_reason, bundles[-1].num_nans_in_logits) == (7, 3)
    assert got[-1][-1] is bundles[-1]  # the end is told when it comes
    assert not scheduler._held


def test_what_was_held_of_an_aborted_request_is_forgotten(module: ModuleType) -> None:
    _, scheduler = passed_on(module, {"a": request(), "b": request()}, [[output("a", 0), output("b", 1)]])
    del scheduler.requests["a"]  # as `finish_requests` does, which tells the client by itself
    take(scheduler, [output("b", 2)])
    assert list(scheduler._held) == ["b"]


def test_requests_that_ask_for_different_logprobs_in_one_step(module: ModuleType) -> None:
    """vLLM gives each request of a step as many columns as that one has which asks for most. Who asks for logprobs of
    other tokens gets every token by itself, with all of them; who asks for none gets none.
    """
    from vllm.v1.engine import FinishReason

    requests = {"a": request(), "none": request(logprobs=None), "five": request(logprobs=5)}
    last = {"finish_reason": FinishReason.LENGTH}
    steps = [
        [output(name, 10 * t + i, **(last if t == 5 else {})) for i, name in enumerate(requests)] for t in range(6)
    ]
    got, _ = passed_on(module, requests, steps, num_others=5)
    of = {name: [one for step in got for one in step if one.request_id == name] for name in requests}
    assert [one.new_logprobs.logprobs.shape for one in of["five"]] == [(1, 6)] * 6
    assert [token for one in of["none"] for token in one.new_token_ids] == [10 * t + 1 for t in range(6)]
    assert all(one.new_logprobs is None for one in of["none"])
    own = np.concatenate([one.new_logprobs.logprobs for one in of["a"]])
    assert own.tolist() == [[-10 * t / 8] for t in range(6)]


def test_it_is_the_scheduler_that_vllm_would_take(module: ModuleType) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    assert issubclass(module.AsyncBundling, AsyncScheduler)
    assert issubclass(module.SyncBundling, Scheduler)
    assert not issubclass(module.SyncBundling, AsyncScheduler)
    for chosen, is_async in ((module.AsyncBundling, True), (module.SyncBundling, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.os, "environ", {})
            patch.setattr(module, "look_further_ahead", lambda: None)
            patch.setattr(chosen, "__init__", lambda self, **arguments: vars(self).update(arguments))
            config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
            scheduler = module.bundling_scheduler(vllm_config=config, log_stats=True)
            assert module.os.environ == module.IN_ONE_PIECE
        assert type(scheduler) is chosen
        assert (scheduler.vllm_config, scheduler.log_stats) == (config, True)


def test_urgent_requests_go_first(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before those that a pause has interrupted, and that wait when the urgent one comes."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

    class Queue:
        """Has places for two at once, and takes up what waits."""

        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self.policy, self.running = SchedulingPolicy.FCFS, list[Any]()
            self.waiting = create_request_queue(self.policy)

        def add_request(self, request: Any) -> None:
            self.requests[request.request_id] = request
            self.waiting.add_request(request)

        def set_pause_state(self, _: Any) -> None: ...

        def schedule(self) -> list[str]:
            while self.waiting and len(self.running) < 2:
                self.running.append(self.waiting.pop_request())
            return [one.request_id for one in self.running]

    def add(name: str, priority: int = 0) -> Any:
        one = SimpleNamespace(request_id=name, priority=priority)
        scheduler.add_request(type("Request", (SimpleNamespace,), {"__hash__": object.__hash__})(**vars(one)))

    def end(name: str) -> None:
        scheduler.running = [one for one in scheduler.running if one.request_id != name]
        del scheduler.requests[name]

    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    scheduler: Any = type("Scheduler", (module.Bundling, Queue), {})()
    for name in ("a", "b", "c"):
        add(name)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.schedule() == []  # an urgent one may come
    add("first", -1)
    add("second", -1)
    add("third", -1)
    assert scheduler.schedule() == ["first", "second"]
    assert [one.request_id for one in scheduler.waiting] == ["third", "a", "b", "c"]
    end("first")
    assert scheduler.schedule() == ["second", "third"]
    end("second")
    assert scheduler.schedule() == ["third"]
    end("third")
    assert scheduler.schedule() == ["a", "b"]
    scheduler.set_pause_state(PauseState.UNPAUSED)
    end("a")
    assert scheduler.schedule() == ["b"]
    now += 1  # none has come
    assert scheduler.schedule() == ["b", "c"]


def test_a_preempted_request_waits_for_its_tokens(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.25 and 0.26 leave it placeholders for those that are still computed, and would resume it."""
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    def waiting() -> list[str]:
        return [one.request_id for one in scheduler.waiting]

    def preempt(self: Any, one: Any, _: float) -> None:
        one.status = RequestStatus.PREEMPTED
        self.waiting.prepend_request(one)

    def schedule(self: Any, preempted: Any = None) -> list[str]:
        offered = waiting()
        if preempted is not None:
            self._preempt_request(preempted, 0.0)
        return offered

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    monkeypatch.setattr(Scheduler, "schedule", schedule)
    of_vllm: Any = type("Request", (SimpleNamespace,), {"__hash__": object.__hash__})
    a, b, new = (of_vllm(request_id=name, num_output_placeholders=2) for name in ("a", "b", "new"))
    new.num_output_placeholders = 0
    scheduler = object.__new__(module.AsyncBundling)
    vars(scheduler).update(_preempted=[], _urgent=set(), _head_start_until=0.0)
    scheduler.waiting = create_request_queue(SchedulingPolicy.FCFS)
    scheduler.waiting.add_request(new)

    assert (scheduler.schedule(b), waiting()) == (["new"], ["b", "new"])
    b.num_output_placeholders = 1
    assert (scheduler.schedule(a), waiting()) == (["new"], ["b", "a", "new"])
    b.num_output_placeholders, a.num_output_placeholders = 0, 1
    assert (scheduler.schedule(), waiting()) == (["b", "new"], ["a", "b", "new"])
    a.status = RequestStatus.FINISHED_ABORTED  # with a token that nobody reads any more
    scheduler.waiting.remove_request(a)
    assert (scheduler.schedule(), waiting()) == (["b", "new"], ["b", "new"])
    assert not scheduler._preempted


def test_the_cache_is_another_one_from_the_end_of_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while vLLM begins to pause may still be computed with the old weights."""
    monkeypatch.syspath_prepend(str(EXTENSION_FOLDER))
    seen: list[Any] = []

    async def pause(**how: Any) -> None:
        seen.append((generate._num_pauses, how))

    async def send(message: Any) -> None:
        seen.append(message.get("status") or message["body"])

    engine = SimpleNamespace(engine_core=SimpleNamespace(pause_scheduler_async=pause))
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    generate: Any = importlib.import_module("offline_grpo_generate").Generate(None)
    scope = {"type": "http", "path": "/pause", "app": app, "query_string": b"mode=keep&clear_cache=false"}
    asyncio.run(generate(scope, None, send))
    assert seen == [(0, {"mode": "keep", "clear_cache": False}), 200, b'{"status":"paused"}']
    assert generate._num_pauses == 1


def test_a_prompt_may_end_in_the_middle_of_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXTENSION_FOLDER))
    request: Any = object.__new__(importlib.import_module("offline_grpo_generate").Request)
    before, ids = [*"It is \N{SNOWMAN}".encode()[:-1]], [*"\N{SNOWMAN}!".encode()[2:]]
    request._prompt_ids, request._prompt_text = before, ""
    request._of_tokens = request._has_alternatives = request._has_routes = False
    request._wants_text = True
    request._tokenizer = SimpleNamespace(decode=lambda ids, **_: bytes(ids).decode(errors="replace"))
    request._params = SimpleNamespace(detokenize=False, skip_special_tokens=True, prompt_logprobs=None)
    flat = SimpleNamespace(logprobs=[], token_ids=[], start_indices=[], end_indices=[])
    completion = SimpleNamespace(token_ids=ids, logprobs=flat, finish_reason="length")

    async def outputs() -> Any:
        yield SimpleNamespace(outputs=[completion], prompt_token_ids=before)

    assert asyncio.run(request.whole(outputs()))["text"] == ["\N{SNOWMAN}!"]


def test_blocks_are_looked_for_where_the_last_one_is_full(module: ModuleType) -> None:
    from vllm.v1.request import RequestStatus

    asked = []
    manager = SimpleNamespace(req_to_blocks={"a": ["one", "two"]}, block_size=16)

    def slots(status: Any, computed: int, **options: Any) -> Any:
        running = SimpleNamespace(request_id="a", status=status, num_computed_tokens=computed)
        options = {"num_lookahead_tokens": 0, **options}
        return module._allocate(
            lambda *a, **k: asked.append((a, k)) or "theirs", manager, "none", running, 1, **options
        )

    assert [slots(RequestStatus.RUNNING, computed) for computed in (30, 31, 32)] == ["none", "none", "theirs"]
    assert slots(RequestStatus.WAITING, 30) == slots(RequestStatus.RUNNING, 30, delay_cache_blocks=True) == "theirs"
    assert [options.keys() - {"num_lookahead_tokens"} for _, options in asked] == [set(), set(), {"delay_cache_blocks"}]


OURS = "offline_grpo_worker.WorkerExtension"


@pytest.mark.parametrize(
    ("is_async", "is_v2", "stages", "extension", "steps"),
    [
        (True, True, 1, OURS, 3),
        (True, True, 1, "", 2),  # whose worker has buffers for two
        (True, False, 1, OURS, 2),
        (False, True, 2, OURS, 2),
    ],
)
def test_steps_under_way(
    module: ModuleType, is_async: bool, is_v2: bool, stages: int, extension: str, steps: int
) -> None:
    from vllm.config import VllmConfig

    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, worker_extension_cls=extension),
        use_v2_model_runner=is_v2,
        speculative_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(is_hybrid=False),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmConfig, "max_concurrent_batches", VllmConfig.max_concurrent_batches)
        module.look_further_ahead()
        module.look_further_ahead()  # scheduler and worker may be one process
        changed: Any = VllmConfig.max_concurrent_batches
    assert changed.fget(config) == steps
