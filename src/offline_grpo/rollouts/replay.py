"""Rollouts that runs have recorded, trained on again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from offline_grpo import progress
from offline_grpo.errors import ConfigError, require
from offline_grpo.generation.judging import Judgement
from offline_grpo.interfaces import Source, Task
from offline_grpo.rollouts.on_policy import permutation
from offline_grpo.rollouts.recorder import FOLDER, Origin, json_hash
from offline_grpo.rollouts.rows import group_rows
from offline_grpo.rollouts.store import Shard, shards_of
from offline_grpo.seeding import derive_seed
from offline_grpo.settings import RunConfig, flat
from offline_grpo.types import FinishReason, Metrics, RolloutGroup, Score

log = logging.getLogger(__name__)

_CACHED = 8  # files that are kept in memory: in a new order, an iteration has groups of many
_THREADS = 4
_RECORDED = 64  # groups that an advantage is shown before a model is loaded
_FACTS = ["iteration", "phase", "group", "reward", "version", "finish_reason"]
"""Columns that decide which groups are chosen."""


class _Group(NamedTuple):
    """Where a recorded group lies."""

    shard: int
    iteration: int
    rows: tuple[int, ...]


@dataclass(kw_only=True)
class Replay(Source):
    """Recorded groups, pass after pass; settings: `conf/rollouts/replay.yaml`. ConfigError if they are of another model
    than `origin` says that this run trains.
    """

    path: str | list[str] | None
    problems_per_iteration: int | None
    shuffle: bool
    seed: int
    iterations: list[int] | None
    versions: list[int] | None
    rewards: list[float] | None
    finish_reasons: list[str] | None
    rescore: bool
    skip_damaged: bool
    any_model: bool

    task: Task
    origin: Origin
    vocab_size: int
    context: int | None
    run_folder: Path
    rank: int
    world_size: int

    _units: list[list[_Group]] = field(default_factory=list, init=False)  # what an iteration takes one or several of
    _sound: list[Shard] = field(default_factory=list, init=False)
    _read: Callable[[int], pa.Table] = field(init=False)
    _identity: str = field(default="", init=False)
    _epoch: float = field(default=0.0, init=False)

    needs_problems: ClassVar[bool] = False

    def __post_init__(self) -> None:
        fix = "rollouts.any_model=true trains on it all the same"
        for shard in () if self.any_model else _shards(self.path):
            try:
                origin = shard.origin
            except ConfigError:  # damaged: `start` says so, or leaves it out
                continue
            if origin is None:
                raise ConfigError(f"{shard.path}: does not say which model and tokenizer it was recorded with; {fix}")
            for name in ("tokenizer", "architecture"):
                if getattr(origin, name) != getattr(self.origin, name):
                    about = f"recorded with {origin.model}, whose {name} is another one than that of"
                    raise ConfigError(f"{shard.path}: {about} {self.origin.model}; {fix}")

    @staticmethod
    def check(config: RunConfig) -> None:
        settings, count = config.rollouts, config.rollouts["problems_per_iteration"]
        require(count is None or count > 0, "rollouts.problems_per_iteration", count, "must be at least 1, or null")
        for name in ("iterations", "versions", "rewards"):
            bounds = settings[name]
            is_range = bounds is None or (len(bounds) == 2 and bounds[0] <= bounds[1])
            require(is_range, f"rollouts.{name}", bounds, "the lowest and the highest, such as [0,9], or null")
        unknown = set(settings["finish_reasons"] or ()) - set(FinishReason)
        require(not unknown, "rollouts.finish_reasons", settings["finish_reasons"], f"may be {', '.join(FinishReason)}")
        _shards(settings["path"])

    @staticmethod
    def recorded(config: RunConfig) -> list[RolloutGroup]:
        """Of the first file that is sound."""
        for shard in _shards(config.rollouts["path"]):
            with suppress(ConfigError):  # damaged: `start` says so, or leaves it out
                table = shard.table()
                rows = [rows for (_, phase, _), rows in group_rows(table).items() if phase == "train"]
                groups = shard.groups(table, rows[:_RECORDED])
                if not config.rollouts["rescore"]:
                    return groups
                return [group.with_scores([Score.unscored("rescored")] * len(group.rollouts)) for group in groups]
        return []

    def start(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        """Reads every file once, so that a damaged one does not end the run later."""
        shards = _shards(self.path)
        own = (self.run_folder / FOLDER).resolve()
        is_own = any(shard.path.resolve().parent == own for shard in shards)
        require(not is_own, "rollouts.path", self.path, "is this run's own record")

        # 1. The whole of each file is read, and the groups that pass the filters are noted.
        def facts(shard: Shard) -> pa.Table | ConfigError:
            try:
                table = shard.table()
                return table.select(_FACTS).append_column("is_filtered", table["alternatives"].is_valid())
            except ConfigError as error:
                return error

        groups: list[_Group] = []
        sound: list[Shard] = []
        filtered: list[list[bool]] = []  # of each file and row, whether top-p, top-k or min-p were on
        with ThreadPoolExecutor(_THREADS) as threads:  # pyarrow reads without Python's lock
            for number, (shard, found) in enumerate(zip(shards, threads.map(facts, shards), strict=True)):
                progress.report(number, len(shards), "files")
                if not isinstance(found, ConfigError):
                    groups += self._chosen(found, len(sound))
                    sound.append(shard)
                    filtered.append(found["is_filtered"].to_pylist())
                elif self.skip_damaged:
                    log.warning("%s; left out", found)
                else:
                    raise ConfigError(f"{found}; rollouts.skip_damaged=true skips this file")
        filters = {name: getattr(self, name) for name in ("iterations", "versions", "rewards", "finish_reasons")}
        given = ", ".join(f"rollouts.{name}={value}" for name, value in filters.items() if value is not None)
        fix = f"no group of at least two completions is left of {len(shards)} files; filters: {given or 'none'}"
        require(bool(groups), "rollouts.path", self.path, fix)
        kinds = {filtered[group.shard][row]: sound[group.shard].path for group in groups for row in group.rows}
        if len(kinds) > 1:
            about = f"{kinds[True]} was sampled with top_p, top_k or min_p, and {kinds[False]} was not"
            raise ConfigError(f"rollouts.path: {about}; replay one after the other")

        # 2. An iteration takes a recorded one, or so many groups; a resumed run the same as before.
        self._sound = sound
        self._read = lru_cache(_CACHED)(lambda index: sound[index].table())
        if self.problems_per_iteration is None:
            self._units = [list(part) for _, part in groupby(groups, lambda group: (group.shard, group.iteration))]
        else:
            self._units = [[group] for group in groups]
        self._identity = json_hash([[sound[g.shard].path.name, g.iteration, g.rows] for g in groups])
        is_known = (state or {}).get("rollouts", self._identity) == self._identity
        fix = "has not the groups that it had at the checkpoint; bring those back"
        require(is_known, "rollouts.path", self.path, fix)

        # 3. What will be trained on, and with which other settings it was recorded that rewards or weights depend on.
        num_rollouts = sum(len(group.rows) for group in groups)
        per_pass = -(-len(self._units) // (self.problems_per_iteration or 1))
        about = f"{num_rollouts:,} rollouts in {len(groups):,} groups; a pass takes {per_pass:,} iterations"
        log.info("replaying %s; rewards are %s", about, "computed again" if self.rescore else "those recorded")
        origin = next((shard.origin for shard in sound if shard.origin is not None), None)
        if origin is None:
            return
        ours, theirs = flat(self.origin.config), flat(origin.config)
        prefixes = ("model.train_id", "model.gguf_file", "model.tiny.", *(() if self.rescore else ("task.",)))
        keys = sorted(key for key in ours.keys() | theirs.keys() if key.startswith(prefixes))
        different = [key for key in keys if ours.get(key) != theirs.get(key)]
        if different:
            about = "; ".join(f"{key}={theirs.get(key)!s:.60}, here {ours.get(key)!s:.60}" for key in different)
            log.warning("rollouts.path=%s: was recorded with other settings: %s", self.path, about)

    def next(self, iteration: int) -> list[RolloutGroup]:
        """A function of the store and the iteration alone."""
        count, size = self.problems_per_iteration or 1, len(self._units)
        self._epoch = (iteration + 1) * count / size
        groups = []
        for position in range(iteration * count, (iteration + 1) * count):
            epoch, offset = divmod(position, size)
            if self.shuffle:
                offset = permutation(size, derive_seed(self.seed, "replay", epoch))[offset]
            groups += self._units[offset]
        # This process's share is read, and refused where the model cannot learn from it; another reward scores it anew.
        found = []
        for each in groups[self.rank :: self.world_size]:
            [group] = self._sound[each.shard].groups(self._read(each.shard), [each.rows])
            group.check(vocab_size=self.vocab_size, max_tokens=self.context)
            if self.rescore:
                if group.problem is None:
                    about = "these rollouts were recorded without their problems; use false"
                    raise ConfigError(f"rollouts.rescore=true: {about}")
                judgement = Judgement(self.task, group.problem, [rollout.text for rollout in group.rollouts])
                group = replace(group, advantages=None).with_scores(judgement.scores())
            found.append(group)
        return found

    def metrics(self) -> Metrics:
        return {"rollouts/epoch": self._epoch, "time/sampling_s": 0.0}

    def state_dict(self) -> Mapping[str, Any]:
        """Identifies the recorded groups. The iteration says the rest."""
        return {"rollouts": self._identity}

    def _chosen(self, table: pa.Table, shard: int) -> list[_Group]:
        """The groups that pass the filters. A single completion that is left has nothing to be compared with."""
        rewards, versions, reasons = (table[name].to_pylist() for name in ("reward", "version", "finish_reason"))
        chosen = []
        for (iteration, phase, _), rows in group_rows(table).items():
            known = [rewards[row] for row in rows if rewards[row] is not None]
            mean = fmean(known) if known else nan
            if phase != "train" or not _within(iteration + 1, self.iterations) or not _within(mean, self.rewards):
                continue
            kept = [row for row in rows if _within(versions[row], self.versions)]
            kept = [row for row in kept if self.finish_reasons is None or reasons[row] in self.finish_reasons]
            if len(kept) == len(rows) or len(kept) > 1:
                chosen.append(_Group(shard, iteration, tuple(kept)))
        return chosen


def _shards(path: str | Sequence[str] | None) -> list[Shard]:
    """The files that `rollouts.path` names."""
    paths = [path] if isinstance(path, str) else path
    if not paths:
        raise ConfigError("rollouts.path=null: name what to replay: a run folder, or a folder that datasets saved")
    return [shard for each in paths for shard in shards_of(Path(each).expanduser(), key="rollouts.path", phase="train")]


def _within(value: float, bounds: Sequence[float] | None) -> bool:
    return bounds is None or bounds[0] <= value <= bounds[1]
