"""Prints the sweep's table when a `--multirun` ends. In a separate file, because `sweep.py` needs no Hydra."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console

from offline_grpo.errors import ConfigError
from offline_grpo.report.sweep import print_sweep


class SweepSummary(Callback):
    """Enabled in `conf/config.yaml`: `hydra.callbacks.sweep_summary._target_: offline_grpo.report.hydra_callback.SweepSummary`."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        with suppress(ConfigError):  # no job started a run, and each has reported why
            print_sweep(Path(config.hydra.sweep.dir), Console())
