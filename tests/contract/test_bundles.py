"""The scheduler that vLLM loads for us: outputs that it holds back arrive whole, and those that somebody waits for at
once.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
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
    from vllm.v1.outputs import LogprobsLists

    logprobs = LogprobsLists(np.array([[token]]), np.array([[-token / 8]]), np.array([token + 1]))
    return EngineCoreOutput(request_id=name, new_token_ids=[token], new_logprobs=logprobs, **others)


def passed_on(module: ModuleType, requests: dict[str, SimpleNamespace], steps: Steps) -> tuple[Steps, Any]:
    """What the HTTP server gets of each step, and the scheduler. A request that ends in a step is no longer among
    `requests` after it.
    """

    class Told:
        def __init__(self) -> None:
            self.requests = dict(requests)

        def update_from_output(self, told: Sequence[Any], _: Any) -> dict[int, SimpleNamespace]:
            for one in told:
                if one.finish_reason is not None:
                    del self.requests[one.request_id]
            return {0: SimpleNamespace(outputs=list(told))}

    scheduler = type("Scheduler", (module.Bundling, Told), {})()
    return [scheduler.update_from_output(step, None)[0].outputs for step in steps], scheduler


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 100])
def test_bundles_tell_what_their_outputs_told(module: ModuleType, length: int) -> None:
    from vllm.v1.engine import FinishReason

    first, last = (
        {"prefill_stats": "of the prompt"},
        {"finish_reason": FinishReason.LENGTH, "stop_reason": 7, "num_nans_in_logits": 3},
    )
    steps = [[output("a", t, **(first if t == 0 else {}), **(last if t == length - 1 else {}))] for t in range(length)]
    got, scheduler = passed_on(module, {"a": request()}, steps)
    bundles = [one for step in got for one in step]
    assert [len(bundle.new_token_ids) for bundle in bundles[:-1]] == [module.BUNDLE_TOKENS] * (len(bundles) - 1)
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


def test_requests_do_not_mix(module: ModuleType) -> None:
    steps = [
        [output(name, token) for name, token in (("a", 2 * t), ("b", 2 * t + 1))] for t in range(module.BUNDLE_TOKENS)
    ]
    got, _ = passed_on(module, {"a": request(), "b": request()}, steps)
    assert not any(got[:-1])
    assert [(one.request_id, one.new_token_ids[:2], one.new_logprobs.logprobs[1].tolist()) for one in got[-1]] == [
        ("a", [0, 2], [-2 / 8]),
        ("b", [1, 3], [-3 / 8]),
    ]


@pytest.mark.parametrize("kind", ["CUMULATIVE", "DELTA", "text"])
def test_who_reads_tokens_one_by_one_gets_them_so(module: ModuleType, kind: str) -> None:
    """Answers in parts, and texts in which the HTTP server looks for strings that end them."""
    from vllm.sampling_params import RequestOutputKind

    params = {"detokenize": True} if kind == "text" else {"output_kind": RequestOutputKind[kind]}
    steps = [[output("a", token)] for token in range(3)]
    got, _ = passed_on(module, {"a": request(**params)}, steps)
    assert got == steps


def test_what_cannot_be_joined_is_passed_on_with_what_came_before(module: ModuleType) -> None:
    steps = [
        [output("a", 0)],
        [output("a", 1, routed_experts=np.ones(1))],
        [output("a", 2, routed_experts=np.ones((2, 3)))],
        [output("a", 3)],
    ]
    got, _ = passed_on(module, {"a": request()}, steps)
    assert [[one.new_token_ids for one in step] for step in got] == [[], [[0, 1]], [[2]], []]


def test_events_are_told_in_order(module: ModuleType) -> None:
    from vllm.v1.engine import FinishReason

    steps = [
        [output("a", 0, events=["queued", "scheduled"])],
        [output("a", 1)],
        [output("a", 2, events=["preempted"], finish_reason=FinishReason.STOP)],
    ]
    got, _ = passed_on(module, {"a": request()}, steps)
    assert got[-1][0].events == ["queued", "scheduled", "preempted"]


def test_what_was_held_of_an_aborted_request_is_forgotten(module: ModuleType) -> None:
    _, scheduler = passed_on(module, {"a": request(), "b": request()}, [[output("a", 0), output("b", 1)]])
    del scheduler.requests["a"]  # as `finish_requests` does, which tells the client by itself
    scheduler.update_from_output([output("b", 2)], None)
    assert list(scheduler._held) == ["b"]


def test_steps_whose_batch_has_more_logprobs_than_others(module: ModuleType) -> None:
    """vLLM gives each request of a step as many columns as that one has which asks for most; what others asked for
    comes first.
    """
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    wide = LogprobsLists(np.array([[1, 7, 8]]), np.array([[-1 / 8, -2.0, -3.0]]), np.array([2]))
    steps = [
        [output("a", 0)],
        [EngineCoreOutput("a", [1], new_logprobs=wide)],
        [output("a", 2, finish_reason=FinishReason.STOP)],
    ]
    got, _ = passed_on(module, {"a": request()}, steps)
    [bundle] = got[-1]
    assert bundle.new_logprobs.logprob_token_ids.tolist() == [[0], [1], [2]]
    assert bundle.new_logprobs.logprobs.tolist() == [[0.0], [-1 / 8], [-2 / 8]]
    assert bundle.new_logprobs.sampled_token_ranks.tolist() == [1, 2, 3]


def test_without_logprobs(module: ModuleType) -> None:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    steps = [[EngineCoreOutput("a", [0])], [EngineCoreOutput("a", [1], finish_reason=FinishReason.STOP)]]
    got, _ = passed_on(module, {"a": request()}, steps)
    assert (got[1][0].new_token_ids, got[1][0].new_logprobs) == ([0, 1], None)


def test_it_is_the_scheduler_that_vllm_would_take(module: ModuleType) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    assert issubclass(module.AsyncBundling, AsyncScheduler)
    assert issubclass(module.SyncBundling, Scheduler)
    assert not issubclass(module.SyncBundling, AsyncScheduler)
    for chosen, is_async in ((module.AsyncBundling, True), (module.SyncBundling, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.os, "environ", {})
            patch.setattr(chosen, "__init__", lambda self, **arguments: vars(self).update(arguments))
            config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
            scheduler = module.bundling_scheduler(vllm_config=config, log_stats=True)
            assert module.os.environ == module.IN_ONE_PIECE
        assert type(scheduler) is chosen
        assert (scheduler.vllm_config, scheduler.log_stats) == (config, True)


@pytest.mark.slow
def test_messages_of_bundles_arrive_as_they_were_sent(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By vLLM's own thread. Before 0.32 it reused the memory of messages in several parts that were still on their way;
    later versions are asked for one part all the same."""
    zmq = pytest.importorskip("zmq")
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.serial_utils import MsgpackDecoder

    for name, value in module.IN_ONE_PIECE.items():
        monkeypatch.setenv(name, value)
    messages: queue.Queue[Any] = queue.Queue()
    address = f"ipc://{tmp_path}/outputs"
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(address)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        engine = object.__new__(EngineCoreProc)  # the thread uses nothing else of it
        engine.output_queue = messages
        threading.Thread(target=engine.process_output_sockets, args=([address], None, 0), daemon=True).start()
        for number in range(60):  # of other sizes in turn, each above the 64 KiB from which zmq does not copy
            bundles = [
                module.joined([output(f"generate-{i:032d}", number) for _ in range(module.BUNDLE_TOKENS)])
                for i in range(128 + number % 3)
            ]
            messages.put((0, EngineCoreOutputs(outputs=bundles)))
        messages.put(EngineCoreProc.ENGINE_CORE_DEAD)
        decoder = MsgpackDecoder(EngineCoreOutputs)
        for number in range(60):
            parts = socket.recv_multipart(copy=False)
            assert len(parts) == 1
            assert len(parts[0].buffer) > 2**16
            found = decoder.decode(parts).outputs
            assert [one.new_token_ids for one in found] == (128 + number % 3) * [[number] * module.BUNDLE_TOKENS]
            assert all((one.new_logprobs.logprobs == -number / 8).all() for one in found)
