"""`hydra/launcher=joblib`, `shared_server` and `ray`: the runs of a sweep side by side, on this machine, there beside
one server, or on a cluster.

Hydra takes launchers from this package alone, and imports it at every start, so this file imports nothing that takes
time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

if TYPE_CHECKING:
    from offline_grpo.history.signals import StopSignal
    from offline_grpo.settings import RunConfig

log = logging.getLogger(__name__)

POLL_S = 0.5
STOP_S = 60.0
"""How long runs on a cluster may take to save and end after a Ctrl-C."""


class SideBySideLauncher(Launcher):
    """Starts each run in a process of its own, and waits for all. After a Ctrl-C or SIGTERM every run saves and ends at
    its next safe point, and no other begins; so too if this process is killed.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._function, self._config = hydra_context, task_function, config
        self._folder = Path(config.hydra.sweep.dir)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from offline_grpo.commands.main import say_how_to_resume_sweep
        from offline_grpo.errors import GrpoError, StopRequested
        from offline_grpo.history.folder import discard_fresh
        from offline_grpo.history.signals import StopSignal

        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        self._folder.mkdir(parents=True, exist_ok=True)
        jobs = {number: list(overrides) for number, overrides in enumerate(job_overrides, initial_job_idx)}
        log.info("%d runs side by side", len(jobs))
        for number, overrides in jobs.items():
            log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
        try:
            with StopSignal.listening() as stop, stop.held("the runs have saved"):
                return self._run(jobs, stop)
        except StopRequested as error:
            say_how_to_resume_sweep(error, self._folder)
            raise
        except GrpoError:
            discard_fresh(self._folder)
            raise

    def _lost(self, number: int, overrides: list[str], why: str) -> JobReturn:
        """A job that could not say itself how it ended costs itself only, as one that fails."""
        from offline_grpo.history import sweeps

        sweeps.report_failure(self._folder, number, why, 1)
        return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=None)

    @abstractmethod
    def _run(self, jobs: Mapping[int, list[str]], stop: StopSignal) -> list[JobReturn]:
        """What each job returned, by its number and overrides. `stop` is held."""


class LocalLauncher(SideBySideLauncher):
    """In `n_jobs` processes at a time, on this machine; -1 for as many as it has cores.

    `RunCallback` puts it in the place of the plugin's joblib launcher, whose settings it is given.
    """

    def __init__(self, n_jobs: int = -1, **_of_joblib: Any) -> None:
        self._limit = n_jobs if n_jobs >= 0 else max(1, (os.cpu_count() or 1) + 1 + n_jobs)

    def _run(self, jobs: Mapping[int, list[str]], stop: StopSignal) -> list[JobReturn]:
        from offline_grpo.errors import exit_code_of, how_ended

        # forked: this process has neither threads nor torch, and its handlers of signals are there from the start
        fork = multiprocessing.get_context("fork")
        waiting, running, results = list(jobs), dict[Connection, tuple[int, Any]](), dict[int, JobReturn]()
        is_told = False
        try:
            while running or (waiting and stop.number is None):
                while waiting and len(running) < self._limit and stop.number is None:
                    reader, writer = fork.Pipe(duplex=False)
                    number = waiting.pop(0)
                    process = fork.Process(target=self._work, args=(writer, jobs[number], number, os.getpid()))
                    process.start()
                    writer.close()
                    running[reader] = number, process
                if stop.number is not None and not is_told:
                    is_told = True
                    for _, process in running.values():
                        os.kill(process.pid, stop.number)
                for reader in wait(list(running), timeout=POLL_S):
                    assert isinstance(reader, Connection)
                    number, process = running.pop(reader)
                    try:
                        results[number] = reader.recv()
                        process.join()
                    except EOFError:
                        process.join()
                        how = how_ended(exit_code_of(process.exitcode))
                        results[number] = self._lost(number, jobs[number], f"the run was killed ({how})")
        finally:
            for _, process in running.values():  # of a second Ctrl-C
                process.terminate()
        stop.check()
        return [results[number] for number in jobs]

    def _work(self, writer: Connection, overrides: list[str], number: int, parent: int) -> None:
        from offline_grpo.engine.spawn import end_with_parent

        os.setpgid(0, 0)  # a terminal's Ctrl-C comes from the sweep's process alone, once
        end_with_parent(signal.SIGTERM)
        if os.getppid() == parent:
            writer.send(_run_one(self._config, self._context, self._function, overrides, number))


