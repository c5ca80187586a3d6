"""A resumed run: what may differ now, how its learning rate continues, whether it is finished; and `.hydra/`, which
describes every run. Imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from offline_grpo.checkpoint.files import latest_checkpoint
from offline_grpo.checkpoint.state import TrainerState
from offline_grpo.disk import write_whole
from offline_grpo.errors import ConfigError
from offline_grpo.run.config import fresh_schedule, key_of, quoted
from offline_grpo.run.run_dir import ResumePoint, RunDir, changed_keys
from offline_grpo.settings import RunConfig, StopWhenConfig, planned_updates
from offline_grpo.train.milestones import early_stop_reason

FIXED = {
    "model.train_id": "its weights are those of another model",
    "model.tiny": "its weights are those of another model",
    "model.lora": "its adapters have another shape",
    "task._target_": "it was trained on another task",
    "rollouts._target_": "its rollouts come from another source",
    "train.optimizer._target_": "its optimizer has another state",
    "train.precision": "its weights and masters have another format",
    "train.train_layer_indices": "it trains other weights",
}
"""What a run cannot change on its way, and why."""
PEAK = {"train.lr", "train.optimizer.lr"}
SCHEDULE = {*PEAK, "train.schedule", "train.warmup_steps"}


def checked(
    point: ResumePoint, config: RunConfig, plain: Mapping[str, Any], typed: Collection[str] = ()
) -> ResumePoint:
    """The point with what differs now and how the learning rate continues. `typed`: keys that the command line sets.

    Raises ConfigError for a change that this run cannot take.
    """
    state, changes = point.state, changed_keys(point.state.config, plain)
    for key, (old, new) in changes.items():
        reason = next((why for fixed, why in FIXED.items() if key == fixed or key.startswith(f"{fixed}.")), None)
        if reason is not None:
            fix = f"start a new run from its weights: model=hf model.train_id={point.checkpoint} without resume"
            raise ConfigError(f"{key}={new}: the resumed run has {old}, and {reason}; leave {key} out, or {fix}")
    schedule = replace(fresh_schedule(config), num_updates=_planned_end(point, config))
    if not is_finished(point, plain):
        asked = {*typed, *changes}
        has_ended = point.num_done >= state.config["train"]["iterations"] and state.lr_schedule.kind != "constant"
        is_longer = config.train.iterations > point.num_done  # else only its last evaluation is left
        if has_ended and is_longer and SCHEDULE.isdisjoint(asked):
            ended = (
                f"the {state.lr_schedule.kind} schedule of the learning rate has ended at iteration {point.num_done}"
            )
            fix = "set a new one, such as train.lr=1e-4 (it falls to 0 again, unless train.schedule=constant)"
            raise ConfigError(f"train.iterations={config.train.iterations}: {ended}; {fix}")
        schedule = schedule.continuing(
            state.lr_schedule,
            state.counters.num_updates,
            restart=has_ended or not PEAK.isdisjoint(changes),
            warms_up="train.warmup_steps" in asked,
        )
    return replace(point, changes=changes, lr_schedule=schedule)


def _planned_end(point: ResumePoint, config: RunConfig) -> int:
    """The update at which the run will end, if it makes as many in each iteration from now on as its settings plan."""
    state = point.state
    before = OmegaConf.create({key: state.config[key] for key in ("train", "data")})
    if planned_updates(before.train, before.data) != config.planned_updates:
        return state.counters.num_updates + max(0, config.train.iterations - point.num_done) * config.planned_updates
    return state.lr_schedule.num_updates + (config.train.iterations - before.train.iterations) * config.planned_updates


def has_ended(run: Path, state: TrainerState, config: Mapping[str, Any]) -> bool:
    """Whether a run with this newest checkpoint has nothing left to do with these settings."""
    settings = config["train"]
    is_early = early_stop_reason(state.milestones, StopWhenConfig(**settings["stop_when"])) is not None
    is_over = is_early or state.iteration + 1 >= settings["iterations"]
    return is_over and not (config["eval"]["enabled"] and RunDir(run).misses_evaluation(state))


def is_finished(point: ResumePoint, config: Mapping[str, Any]) -> bool:
    """`has_ended`, of the run to resume."""
    return has_ended(point.checkpoint.parent.parent, point.state, config)


def describe(point: ResumePoint, config: RunConfig) -> list[str]:
    """The lines about a resumed run."""
    lines = [f"going on after iteration {point.num_done} of {config.train.iterations}, from {point.checkpoint}"]
    if point.changes:
        lines.append("changed: " + ", ".join(f"{key}={new} (was {old})" for key, (old, new) in point.changes.items()))
    earlier, now = point.state.lr_schedule, point.lr_schedule
    if now is not None and now != earlier:
        update = point.state.counters.num_updates
        falls = "stays there" if now.kind == "constant" else f"falls to 0 at update {now.num_updates} ({now.kind})"
        lines.append(f"learning rate: goes on at {config.train.lr * now(update):.3g} at update {update} and {falls}")
    return lines


def describe_finished(point: ResumePoint, config: RunConfig) -> str:
    """That a run is finished, how it is made longer, and how another one is started."""
    stop_when = config.train.stop_when
    early = early_stop_reason(point.state.milestones, stop_when)
    alone = {"threshold": replace(stop_when, patience=None), "patience": replace(stop_when, threshold=None)}
    limits = [name for name, one in alone.items() if early_stop_reason(point.state.milestones, one) is not None]
    further = [f"train.stop_when.{name}=null" for name in limits]
    if point.num_done >= config.train.iterations:
        further.append(f"train.iterations={2 * config.train.iterations}")
        if point.state.lr_schedule.kind != "constant":
            further.append(f"train.lr={config.train.lr:g}")
    why = f": {early}" if early is not None else ""
    if point.changes:
        why += "; changed to no effect: " + ", ".join(f"{key}={new}" for key, (_, new) in point.changes.items())
    done = f"{point.num_done} of {config.train.iterations} iterations"
    return f"finished: {done}{why}; longer: {command(point.run_dir.path, *further)}; anew: leave resume out"


def command(path: Path, *overrides: str) -> str:
    """The command line that resumes the run or the sweep in a folder."""
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.join(["uv", "run", "run_grpo.py", f"resume={quoted(path)}", *overrides])


def where(run_dir: RunDir) -> str:
    """How to resume a run that was stopped."""
    checkpoint = latest_checkpoint(run_dir.checkpoints)
    return "nothing was saved" if checkpoint is None else f"go on with: {command(run_dir.path)}"


def write_configuration(run_dir: RunDir, cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Write `.hydra/`: Hydra itself writes none (`hydra.output_subdir=null`), because it would before the settings are
    checked. Does nothing for a run that Hydra did not start."""
    if not HydraConfig.initialized():
        return
    folder = run_dir.path / ".hydra"
    folder.mkdir(exist_ok=True)
    write_whole(folder / "config.yaml", OmegaConf.to_yaml(cfg))
    write_whole(folder / "hydra.yaml", OmegaConf.to_yaml(HydraConfig.instance().cfg))
    own = [word for word in overrides if key_of(word) != "resume"]
    write_whole(folder / "overrides.yaml", OmegaConf.to_yaml(own))


def record(run_dir: RunDir, cfg: DictConfig, overrides: Sequence[str], point: ResumePoint | None) -> None:
    """Add this start to `.hydra/starts.yaml`; where it changed the configuration, `.hydra/` describes the new one."""
    if not HydraConfig.initialized():
        return
    start: dict[str, Any] = {"time": datetime.now().isoformat(timespec="seconds"), "overrides": list(overrides)}
    if point is not None:
        changes = {key: list(pair) for key, pair in point.changes.items()}
        start |= {"after_iteration": point.num_done, "changes": changes, "checkpoint": str(point.checkpoint)}
    if point is None or point.changes:
        write_configuration(run_dir, cfg, overrides)
    with (run_dir.path / ".hydra" / "starts.yaml").open("a") as file:
        yaml.safe_dump([start], file, sort_keys=False)
