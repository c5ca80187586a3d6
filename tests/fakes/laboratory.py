"""Runs of the whole application in this process, with spies on the seams between its parts."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import compose_config, sampled
from runs import SMALL, metrics_of
from safetensors.torch import load_file
from torch import nn

from offline_grpo.errors import GrpoError
from offline_grpo.eval.evaluator import PassAtKEvaluator
from offline_grpo.model import load
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.run import train

ROWS = Path(__file__).with_name("four_rows.jsonl")
TWO_ITERATIONS = (
    *SMALL,
    "train.iterations=2",
    "train.lr=0.02",
    "eval.interval=1",
    "checkpoint.save_interval=1",
    "model.device=cpu",
)


@dataclass
class Trace:
    """What a run did, seen from outside and through spies on the seams between its parts."""

    error: str = ""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)  # file name -> metrics
    files: set[str] = field(default_factory=set)  # paths in the run folder
    start: dict[str, torch.Tensor] = field(default_factory=dict)  # the weights that training started from
    end: dict[str, torch.Tensor] = field(default_factory=dict)  # the weights of the last checkpoint
    model_dir: Path = Path()
    iterations: list[int] = field(default_factory=list)  # in which rollouts were sampled
    groups: list[list[Any]] = field(default_factory=list)  # of each of those, RolloutGroups
    evaluations: list[list[tuple[int, ...]]] = field(default_factory=list)  # of each evaluation, every completion
    calls: Counter[str] = field(default_factory=Counter)


class Laboratory:
    """Runs the application with spies in it; equal overrides run once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._traces: dict[str, Trace] = {}

    def __call__(self, overrides: str) -> Trace:
        if overrides not in self._traces:
            self._traces[overrides] = self._run(overrides, self.root / f"run_{len(self._traces)}")
        return self._traces[overrides]

    def _run(self, overrides: str, run_dir: Path) -> Trace:
        trace = Trace()
        places = {
            "@model": self.root / "other_model",
            "@done": self.root / "done",
            "@elsewhere": self.root / "elsewhere",
        }
        places |= {"@rows": ROWS, "@template": self.root / "template.jinja", "@gguf": self.root / "small.gguf"}
        words = overrides.split()
        for place, path in places.items():
            words = [word.replace(place, str(path)) for word in words]
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, trace)
            try:
                train(compose_config(*TWO_ITERATIONS, f"cache_dir={self.root}/cache", *words), run_dir)
            except GrpoError as error:
                trace.error = str(error)
        if run_dir.exists():
            trace.files = {path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file()}
            trace.metrics = metrics_of(run_dir)
            for file in sorted(run_dir.glob("checkpoints/iter_*/*.safetensors")):
                trace.end = load_file(file)
        if (trace.model_dir / "model.safetensors").exists():
            trace.start = load_file(trace.model_dir / "model.safetensors")
        return trace


def watch(patch: pytest.MonkeyPatch, trace: Trace) -> None:
    """Note in `trace` what passes between the parts of a run."""

    def after(owner: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            note(result, *args)
            return result

        patch.setattr(owner, name, spy)

    def count(owner: Any, name: str, what: str) -> None:
        after(owner, name, lambda *_: trace.calls.update([what]))

    def note_policy(_policy: Any, _config: Any, model_id: str) -> None:
        trace.model_dir = Path(model_id)

    def note_groups(groups: Any, _source: Any, iteration: int) -> None:
        trace.iterations.append(iteration)
        trace.groups.append(groups)

    def note_answers(groups: Any, _evaluator: Any, _client: Any) -> None:
        trace.evaluations.append([sampled(rollout) for group in groups for rollout in group.rollouts])

    after(load, "load_policy", note_policy)
    after(OnPolicy, "next", note_groups)
    after(PassAtKEvaluator, "sample", note_answers)
    count(nn.functional, "scaled_dot_product_attention", "sdpa")
    patch.setattr(
        nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager")
    )  # generates no code, which takes long
    count(nn.Module, "compile", "compile")
