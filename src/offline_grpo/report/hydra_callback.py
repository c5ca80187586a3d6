"""Prints the sweep's table when a `--multirun` ends. In a separate file, because `sweep.py` needs no Hydra."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from offline_grpo.errors import ConfigError, GrpoError


class SweepSummary(Callback):
    """Enabled in `conf/config.yaml`: `hydra.callbacks.sweep_summary._target_:
    offline_grpo.report.hydra_callback.SweepSummary`.

    A sweep that is interrupted ends without `on_multirun_end`; it has its table too, of the runs so far, when the
    process exits.
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

        try:
            print_sweep(self._folder, output_console())
        except ConfigError:  # no job started a run, and each has reported why
            pass
        except BrokenPipeError:  # the reader's end, which `ending_with_reader` tells from others
            raise
        except (GrpoError, OSError) as error:  # the runs have ended as they have, whatever becomes of their table
            print(
                f"error: the sweep has no table: {error}; then run python -m offline_grpo.report {self._folder}",
                file=sys.stderr,
            )
