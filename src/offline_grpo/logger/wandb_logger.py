"""Metrics in Weights & Biases; by default only written to disk, for a later `wandb sync`."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml

from offline_grpo.formats import utf8
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import completed_iterations, tagged
from offline_grpo.logger.atropos import SECTIONS, Benchmark, Names, mode_of, renamed
from offline_grpo.logger.samples import Advantages, chosen
from offline_grpo.redaction import redacted, redacted_text
from offline_grpo.settings import Group, Range, one_of
from offline_grpo.types import Metrics, RolloutGroup, text_of

STEP_METRIC = "iteration"
HIGHEST = ("eval/pass@1", "eval/reward_mean_all", "train/reward_mean", "train/success_rate")
"""W&B's table of runs shows the highest value beside the last one."""


@dataclass
class WandbLogger(RunListener, Group):
    """Logs `train/...` and `eval/...`; the x axis is completed iterations. A resumed run continues its wandb run."""

    key: ClassVar[str] = "logger.wandb"

    output_dir: Path
    mode: Annotated[str, one_of("online", "offline", "disabled")]
    project: Annotated[str, Range("set the project, for example offline-grpo", bool)]
    entity: str | None
    group: str | None
    name: str | None
    notes: str | None
    names: Names
    tags: list[str]
    samples: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._run: Any = None
        self._mode = ""  # of the benchmark
        self._benchmark = Benchmark()
        if self.mode == "online":
            import wandb  # slow to import (a second), and most runs do not need it

            fix = "there is no API key; run `wandb login`, set WANDB_API_KEY, or use offline and `wandb sync` later"
            self.check("mode", wandb.login(prompt=False), fix)

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        import wandb

        # Runs of a sweep are a group; a resumed run has its id in its folder.
        stored = self.output_dir / ".hydra" / "hydra.yaml"
        is_of_sweep = stored.is_file() and yaml.safe_load(stored.read_text())["hydra"]["mode"] == "MULTIRUN"
        sweep = "_".join(self.output_dir.resolve().parent.parts[-2:]) if is_of_sweep else None
        id_file = self.output_dir / "wandb_run_id"
        if not id_file.exists():
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex)
        # W&B uploads the command line and the configuration: without secrets.
        typed, sys.argv = sys.argv, [redacted_text(word) for word in sys.argv]
        try:
            self._run = wandb.init(
                dir=self.output_dir,
                mode=self.mode,  # pyright: ignore[reportArgumentType]
                project=self.project,
                entity=self.entity,
                group=sweep if self.group == "auto" else self.group,
                name=self.name or "/".join(self.output_dir.resolve().parts[-2:]),
                notes=self.notes,
                tags=self.tags,
                config=redacted(config),
                id=id_file.read_text().strip(),
                # Offline, the shared id joins the parts when they are synced.
                resume="allow" if self.mode == "online" else None,
            )
        finally:
            sys.argv = typed
        self._mode = mode_of(config) if self.names == "atropos" else ""
        # The x axis. wandb's own step can only increase, but a resumed run logs some iterations again.
        self._run.define_metric(STEP_METRIC, hidden=True)
        for section in {"train", "eval", "eval_intervals", *(SECTIONS if self._mode else ())}:
            self._run.define_metric(f"{section}/*", step_metric=STEP_METRIC)
        for key in HIGHEST:
            self._run.define_metric(key, step_metric=STEP_METRIC, summary="max,last")

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        theirs: dict[str, float] = {}
        if self._mode and name == "train":
            self._benchmark.records.append(metrics)
            theirs, metrics = renamed(metrics)
        self._run.log({STEP_METRIC: completed_iterations(name, iteration)} | tagged(name, metrics) | theirs)

    def rollouts(
        self, name: str, groups: Sequence[RolloutGroup], *, advantages: Advantages | None, iteration: int
    ) -> None:
        """A table of the samples of an evaluation."""
        if name == "train" or not self.samples:
            return
        import wandb

        table = wandb.Table(columns=["prompt", "completion", "answer", "reward", "is_correct", "problem_id"])
        for sample in chosen(groups, advantages, self.samples):
            asked = text_of(sample["prompt"][-1]) if sample["prompt"] else ""
            texts = (utf8(text) for text in (asked, sample["completion"], sample["answer"] or ""))
            table.add_data(*texts, sample["reward"], sample["is_correct"], sample["problem_id"])
        self._run.log({STEP_METRIC: completed_iterations(name, iteration), "eval/samples": table})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            if self._mode:
                run.summary.update({"benchmark/mode": self._mode, **self._benchmark.as_metrics()})
            run.finish()
