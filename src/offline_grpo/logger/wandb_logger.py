"""Metrics in Weights & Biases; by default only written to disk, for a later `wandb sync`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import completed_iterations
from offline_grpo.types import Metrics

MODES = ("online", "offline", "disabled")
STEP_METRIC = "iteration"


@dataclass
class WandbLogger(RunListener):
    """Logs `train/...` and `eval/...`; the x axis is completed iterations. A resumed run continues the same wandb run.

    Raises:
        ConfigError: the project is missing, the mode is unknown, or there is no API key to be online with.
    """

    output_dir: Path
    mode: str
    project: str | None
    entity: str | None
    group: str | None
    name: str | None
    tags: list[str]
    _run: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"logger.wandb.mode={self.mode}: must be one of {', '.join(MODES)}")
        if not self.project:
            raise ConfigError(f"logger.wandb.project={self.project}: set the project of the run, for example offline-grpo")
        if self.mode == "online":
            import wandb  # slow to import (a second), and most runs do not need it

            if not wandb.login(prompt=False):
                raise ConfigError(
                    "logger.wandb.mode=online: Weights & Biases has no API key of yours; run `wandb login`, set WANDB_API_KEY, or use "
                    "logger.wandb.mode=offline and `wandb sync` later"
                )

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        import wandb

        self._run = wandb.init(
            dir=self.output_dir,
            mode=self.mode,  # pyright: ignore[reportArgumentType]  # one of MODES
            project=self.project,
            entity=self.entity,
            group=self.group,
            name=self.name,
            tags=self.tags,
            config=dict(config),
            id=self._stable_run_id(),
            resume="allow" if self.mode == "online" else None,  # offline, the shared id joins the parts when they are synced
        )
        # wandb's own step can only increase, but a resumed run logs some iterations again.
        self._run.define_metric(STEP_METRIC, hidden=True)
        for name in ("train", "eval"):
            self._run.define_metric(f"{name}/*", step_metric=STEP_METRIC)

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        self._run.log({STEP_METRIC: completed_iterations(name, iteration)} | {f"{name}/{key}": value for key, value in metrics.items()})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _stable_run_id(self) -> str:
        path = self.output_dir / "wandb_run_id"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(uuid.uuid4().hex)
        return path.read_text().strip()
