"""Runs of the whole application beside vLLM servers on the CPU, of the random model that `engines.save_model` makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from children import SMALL, Mishaps, draw_nothing, metrics_of
from factories import compose_config

from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.report import plots
from offline_grpo.run import train
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.types import Problem, SamplingParams, SamplingRequest, Score, ServedWeights


def own_server(python: str) -> tuple[str, ...]:
    """Overrides for a run that starts its server on the CPU. `python`: see `preloaded_python` and `forking_python`."""
    return (
        "generation=vllm_server",
        f"engine.python={python}",
        "engine.args.enforce_eager=true",
        "engine.args.distributed_executor_backend=uni",
        "+engine.args.kv_cache_memory_bytes=67108864",
        "+engine.args.max_num_batched_tokens=32768",
        "engine.args.gpu_memory_utilization=null",
        "+engine.env.OMP_NUM_THREADS=1",
        '+engine.env.VLLM_ENABLE_V1_MULTIPROCESSING="0"',
    )


@dataclass(frozen=True)
class Variety(Arithmetic):
    """The problems of arithmetic, with a reward that the answers of a random model differ in: how many characters they
    use.
    """

    def score(self, problem: Problem, text: str) -> Score:
        variety = len(set(text)) / 10
        return Score(reward=variety, is_correct=variety > 0.6, parts={"variety": variety})


class Endless(VllmEngine):
    """Asks for completions that only their length ends."""

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        return super().body(request, sampling, weights) | {"ignore_eos": True, "stop_token_ids": []}


def five(model: Path) -> tuple[str, ...]:
    """Overrides for five iterations with this model.

    Adam divides gradients by their own size, so where they are nothing but rounding, rounding decides which way weights
    go: with the usual eps and LoRA's learning rate, 1e-6 nats between two servers became other samples within three
        iterations. Gradients have norms of 2 to
    10 here; with this eps the policy moves as far, and those 1e-6 stay below a tenth of what `assert_same` tolerates.
    """
    return (
        *SMALL,
        f"model.train_id={model}",
        "task._target_=served_runs.Variety",
        "train.iterations=5",
        "eval.interval=5",
        "train.lr=1e-3",
        "train.optimizer.eps=1e-4",
        "checkpoint.enabled=false",
        "model.device=cpu",
    )


def at(server: VllmEngine | str) -> tuple[str, str]:
    """Overrides for sampling from a server that is there."""
    return "generation=vllm_server", f"generation.base_url={server if isinstance(server, str) else server.base_url}"


def run(
    folder: Path, model: Path, *overrides: str, mishaps: Mapping[tuple[str, int], Callable[[], Any]] | None = None
) -> dict[str, dict[str, float]]:
    """A run in this process; its metrics. `mishaps`: see `start_in_child`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mishaps, "planned", dict(mishaps or {}))
        patch.setattr(plots, "save_report", draw_nothing)
        train(compose_config(*five(model), *overrides, *([Mishaps.override] if mishaps else [])), folder)
        assert not Mishaps.planned, "planned and did not happen"
    return metrics_of(folder)


CANCELLING = ("loss_pg", "loss_total")
"""Sums of advantages times ratios: terms of size 1, of which little remains. So rounding is measured by the terms."""


def assert_same(left: dict[str, dict[str, float]], right: dict[str, dict[str, float]]) -> None:
    """Equal up to rounding, apart from what says how the weights travelled."""
    assert left.keys() == right.keys()
    for name, found in left.items():
        for key, value in found.items():
            if not key.startswith(("sync/", "alignment/", "mismatch/", "logprobs/inference")):
                tolerance = 1e-4 if key in CANCELLING else 1e-5
                assert right[name][key] == pytest.approx(value, rel=1e-4, abs=tolerance), (
                    name,
                    key,
                    value,
                    right[name][key],
                )
