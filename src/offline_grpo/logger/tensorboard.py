"""Metrics in TensorBoard: `tensorboard --logdir outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offline_grpo.interfaces import RunListener
from offline_grpo.logger import completed_iterations
from offline_grpo.types import Metrics


@dataclass
class TensorBoardLogger(RunListener):
    """Writes event files to `tensorboard/` under `output_dir`; the x axis of `train/...` and `eval/...` is completed iterations.

    Args:
        flush_s: longest time that values are buffered in memory before they are written, in seconds.
    """

    output_dir: Path
    flush_s: int
    _writer: Any = field(default=None, init=False, repr=False)

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # slow to import (seconds), and most runs do not need it

        self._writer = SummaryWriter(str(self.output_dir / "tensorboard"), flush_secs=self.flush_s)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2, default=str)}\n```")

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        step = completed_iterations(name, iteration)
        for key, value in metrics.items():
            self._writer.add_scalar(f"{name}/{key}", value, global_step=step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
