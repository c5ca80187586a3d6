"""Prints the sweep's table when a `--multirun` ends. In a separate file, because `sweep.py` needs no Hydra."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from offline_grpo.errors import ConfigError


class SweepSummary(Callback):
    """Enabled in `conf/config.yaml`: `hydra.callbacks.sweep_summary._target_: offline_grpo.report.hydra_callback.SweepSummary`.

    A sweep that is interrupted ends without `on_multirun_end`; it has its table too, of the runs so far, when the process exits.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._folder, self._process = Path(config.hydra.sweep.dir).resolve(), os.getpid()
        atexit.register(self._print)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self._print)
        self._print()

    def _print(self) -> None:
        if os.getpid() != self._process:  # a launcher's worker
            return
        from offline_grpo.logger import output_console
        from offline_grpo.report.sweep import print_sweep

        with suppress(ConfigError):  # no job started a run, and each has reported why
            print_sweep(self._folder, output_console())
