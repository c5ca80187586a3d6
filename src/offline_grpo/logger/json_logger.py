"""Metrics as JSON, a file per phase and iteration. Plots, summaries and sweep tables are made only from these files."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from offline_grpo.disk import write_whole
from offline_grpo.errors import GrpoError
from offline_grpo.interfaces import RunListener
from offline_grpo.types import Metrics


@dataclass(frozen=True)
class JsonLogger(RunListener):
    """Writes `metrics/train_iter_000.json`, `metrics/eval_iter_000.json`, ... and `metrics/eval_init.json`.

    A file is complete or absent. Keys are sorted, so equal metrics give equal bytes.
    """

    output_dir: Path

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        """Write one file. Raises GrpoError for NaN and infinity, which JSON cannot represent."""
        suffix = "init" if iteration == -1 else f"iter_{iteration:03d}"
        for key, value in metrics.items():
            if not math.isfinite(value):
                raise GrpoError(f"{name} metric {key} is {value} ({suffix}); metrics must be finite numbers")
        path = self.output_dir / "metrics" / f"{name}_{suffix}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dict(metrics), indent=2, sort_keys=True, allow_nan=False) + "\n")
