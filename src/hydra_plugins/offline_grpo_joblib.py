"""`hydra/launcher=joblib`: the runs of a sweep side by side, through Hydra's own launcher of that name. Hydra imports
this file at every start, so it imports nothing that takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SavingJoblibLauncher(Launcher):
    """After a Ctrl-C or SIGTERM every run saves and ends at its next safe point, and no other begins.

    `RunCallback` puts it in the place of the plugin's own launcher, whose settings it has.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See `Launcher.setup`."""
        from hydra_plugins.hydra_joblib_launcher.joblib_launcher import JoblibLauncher

        self._folder = Path(config.hydra.sweep.dir)
        self._launcher = JoblibLauncher(**self._settings)
        self._launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """See `Launcher.launch`.

        Raises:
            StopRequested: a signal arrived; the runs have been stopped.
        """
        from joblib import effective_n_jobs

        from offline_grpo.errors import StopRequested
        from offline_grpo.run import main, sweeps
        from offline_grpo.run.signals import StopSignal

        if effective_n_jobs(self._settings["n_jobs"]) == 1:  # in this process, as with Hydra's basic launcher
            return self._launcher.launch(job_overrides, initial_job_idx)
        with StopSignal.listening() as stop, stop.held("the running jobs have saved"), sweeps.passing_on(stop):
            runs = self._launcher.launch(job_overrides, initial_job_idx)
            if stop.number is not None:
                stopped = StopRequested(stop.number)
                main.say_how_to_resume_sweep(stopped, self._folder)
                raise stopped
            return runs
