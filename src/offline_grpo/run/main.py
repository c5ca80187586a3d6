"""The command that trains: `run_grpo.py`, `offline-grpo` and `python -m offline_grpo` are this one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from offline_grpo.run import cli, config, going_on, ray_trainers, resume, sweep_jobs, sweep_resume, sweep_workers
from offline_grpo.run.config import as_plain
from offline_grpo.run.help import help_text
from offline_grpo.run.interrupt import StopSignal
from offline_grpo.run.run_dir import RunDir

config.register()  # at import, because processes that a sweep's launcher starts import this module for `job`


def job(cfg: DictConfig) -> float | None:
    """Run once. Returns the last held-out pass@1, which sweepers maximise."""
    with sweep_jobs.numbered_lines(), sweep_workers.working():
        return cli.run_job(lambda: _run(cfg, Path(HydraConfig.get().runtime.output_dir)))


def _run(cfg: DictConfig, folder: Path) -> float | None:
    with going_on.kept_record(folder):
        return _start(cfg, folder)


def _start(cfg: DictConfig, folder: Path) -> float | None:
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        with StopSignal.listening() as stop:
            stop.check()  # a signal may have come before this job
        sweep_jobs.take_folder()
    is_of_sweep = cfg.resume == "auto" and HydraConfig.get().mode is RunMode.MULTIRUN
    is_finished = is_of_sweep and sweep_resume.is_finished(folder, as_plain(cfg)["train"])
    if is_finished:
        from offline_grpo.report.sweep_run import read_run

        print(f"run {HydraConfig.get().job.num} of the sweep is finished: {folder}")
        if (folder / "report.png").exists():
            return read_run(folder, folder.name).final_pass_at_1
    own = resume.own_configuration(cfg)
    if ray_trainers.is_wanted(own.placement):
        return ray_trainers.train(config.typed(own), folder)
    from offline_grpo.run import app  # which imports torch

    if is_finished:
        return app.report(RunDir(folder))
    return app.run(own, folder, HydraConfig.get().overrides.task)


def main() -> NoReturn:
    """Compose the configuration from `conf/` and the command line, run, and exit."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        words = [word for word in sys.argv[1:] if not word.startswith("-") and "=" not in word]
        cli.run_command(lambda: print(help_text(config.folder(), words)))
    cli.exit_with(hydra.main(version_base="1.3", config_path=str(config.folder()), config_name="config")(job))
