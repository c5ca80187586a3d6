"""The scheduler that vLLM loads for us: outputs that it holds back arrive whole, and those that somebody waits for at
once.
"""

from __future__ import annotations

import importlib
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


@pytest.mark.parametrize("length", [1, 33, 64])
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
