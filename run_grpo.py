"""Train a language model with GRPO: `uv run run_grpo.py [GROUP=OPTION] [KEY=VALUE] ...`; `--help` lists groups and keys."""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from offline_grpo.run import cli, config

config.register()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Run once. Returns the last held-out pass@1, which sweepers maximise."""
    from offline_grpo.run import app  # imports torch and transformers, so only after the configuration is composed

    return cli.run_job(lambda: app.run(cfg, Path(HydraConfig.get().runtime.output_dir), HydraConfig.get().overrides.task))


if __name__ == "__main__":
    cli.exit_with(main)