class SharedServerLauncher(LocalLauncher):
    """As many at a time as `n_jobs` says, all with one server, which has the base model once and an adapter for each.

    It ends with the last run, also where this process was killed. If it dies, the runs end with an error.
    """

    def _run(self, jobs: Mapping[int, list[str]], stop: StopSignal) -> list[JobReturn]:
        from offline_grpo.config.compose import key_of
        from offline_grpo.config.parts import OF_OWN_SERVER
        from offline_grpo.errors import ConfigError, EngineError, GrpoError
        from offline_grpo.history.resume import SWEEP_KEY
        from offline_grpo.start.shared_server import serve

        # What is typed for the server is for all runs.
        of_server = [[w for w in words if w.lstrip("+~").startswith(OF_OWN_SERVER)] for words in jobs.values()]
        for words in of_server:
            for word in set(words) ^ set(of_server[0]):
                raise ConfigError(f"{key_of(word)}: all runs have one server; sweep over it with hydra/launcher=joblib")

        # A process of its own starts the server, because the runs are forked from this one.
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()

        def start() -> None:
            os.setpgid(0, 0)  # the runs need it until they have saved, whatever a terminal's Ctrl-C says
            ours.close()
            configs = [partial(self._settings, words, number) for number, words in jobs.items()]
            serve(configs, min(self._limit, len(jobs)), self._folder, theirs)

        server = fork.Process(target=start)
        server.start()
        theirs.close()
        told = None
        try:
            with stop.interruptible():
                told = ours.recv()
            if isinstance(told, GrpoError):
                raise told
            urls, os.environ[SWEEP_KEY] = told
            log.info("the runs sample from %s", ", ".join(urls))
            place = f"generation.base_url=[{','.join(urls)}]", f"generation.api_key=${{oc.env:{SWEEP_KEY}}}"
            with_place = {n: [*(w for w in words if w not in of_server[0]), *place] for n, words in jobs.items()}
            return super()._run(with_place, stop)
        except EOFError as error:
            raise EngineError("what starts the server of the sweep has ended, with an error above") from error
        finally:
            ours.close()
            if told is None:  # it may still be starting
                server.terminate()
            server.join()

    def _settings(self, overrides: list[str], number: int) -> RunConfig:
        from offline_grpo.config.compose import typed

        cfg = _composed(self._context, self._config, overrides, number)
        with open_dict(cfg):
            del cfg["hydra"]
        return typed(cfg)


class RayLauncher(SideBySideLauncher):
    """As tasks of a Ray cluster, wherever it has room. The arguments are the keys of conf/hydra/launcher/ray.yaml.

    All machines need this project's environment at the same path, and a file system that has the sweep's folder.
    """

    def __init__(self, address: str, num_cpus: float, num_gpus: float | None, ray_init: Mapping[str, Any]) -> None:
        self._address, self._settings = address, dict(ray_init)
        self._num_cpus, self._num_gpus = num_cpus, num_gpus

    def _run(self, jobs: Mapping[int, list[str]], stop: StopSignal) -> list[JobReturn]:
        from offline_grpo.engine.ray_actor import connect, room_for, shown
        from offline_grpo.errors import reason_of, require

        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # equal lines of two runs are two lines
        is_ours = connect(self._address, {"log_to_driver": True, **self._settings}, group="hydra.launcher")
        import ray
        from ray.exceptions import RayError

        running: dict[Any, int] = {}
        try:
            num_gpus = self._num_gpus
            if num_gpus is None:
                num_gpus = 1 if ray.cluster_resources().get("GPU") else 0
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            has_room = any(room_for(machine, {"CPU": self._num_cpus, "GPU": num_gpus}) for machine in machines)
            key, have = f"hydra.launcher.num_cpus={self._num_cpus:g} hydra.launcher.num_gpus", map(shown, machines)
            fix = f"no machine of the Ray cluster has as many for a run (there are {', '.join(have)})"
            require(has_room, key, f"{num_gpus:g}", fix)
            # a process for each run: CUDA and signal handlers are its own
            task = ray.remote(num_cpus=self._num_cpus, num_gpus=num_gpus, max_calls=1, max_retries=0)(_run_there)
            hydras = self._config, self._context, self._function
            common = ray.put((str(Path.cwd()), sys.path, Singleton.get_state(), hydras))
            for number, words in jobs.items():
                running[task.options(name=f"run {number}").remote(common, words, number)] = number
            while len(ray.wait(list(running), num_returns=len(running), timeout=POLL_S)[0]) < len(running):
                stop.check()
            results = []
            for reference, number in running.items():
                try:
                    results.append(ray.get(reference))
                except RayError as error:  # it was killed, or lost with its machine
                    why = f"the run has ended without a result: {reason_of(error)}"
                    results.append(self._lost(number, jobs[number], why))
            return results
        except BaseException:
            for reference in running:
                ray.cancel(reference)  # acts as a Ctrl-C there
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=STOP_S)
            raise
        finally:
            if is_ours:
                ray.shutdown()


def _run_there(common: Any, overrides: list[str], number: int) -> JobReturn:
    """One run, in a process of the cluster."""
    folder, paths, state, hydras = common
    os.chdir(folder)
    sys.path.extend(path for path in paths if path not in sys.path)
    setup_globals()
    Singleton.set_state(state)
    config, context, function = hydras
    return _run_one(config, context, function, overrides, number)


def _run_one(
    config: DictConfig, context: HydraContext, function: TaskFunction, overrides: list[str], number: int
) -> JobReturn:
    of_run = _composed(context, config, overrides, number)
    HydraConfig.instance().set_config(of_run)
    try:
        result = run_job(function, of_run, "hydra.sweep.dir", "hydra.sweep.subdir", context)
        if result.status is JobStatus.FAILED:
            print_exception(error := result._return_value)
            # the sweep's process gets no traceback, and may not be able to build an error of this class
            result.return_value = RuntimeError(f"{type(error).__name__}: {error}")
        return result
    except SystemExit as error:  # a run that was stopped; Ray would take it for a crash
        failed = JobReturn(overrides=overrides, status=JobStatus.FAILED)
        failed.return_value = RuntimeError(f"the run has ended with exit code {error.code}")
        return failed


def _composed(context: HydraContext, config: DictConfig, overrides: list[str], number: int) -> DictConfig:
    of_run = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(of_run):
        of_run.hydra.job.id = f"{of_run.hydra.job.name}_{number}"
        of_run.hydra.job.num = number
    return of_run
