"""How a run goes on: which checkpoint `resume` means, and with which configuration. Imports no torch.

A resumed run has its own configuration, which it stored in `.hydra/`, and what is typed now as `key=value` on top. Its
groups stay: another loss, task or engine makes another run, which may start from this one's weights.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from offline_grpo.checkpoint.files import TrainerState, latest_checkpoint, latest_state, newest_sound, verified_state
from offline_grpo.config.compose import composed, folders, fresh_schedule, groups, key_of, quoted
from offline_grpo.disk import matching, write_whole
from offline_grpo.errors import CheckpointError, ConfigError
from offline_grpo.history.folder import Lock, RunDir
from offline_grpo.installed import run_command
from offline_grpo.redaction import redacted
from offline_grpo.report.runs import WITHOUT_EFFECT, Run, read_yaml, starts_of
from offline_grpo.settings import RunConfig, StopWhenConfig, flat, planned_updates
from offline_grpo.train.schedule import LrSchedule, early_stop_reason

NO_CHECKPOINT = "no checkpoint found; use a run folder, its checkpoints/iter_NNN, or auto"
SEARCH_PATH = "hydra.searchpath"
SWEEP_KEY = "OFFLINE_GRPO_SWEEP_SERVER_KEY"
"""Where runs of `hydra/launcher=shared_server` find the key of their server: other users can read command lines, and
`.hydra/` is kept."""
LOCAL = ("train_id", "ref_id", "teacher", "gguf_file", "chat_template", "path", "cache_dir")
"""Keys, at any depth, whose values may be paths."""
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

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to start from, the folder that the run writes to, and, from `checked`, the changed keys and new
    learning rates."""

    run_dir: RunDir
    checkpoint: Path
    state: TrainerState
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # see `changed_keys`
    lr_schedule: LrSchedule | None = None

    @property
    def num_done(self) -> int:
        return self.state.iteration + 1

    @property
    def source(self) -> RunDir:
        """The folder of the run that wrote the checkpoint; differs from `run_dir` for older checkpoints."""
        return RunDir(self.checkpoint.parent.parent)


# Which checkpoint.


def find_resume_point(
    resume: str | None, fresh: RunDir, config: Mapping[str, Any], locks: ExitStack
) -> ResumePoint | None:
    """The checkpoint that `resume` refers to, or None to start a new run. Locks the folder that the run will write to.

    Args:
        resume: a run folder: its newest intact checkpoint, or if it has none its beginning; a checkpoint: if not the
        newest, a new run starts in `fresh`; "auto": `fresh` if it has a checkpoint, else the newest run with this
        configuration; or None.
        fresh: this launch's folder.
        locks: gets the locks.

    Raises ConfigError where there is no checkpoint, another process writes, or a new run would mix with an older one;
    CheckpointError where every checkpoint is damaged.
    """
    path = None if resume is None else fresh.path if resume == "auto" else Path(resume).expanduser().resolve()
    run = None if path is None else run_of(path)
    if run is None and path not in (None, fresh.path):  # for that one see `was_cut_short`
        raise ConfigError("resume", resume, NO_CHECKPOINT)

    # `auto` in outputs/DATE/TIME takes the newest run there that is like this one; other folders only resume
    # themselves. A run whose first start had changes is a branch of another one.
    outputs = fresh.path.parent.parent
    if resume == "auto" and run is None and re.fullmatch(r"\d{4}-\d{2}-\d{2}", fresh.path.parent.name):
        for other in sorted(matching(outputs, "*/*"), reverse=True):
            latest = latest_state(other / "checkpoints") if other != fresh.path else None
            is_branch = any(start.get("changes") for start in starts_of(other)[:1])
            if latest is None or is_branch or changed_keys(latest.config, config):
                continue
            lock = Lock(other, "resume=auto")
            try:
                point = ResumePoint(RunDir(other), *newest_sound(other / "checkpoints"))
            except CheckpointError as error:
                log.warning("%s; skipped", error)
                lock.release()
                continue
            locks.callback(lock.release)
            return point

    # A run goes on in its folder, from its newest checkpoint: the lock comes before the look, because another process
    # may just have written one.
    older: ResumePoint | None = None
    if run is not None and path is not None:
        state = None if path == run else verified_state(path)
        if state is None or path == latest_checkpoint(run / "checkpoints"):
            locks.callback(Lock(run, f"resume={resume}").release)
            return ResumePoint(RunDir(run), *(newest_sound(run / "checkpoints") if state is None else (path, state)))
        older = ResumePoint(fresh, path, state)

    # A new run, perhaps from an older checkpoint. Its folder may have what a start left that was killed before it saved
    # anything, if this one resumes it.
    locks.callback(Lock(fresh.path, f"hydra.run.dir={fresh.path}").release)
    is_repeated = resume is not None and run is None and not fresh.is_reported
    if latest_checkpoint(fresh.checkpoints) is not None or (any(fresh.records()) and not is_repeated):
        fix = "this folder has a run; continue it with resume=auto, or choose another folder"
        raise ConfigError("hydra.run.dir", fresh.path, fix)
    return older


