"""`hydra/launcher=ray`: the runs of a sweep are tasks of a Ray cluster. Hydra takes launchers from this package alone,
and imports it at every start, so this file imports nothing that takes time.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

log = logging.getLogger(__name__)

POLL_S = 0.5
STOP_S = 60.0
"""How long runs may take to save and end after a Ctrl-C."""


class RayLauncher(Launcher):
    """Starts each run in a process of its own, wherever the cluster has room, and waits for all.

    All machines need this project's environment at the same path, and a file system that has the sweep's folder. Ctrl-C
    stops every run at its next safe point.

    Args: the keys of conf/hydra/launcher/ray.yaml.
    """

    def __init__(self, address: str, num_cpus: float, num_gpus: float | None, ray_init: Mapping[str, Any]) -> None:
        self._address, self._settings = address, dict(ray_init)
        self._num_cpus, self._num_gpus = num_cpus, num_gpus

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """See `Launcher.setup`."""
        self._context, self._function, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """See `Launcher.launch`.

        Raises:
            ConfigError: Ray is not installed, no cluster answers, or none of its machines has room for a run.
            StopRequested: a signal arrived; the runs have been stopped.
        """
        from offline_grpo.engine.ray_actor import connect
        from offline_grpo.errors import GrpoError
        from offline_grpo.run.run_dir import discard_fresh

        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # equal lines of two runs are two lines
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        folder = Path(self._config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            is_ours = connect(self._address, {"log_to_driver": True, **self._settings}, group="hydra.launcher")
            import ray

            try:
                return self._run([list(overrides) for overrides in job_overrides], initial_job_idx)
            finally:
                if is_ours:
                    ray.shutdown()
        except GrpoError:
            discard_fresh(folder)
            raise

    def _run(self, jobs: Sequence[list[str]], first: int) -> list[JobReturn]:
        import ray

        from offline_grpo.engine.ray_actor import room_for, shown
        from offline_grpo.errors import ConfigError, StopRequested
        from offline_grpo.run import main
        from offline_grpo.run.signals import StopSignal

        num_gpus = self._num_gpus
        if num_gpus is None:
            num_gpus = 1 if ray.cluster_resources().get("GPU") else 0
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(room_for(machine, {"CPU": self._num_cpus, "GPU": num_gpus}) for machine in machines):
            have = ", ".join(shown(machine) for machine in machines)
            asked = f"hydra.launcher.num_cpus={self._num_cpus:g} hydra.launcher.num_gpus={num_gpus:g}"
            raise ConfigError(f"{asked}: no machine of the Ray cluster has as many for a run (there are {have})")
        # a process for each run: CUDA and signal handlers are its own
        task = ray.remote(num_cpus=self._num_cpus, num_gpus=num_gpus, max_calls=1, max_retries=0)(_run_there)
        log.info("%d runs as Ray tasks, each with %g CPU cores and %g GPUs", len(jobs), self._num_cpus, num_gpus)
        for number, overrides in enumerate(jobs, first):
            log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
        state = Singleton.get_state()
        common = ray.put((str(Path.cwd()), sys.path, self._config, self._context, self._function, state))
        running = [task.options(name=f"run {n}").remote(common, words, n) for n, words in enumerate(jobs, first)]
        try:
            with StopSignal.listening() as stop, stop.held("the runs have saved"):
                while len(ray.wait(running, num_returns=len(running), timeout=POLL_S)[0]) < len(running):
                    stop.check()
        except BaseException as error:
            for reference in running:
                ray.cancel(reference)  # acts as a Ctrl-C there
            ray.wait(running, num_returns=len(running), timeout=STOP_S)
            if isinstance(error, StopRequested):
                main.say_how_to_resume_sweep(error, Path(self._config.hydra.sweep.dir))
            raise
        return [_result(reference, overrides) for reference, overrides in zip(running, jobs, strict=True)]


def _result(reference: Any, overrides: list[str]) -> JobReturn:
    """What a run returned; of one that ended without a word (killed, or lost with its machine), a failure."""
    import ray
    from ray.exceptions import RayError

    from offline_grpo.errors import reason_of

    try:
        result: JobReturn = ray.get(reference)
    except RayError as error:
        result = JobReturn(overrides=overrides, status=JobStatus.FAILED)
        result.return_value = RuntimeError(f"the run has ended without a result: {reason_of(error)}")
    return result


def _run_there(common: Any, overrides: list[str], number: int) -> JobReturn:
    """One run, in a process of the cluster. `common`: see `RayLauncher._run`."""
    folder, paths, config, context, function, state = common
    os.chdir(folder)
    sys.path.extend(path for path in paths if path not in sys.path)
    setup_globals()
    Singleton.set_state(state)
    of_run = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(of_run):
        of_run.hydra.job.id = f"{of_run.hydra.job.name}_{number}"
        of_run.hydra.job.num = number
    HydraConfig.instance().set_config(of_run)
    try:
        return run_job(function, of_run, "hydra.sweep.dir", "hydra.sweep.subdir", context)
    except SystemExit as error:  # a run that was stopped; Ray would take it for a crash
        stopped = JobReturn(overrides=overrides, status=JobStatus.FAILED)
        stopped.return_value = RuntimeError(f"the run has ended with exit code {error.code}")
        return stopped
