"""A resumed run has the configuration that it stored in `.hydra/`, with what is typed now on top.

Before Hydra reads the command line, `arguments` puts the run's own overrides in front of the typed ones, so that groups
are chosen as they were. Then `own_configuration` takes the configuration that the run stored, and changes only what the
typed overrides change: the run keeps its settings also where `conf/` has others today. `checked` refuses what cannot
change, and continues the learning rate. This module imports no torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from offline_grpo.checkpoint.files import latest_checkpoint
from offline_grpo.config.compose import fresh_schedule, key_of, quoted, readable
from offline_grpo.disk import write_whole
from offline_grpo.errors import ConfigError, require
from offline_grpo.history import launch, sweeps
from offline_grpo.history.folder import (
    NO_CHECKPOINT,
    ResumePoint,
    RunDir,
    changed_keys,
    is_finished,
    local_path,
    run_of,
)
from offline_grpo.redaction import flat
from offline_grpo.report.runs import read_yaml
from offline_grpo.settings import RunConfig, planned_updates
from offline_grpo.train.milestones import early_stop_reason

OVERRIDE = re.compile(r"~|\+*[^-=]+=")
"""How a word of the command line begins that is an override and not an option."""
SEARCH_PATH = "hydra.searchpath"
ABSENT: Any = object()
FIXED = {
    "model.train_id": "its weights are those of another model",
    "model.gguf_file": "its weights are those of another model",
    "model.tiny": "its weights are those of another model",
    "model.quantization": "its adapters were trained on another base",
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


def arguments(words: Sequence[str]) -> list[str]:
    """The command line, options last, with what it needs of the run or sweep that is resumed."""
    typed = readable([word for word in words if OVERRIDE.match(word)])
    options = [word for word in words if not OVERRIDE.match(word)]
    launch.typed[:] = [*typed, *options]  # argparse needs all overrides in one place
    is_sweep = not {"-m", "--multirun"}.isdisjoint(options)
    named, beside = _value("resume", typed), [] if launch.is_main() else ["hydra.run.dir=."]  # makes no folder
    if named == "auto":
        place = _value("hydra.sweep.dir" if is_sweep else "hydra.run.dir", typed)
        if place is not None and (sweeps.sweep_folder(place) if is_sweep else run_of(Path(place))) is not None:
            named = place
        elif place is None and is_sweep and (sweep := sweeps.newest_alike(typed)) is not None:
            named = str(sweep)
    if named in (None, "auto"):
        return [*beside, *typed, *options]
    if (sweep := sweeps.sweep_folder(named)) is not None:
        if launch.is_main():
            print(f"going on with the sweep in {sweep}; leave resume out to start another one", flush=True)
        options += [] if is_sweep else ["--multirun"]
        folders = [word for word in typed if key_of(word) == SEARCH_PATH] or search_path(sweep)
        own = sweeps.overrides(sweep, typed)
        return [*beside, *own, *folders, "resume=auto", f"hydra.sweep.dir={quoted(sweep)}", *options]
    require(not is_sweep, "resume", named, "is one run, whose folder all jobs of --multirun would share; leave it out")
    run, path = run_of(Path(named)), Path(named).expanduser().resolve()
    if run is None and was_cut_short(path):
        run = path
        if launch.is_main():
            print(f"resume={named}: has no checkpoint yet; it starts from the beginning, in that folder", flush=True)
    if run is None or not path.exists():
        raise ConfigError(f"resume={named}: {NO_CHECKPOINT}")
    typed = [word for word in typed if key_of(word) != "resume"] + [f"resume={quoted(named)}"]
    if path in (run, latest_checkpoint(run / "checkpoints")):
        typed.append(f"hydra.run.dir={quoted(run)}")
    # Hydra takes each addition and each choice of a group once
    again = {word.partition("=")[0] for word in typed}
    own = [word for word in own_overrides(run) if word.partition("=")[0] not in again]
    return [*beside, *own, *typed, *options]


def was_cut_short(run: Path) -> bool:
    """Whether the run in this folder was to write checkpoints, and came neither to the first one nor to its end."""
    stored = run / ".hydra" / "config.yaml"
    is_open = stored.is_file() and not (run / "report.png").exists() and run_of(run) is None
    return is_open and read_yaml(stored)["checkpoint"]["enabled"]


def own_overrides(run: Path) -> list[str]:
    """The overrides that a run was composed of, without `resume`, and the folders of its configuration."""
    path = run / ".hydra" / "overrides.yaml"
    own = [str(word) for word in read_yaml(path) or []] if path.exists() else []
    return [word for word in own if key_of(word) != "resume"] + search_path(run)


def search_path(folder: Path) -> list[str]:
    """The folders that `--config-dir` and `hydra.searchpath` added for a run or a sweep, as an override."""
    record = next((path for path in (folder / ".hydra" / "hydra.yaml", folder / sweeps.RECORD) if path.exists()), None)
    sources = [] if record is None else yaml.safe_load(record.read_text())["hydra"]["runtime"]["config_sources"]
    added = [f"{source['schema']}://{source['path']}" for source in sources if "command-line" in source["provider"]]
    return [f"{SEARCH_PATH}=[{','.join(map(quoted, added))}]"] if added else []


def own_configuration(cfg: DictConfig, folder: Path) -> tuple[DictConfig, set[str]]:
    """The configuration of this start with absolute paths, and the keys that were typed for a resumed run.

    Args:
        cfg: composed today, from the run's overrides and the typed ones.
        folder: of this start; the job of a sweep resumes there.
    """
    is_job = HydraConfig.get().mode is RunMode.MULTIRUN
    run = None if cfg.resume is None else run_of(folder if cfg.resume == "auto" else Path(cfg.resume))
    typed: set[str] = set()
    if run is not None and (run / ".hydra" / "config.yaml").exists():
        own = own_overrides(run)
        new = [word for word in HydraConfig.get().overrides.task if word not in own] if is_job else launch.typed
        typed = {key_of(word) for word in new if OVERRIDE.match(word)}
        now = _plain(cfg)
        before = _plain(hydra.compose("config", overrides=own)) if typed - {"resume"} else now
        named = {key.replace("/", ".") for key in typed}
        cfg = OmegaConf.create(merged(read_yaml(run / ".hydra" / "config.yaml"), before, now, named))
    for key, value in flat(_plain(cfg)).items():
        if (absolute := local_path(key, value)) != value:
            OmegaConf.update(cfg, key, absolute)
    return cfg, typed


def merged(stored: Any, before: Any, now: Any, named: Collection[str], prefix: str = "") -> dict[str, Any]:
    """`stored`, changed as `before` became `now`; what it lacks, because it is new, comes from `now`.

    Args:
        named: dotted keys that come from `now` in any case. So does a component that became another one, as a whole.
    """
    result = {}
    for name in {**stored, **now}:
        key, nodes = f"{prefix}{name}", [node.get(name, ABSENT) for node in (stored, before, now)]
        own, old, new = nodes
        if key in named or own is ABSENT:
            own = new
        elif all(isinstance(node, Mapping) for node in nodes) and old.get("_target_") == new.get("_target_"):
            own = merged(own, old, new, named, f"{key}.")
        elif old != new:
            own = new
        if own is not ABSENT:
            result[name] = own
    return result


def _plain(cfg: DictConfig) -> Any:
    return OmegaConf.to_container(cfg, resolve=False)


def _value(key: str, typed: Sequence[str]) -> str | None:
    word = next((word for word in reversed(typed) if word.startswith(f"{key}=")), f"{key}=null")
    value = OverridesParser.create().parse_override(word).value()
    return None if value is None else str(value)


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
    if not is_finished(point.source, state, plain):
        asked = {*typed, *changes}
        has_ended = point.num_done >= state.config["train"]["iterations"] and state.lr_schedule.kind != "constant"
        is_longer = config.train.iterations > point.num_done  # else only its last evaluation is left
        if has_ended and is_longer and SCHEDULE.isdisjoint(asked):
            kind, end = state.lr_schedule.kind, config.train.iterations
            fix = "set a new one, such as train.lr=1e-4 (it falls to 0 again, unless train.schedule=constant)"
            ended = f"the {kind} schedule of the learning rate has ended at iteration {point.num_done}"
            raise ConfigError(f"train.iterations={end}: {ended}; {fix}")
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


def describe(point: ResumePoint, config: RunConfig) -> list[str]:
    lines = [f"going on after iteration {point.num_done} of {config.train.iterations}, from {point.checkpoint}"]
    if point.changes:
        lines.append("changed: " + ", ".join(f"{key}={new} (was {old})" for key, (old, new) in point.changes.items()))
    now, update = point.lr_schedule, point.state.counters.num_updates
    if now is not None and now != point.state.lr_schedule:
        falls = "stays there" if now.kind == "constant" else f"falls to 0 at update {now.num_updates} ({now.kind})"
        lines.append(f"learning rate: continues at {config.train.lr * now(update):.3g} at update {update} and {falls}")
    return lines


def describe_finished(point: ResumePoint, config: RunConfig) -> str:
    """That a run is finished, how it is made longer, and how another one is started."""
    stop_when, why, further = config.train.stop_when, "", list[str]()
    if (early := early_stop_reason(point.state.milestones, stop_when)) is not None:
        why = f": {early}"
        limits = ("threshold", "patience")
        further += [f"train.stop_when.{name}=null" for name in limits if getattr(stop_when, name) is not None]
    if point.num_done >= config.train.iterations:
        further.append(f"train.iterations={2 * config.train.iterations}")
        if point.state.lr_schedule.kind != "constant":
            further.append(f"train.lr={config.train.lr:g}")
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
    """Write `.hydra/`, which Hydra would before the settings are checked (so `hydra.output_subdir=null`). Does nothing
    for a run that Hydra did not start."""
    if not HydraConfig.initialized():
        return
    folder = run_dir.path / ".hydra"
    folder.mkdir(exist_ok=True)
    own = [word for word in overrides if key_of(word) != "resume"]
    for name, content in {"config": cfg, "hydra": HydraConfig.instance().cfg, "overrides": own}.items():
        write_whole(folder / f"{name}.yaml", OmegaConf.to_yaml(content))


def record(run_dir: RunDir, cfg: DictConfig, overrides: Sequence[str], point: ResumePoint | None) -> None:
    """Add this start to `.hydra/starts.yaml`; where it changed the configuration, `.hydra/` describes the new one."""
    if not HydraConfig.initialized():
        return
    start: dict[str, Any] = {"time": datetime.now().isoformat(timespec="seconds"), "overrides": list(overrides)}
    if point is not None:
        changes = {key: list(pair) for key, pair in point.changes.items()}
        start |= {"after_iteration": point.num_done, "changes": changes, "checkpoint": str(point.checkpoint)}
        if changes:
            write_configuration(run_dir, cfg, overrides)
    with (run_dir.path / ".hydra" / "starts.yaml").open("a") as file:
        yaml.safe_dump([start], file, sort_keys=False)