def run_of(path: Path) -> Path | None:
    """The run folder of this run or checkpoint path; None if there is no run."""
    path = path.expanduser().resolve()
    if path.name.startswith("iter_") or (path / "trainer").is_dir():
        return path.parent.parent
    return path if latest_checkpoint(path / "checkpoints") is not None else None


def is_finished(run: RunDir, state: TrainerState, config: Mapping[str, Any]) -> bool:
    """Whether a run with this newest checkpoint has nothing left to do with these settings."""
    settings = config["train"]
    is_early = early_stop_reason(state.milestones, StopWhenConfig(**settings["stop_when"])) is not None
    is_over = is_early or state.iteration + 1 >= settings["iterations"]
    return is_over and not (config["eval"]["enabled"] and run.misses_evaluation(state))


def was_cut_short(run: Path) -> bool:
    """Whether the run in this folder was to write checkpoints, and came neither to the first one nor to its end."""
    stored = run / ".hydra" / "config.yaml"
    is_open = stored.is_file() and not RunDir(run).is_reported and run_of(run) is None
    return is_open and read_yaml(stored)["checkpoint"]["enabled"]


def value_of(key: str, words: Sequence[str]) -> str | None:
    """The value that the last of these overrides gives a key; None for null, and where none does."""
    word = next((word for word in reversed(words) if word.startswith(f"{key}=")), f"{key}=null")
    value = OverridesParser.create().parse_override(word).value()
    return None if value is None else str(value)


# With which configuration.


