"""The command that trains: `run_grpo.py`, `offline-grpo` and `python -m offline_grpo` are this one."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from offline_grpo.run import cli, config

config.register()  # at import, because processes that a sweep's launcher starts import this module for `job`


def job(cfg: DictConfig) -> float | None:
    """Run once. Returns the last held-out pass@1, which sweepers maximise."""
    return cli.run_job(lambda: _run(cfg))


def _run(cfg: DictConfig) -> float | None:
    from offline_grpo.run import app

    return app.run(cfg, Path(HydraConfig.get().runtime.output_dir), HydraConfig.get().overrides.task)


def main() -> NoReturn:
    """Compose the configuration from `conf/` and the command line, run, and exit."""
    cli.exit_with(hydra.main(version_base="1.3", config_path=str(config.folder()), config_name="config")(job))
