"""A run that goes on from a checkpoint: what may differ now, how its learning rate goes on, whether it is finished, and
its record.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from offline_grpo.checkpoint.files import latest_checkpoint
from offline_grpo.disk import write_whole
from offline_grpo.errors import ConfigError
from offline_grpo.run import launch, resume, sweep_resume
from offline_grpo.run.preflight import fresh_schedule
from offline_grpo.run.run_dir import ResumePoint, RunDir, changed_keys
from offline_grpo.settings import RunConfig, planned_updates
from offline_grpo.train.milestones import early_stop_reason, stopping_settings

RECORDS = ("config.yaml", "overrides.yaml", "hydra.yaml")
ACCEPTED = "accepted"
"""Folder in `.hydra/` with a copy of its files, as they were when the run went on last."""
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


def checked(point: ResumePoint, config: RunConfig, plain: Mapping[str, Any]) -> ResumePoint:
    """The point with what differs now and how the learning rate goes on.

    Raises:
        ConfigError: a change that this run cannot take.
    """
    changes = changed_keys(point.state.config, plain)
    for key, (old, new) in changes.items():
        reason = next((why for fixed, why in FIXED.items() if key == fixed or key.startswith(f"{fixed}.")), None)
        if reason is not None:
            raise ConfigError(
                f"{key}={new}: the run that goes on has {old}, and {reason}; leave {key} out, or start a new run from its weights: "
                f"model=hf model.train_id={point.checkpoint} without resume"
            )
    if config.train.iterations < point.num_done:
        raise ConfigError(
            f"train.iterations={config.train.iterations}: the checkpoint has {point.num_done} iterations already; "
            "give more, or resume=RUN/checkpoints/iter_NNN, an earlier one"
        )
    typed = resume.typed_keys()
    if (
        point.state.lr_schedule(point.state.counters.num_updates) == 0
    ):  # else its command line, typed again, changes nothing
        typed |= sweep_resume.typed_keys()
    schedule = replace(fresh_schedule(config), num_updates=_planned_end(point, config))
    if not is_finished(point, config):
        schedule = schedule.continuing(
            point.state.lr_schedule,
            point.state.counters.num_updates,
            restart=not {"train.lr", "train.optimizer.lr"}.isdisjoint(typed | changes.keys()),
            warms_up="train.warmup_steps" in typed | changes.keys(),
        )
    return replace(point, changes=changes, lr_schedule=schedule)


def _planned_end(point: ResumePoint, config: RunConfig) -> int:
    """The update at which the run will end, if it makes as many in each iteration from now on as its settings plan."""
    state = point.state
    before = OmegaConf.create({key: state.config[key] for key in ("train", "data")})
    if planned_updates(before.train, before.data) != config.planned_updates:
        return state.counters.num_updates + max(0, config.train.iterations - point.num_done) * config.planned_updates
    return state.lr_schedule.num_updates + (config.train.iterations - before.train.iterations) * config.planned_updates


def is_finished(point: ResumePoint, config: RunConfig) -> bool:
    """Whether there is nothing left to do."""
    is_over = (
        point.num_done >= config.train.iterations
        or early_stop_reason(point.state.milestones, config.train.stop_when) is not None
    )
    return is_over and not (config.eval.enabled and point.run_dir.misses_evaluation(point.state))


def describe(point: ResumePoint, config: RunConfig) -> list[str]:
    """What is said about a run that goes on."""
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
    schedule = point.state.lr_schedule
    further = [
        f"train.stop_when.{name}=null" for name in stopping_settings(point.state.milestones, config.train.stop_when)
    ]
    if point.num_done >= config.train.iterations:
        further.append(f"train.iterations={2 * config.train.iterations}")
    if schedule(point.state.counters.num_updates) == 0:
        further.append(f"train.lr={config.train.lr:g}")
    early = early_stop_reason(point.state.milestones, config.train.stop_when)
    why = f": {early}" if early is not None else ""
    if point.changes:
        why += "; changed to no effect: " + ", ".join(f"{key}={new}" for key, (_, new) in point.changes.items())
    longer = command(point.run_dir.path, *further)
    return f"finished: {point.num_done} of {config.train.iterations} iterations{why}; longer: {longer}; anew: leave resume out"


def command(path: Path, *overrides: str) -> str:
    """The command line that goes on with the run or the sweep in a folder, launched as this process was."""
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.join([*launch.typed_command(), f"resume={resume.quoted(path)}", *overrides])


@contextmanager
def kept_record(run: Path) -> Iterator[None]:
    """At the end, `.hydra/` says what the last start did that was not refused, and that had something to do. Hydra
    writes there before anything of ours looks at the settings."""
    try:
        yield
    finally:
        with suppress(OSError):  # of a disk that is full or gone something else will be told
            _copy_records(run / ".hydra" / ACCEPTED, run / ".hydra")


def _copy_records(folder: Path, other: Path) -> None:
    for name in RECORDS if launch.is_main() else ():
        content = (folder / name).read_bytes() if (folder / name).exists() else None
        if content is not None and not ((other / name).exists() and (other / name).read_bytes() == content):
            write_whole(other / name, content)


def where(run_dir: RunDir) -> str:
    """How to go on with a run that was stopped."""
    checkpoint = latest_checkpoint(run_dir.checkpoints)
    return "nothing was saved" if checkpoint is None else f"go on with: {command(run_dir.path)}"


def record(
    run_dir: RunDir,
    cfg: DictConfig,
    overrides: Sequence[str],
    point: ResumePoint | None,
    aside: Path | None,
    inputs: Mapping[str, str],
) -> None:
    """Add this start to `.hydra/starts.yaml`. If it changed the configuration, `.hydra/` describes the new one; the
    first one is kept as `config_first.yaml` and `overrides_first.yaml`.

    Args:
        aside: where this start moved what an earlier one wrote (`set_aside.py`), None if it moved nothing.
        inputs: see `inputs.hashes`.
    """
    folder = run_dir.path / ".hydra"
    if not folder.is_dir():  # a run that Hydra did not start
        return
    start: dict[str, Any] = {"time": datetime.now().isoformat(timespec="seconds"), "overrides": list(overrides)}
    if point is not None:
        start |= {
            "after_iteration": point.num_done,
            "changes": {key: list(pair) for key, pair in point.changes.items()},
        }
    if aside is not None:
        start["set_aside"] = str(aside.relative_to(run_dir.path))
    if inputs:
        start["inputs"] = dict(inputs)
    with (folder / "starts.yaml").open("a") as file:
        yaml.safe_dump([start], file, sort_keys=False)
    if point is not None and point.changes:
        _record_changes(folder, cfg, overrides)
    (folder / ACCEPTED).mkdir(exist_ok=True)
    _copy_records(folder, folder / ACCEPTED)


def _record_changes(folder: Path, cfg: DictConfig, overrides: Sequence[str]) -> None:
    content = {
        "config": OmegaConf.to_yaml(cfg),
        "overrides": OmegaConf.to_yaml([w for w in overrides if not w.startswith("resume=")]),
    }
    for name, text in content.items():
        path, first, before = folder / f"{name}.yaml", folder / f"{name}_first.yaml", folder / ACCEPTED / f"{name}.yaml"
        before = (
            before if before.exists() else path
        )  # Hydra has written the new one already, if the run's folder was named
        if before.exists() and not first.exists():
            shutil.copy(before, first)
        path.write_text(text)