def resumed_configuration(run: Path, typed: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The configuration that a run has stored with `typed` on top, and the overrides that it is now made of. Keys that
    are new since the run began have today's values. Raises ConfigError for another option of a group.
    """
    own = own_overrides(run)
    choices = Run(run, {}, {}).choices
    options = groups(folders())

    # What is typed: values, other loggers, which change nothing that is learnt, and other options of the run's own.
    kept = [word for word in typed if not key_of(word).startswith(("hydra.", "hydra/", "resume"))]
    values = [word for word in kept if key_of(word).partition("@")[0] not in options]
    listeners = [word for word in kept if key_of(word) in WITHOUT_EFFECT and word not in values]
    for word in kept:
        key, _, value = word.partition("=")
        is_own = word in own or choices.get(key.lstrip("+")) == value
        if word not in values and word not in listeners and not is_own:
            weights = f"model=hf model.train_id={latest_checkpoint(run / 'checkpoints')}"
            fix = f"a resumed run keeps its groups; start a new run from its weights: {weights} {word} without resume"
            raise ConfigError(f"{word}: {fix}")

    # What today's files say of the run's own choices, under what the run stored, under what is typed.
    cfg = composed([*(word for word in own if key_of(word) not in map(key_of, listeners)), *listeners])
    stored = OmegaConf.load(run / ".hydra" / "config.yaml")
    assert isinstance(stored, DictConfig)
    for word in listeners:
        del stored[key_of(word)]
    OmegaConf.set_struct(cfg, False)
    cfg.merge_with(stored)
    OmegaConf.set_struct(cfg, True)
    parsed = OverridesParser.create().parse_overrides(values)
    ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, run_mode=RunMode.RUN, from_shell=True)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, cfg)
    again = {key_of(word) for word in (*values, *listeners)}
    return cfg, [*(word for word in own if key_of(word) not in again), *values, *listeners]


def own_overrides(run: Path) -> list[str]:
    """The overrides that a run was composed of, without `resume`, and the folders of its configuration."""
    path = run / ".hydra" / "overrides.yaml"
    own = [str(word) for word in read_yaml(path) or []] if path.exists() else []
    return [word for word in own if key_of(word) not in ("resume", SEARCH_PATH)] + search_path(run)


def search_path(folder: Path) -> list[str]:
    """The folders that `--config-dir` and `hydra.searchpath` added for a run or a sweep, as an override."""
    records = folder / ".hydra" / "hydra.yaml", folder / "multirun.yaml"
    record = next((path for path in records if path.exists()), None)
    sources = [] if record is None else read_yaml(record)["hydra"]["runtime"]["config_sources"]
    added = [f"{source['schema']}://{source['path']}" for source in sources if "command-line" in source["provider"]]
    return [f"{SEARCH_PATH}=[{','.join(map(quoted, added))}]"] if added else []


def with_absolute_paths(cfg: DictConfig) -> DictConfig:
    """The configuration of a start, as a later one in another folder can read it."""
    for key, value in flat(OmegaConf.to_container(cfg, resolve=False)).items():
        if (absolute := local_path(key, value)) != value:
            OmegaConf.update(cfg, key, absolute)
    return cfg


def local_path(key: str, value: Any) -> Any:
    """Make a value absolute if it names an existing file or folder; else return it."""
    if key.rpartition(".")[2] not in LOCAL or not value:
        return value
    if isinstance(value, list):
        return [local_path(key, each) for each in value]
    is_local = isinstance(value, str) and (key == "cache_dir" or Path(value).exists())
    return os.path.abspath(value) if is_local else value


def changed_keys(saved: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (saved, now) for every value that differs, except keys that do not affect training. All secrets are
    alike, as checkpoints have none.
    """
    old, new = (
        {
            key: local_path(key, value)
            for key, value in flat(redacted(each)).items()
            if key.split(".")[0] not in WITHOUT_EFFECT
        }
        for each in (saved, config)
    )
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


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

    # The update at which the run will end, if it makes as many in each iteration from now on as its settings plan.
    before = OmegaConf.create({key: state.config[key] for key in ("train", "data")})
    per_iteration = config.planned_updates
    end = state.lr_schedule.num_updates + (config.train.iterations - before.train.iterations) * per_iteration
    if planned_updates(before.train, before.data) != per_iteration:
        end = state.counters.num_updates + max(0, config.train.iterations - point.num_done) * per_iteration
    schedule = replace(fresh_schedule(config), num_updates=end)

    if not is_finished(point.source, state, plain):
        asked = {*typed, *changes}
        has_ended = point.num_done >= state.config["train"]["iterations"] and state.lr_schedule.kind != "constant"
        is_longer = config.train.iterations > point.num_done  # else only its last evaluation is left
        if has_ended and is_longer and SCHEDULE.isdisjoint(asked):
            kind = state.lr_schedule.kind
            fix = "set a new one, such as train.lr=1e-4 (it falls to 0 again, unless train.schedule=constant)"
            ended = f"the {kind} schedule of the learning rate has ended at iteration {point.num_done}"
            raise ConfigError("train.iterations", config.train.iterations, f"{ended}; {fix}")
        schedule = schedule.continuing(
            state.lr_schedule,
            state.counters.num_updates,
            restart=has_ended or not PEAK.isdisjoint(changes),
            warms_up="train.warmup_steps" in asked,
        )
    return replace(point, changes=changes, lr_schedule=schedule)


# What is said and kept of a resumed run.


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
    # Each setting that ended it has to change.
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
    return f"{run_command()} {shlex.join([f'resume={quoted(path)}', *overrides])}"


def where(run_dir: RunDir) -> str:
    """How to resume a run that was stopped."""
    if latest_checkpoint(run_dir.checkpoints) is None:
        return "nothing was saved"
    if SWEEP_KEY in os.environ:
        return "resume its sweep, which has the server"
    return f"go on with: {command(run_dir.path)}"


def write_configuration(run_dir: RunDir, cfg: DictConfig, overrides: Sequence[str], source: RunDir) -> None:
    """Write `.hydra/`, which Hydra would before the settings are checked (so `hydra.output_subdir=null`). What Hydra
    says of itself, a resumed run has from its `source`. Does nothing for a run that no command started.
    """
    # Each file whole: a run that is killed here can still be resumed.
    hydra, folder = source.path / ".hydra" / "hydra.yaml", run_dir.path / ".hydra"
    if not HydraConfig.initialized() and not hydra.exists():
        return
    folder.mkdir(exist_ok=True)
    if HydraConfig.initialized():
        write_whole(folder / "hydra.yaml", OmegaConf.to_yaml(HydraConfig.instance().cfg))
    elif source != run_dir:
        shutil.copy2(hydra, folder / "hydra.yaml")
    own = [word for word in overrides if key_of(word) not in ("resume", SEARCH_PATH)]
    write_whole(folder / "config.yaml", OmegaConf.to_yaml(cfg))
    write_whole(folder / "overrides.yaml", OmegaConf.to_yaml(own))


def record(run_dir: RunDir, cfg: DictConfig, overrides: Sequence[str], point: ResumePoint | None) -> None:
    """Add this start to `.hydra/starts.yaml`; where it changed the configuration, `.hydra/` describes the new one. What
    this start repeats or takes over of a record, it has.
    """
    start: dict[str, Any] = {"time": datetime.now().isoformat(timespec="seconds"), "overrides": list(overrides)}
    # Of a run that goes on in a new folder the metrics so far are copied; one that goes on with other settings makes
    # what came after its checkpoint again.
    if point is not None:
        changes = {key: list(pair) for key, pair in point.changes.items()}
        start |= {"after_iteration": point.num_done, "changes": changes, "checkpoint": str(point.checkpoint)}
        if point.source != run_dir:
            for number, path in point.source.records():
                if number <= point.state.iteration and path.parent.name == "metrics":
                    shutil.copy2(path, run_dir.metrics / path.name)
        elif changes:
            run_dir.discard_after(point.state.iteration)
        if changes:
            write_configuration(run_dir, cfg, overrides, point.source)
    if (run_dir.path / ".hydra").is_dir():
        with (run_dir.path / ".hydra" / "starts.yaml").open("a") as file:
            yaml.safe_dump([start], file, sort_keys=False)
