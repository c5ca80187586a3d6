"""Reads stores: those of runs, single files of them, and folders of `datasets`. Whatever is in them, reading ends with rows or one line.

for shard in shards_of(Path("outputs/DATE/TIME"), key="PATH"):
    shard.origin                       # which model, tokenizer, weights and configuration
    table = shard.table()              # a row per completion; rows.py says what the columns mean
    shard.table(["iteration", "reward"])
    groups_of(table)                   # the same as typed objects
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from offline_grpo.disk import parse_json
from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.rollouts.store.checking import conform
from offline_grpo.rollouts.store.shard import FOLDER, FORMAT, KEY, Origin

DATASET, SPLITS = "dataset_info.json", "dataset_dict.json"
ORIGIN_FILE = "offline_grpo.json"
"""In a folder of `datasets` that was exported from a store, the origin, for which its tables have no place."""
_NAME = re.compile(r"(?P<phase>eval_)?(?:init|iter_(?P<iteration>\d+))\.parquet")


@dataclass(frozen=True)
class Shard:
    """A file of a store, or a folder of `datasets`."""

    path: Path

    @cached_property
    def origin(self) -> Origin | None:
        """Where its rollouts come from, None where it does not say.

        Raises:
            ConfigError: the file is damaged, or of another format.
        """
        with self._told():
            if not self.path.is_dir():
                found = (pq.read_metadata(self.path).metadata or {}).get(KEY.encode())
            elif (file := self.path / ORIGIN_FILE).is_file():
                found = file.read_bytes()
            else:
                found = None
        if found is None:
            return None
        try:
            origin = parse_json(Origin, found)
        except ValueError as error:
            raise ConfigError(f"{self.path}: says where its rollouts come from in a way that no run does ({error})") from error
        if origin.format != FORMAT:
            raise ConfigError(f"{self.path}: written in format {origin.format}, this version reads format {FORMAT}")
        return origin

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Its rows with the columns of `rows.SCHEMA`, or some of them. Their values are not checked, see `checking.check_values`.

        Raises:
            ConfigError: the file is damaged, a column is missing or of another type; names the file.
        """
        with self._told():
            if self.path.is_dir():
                import datasets

                table = datasets.Dataset.load_from_disk(str(self.path)).data.table
            else:
                with pq.ParquetFile(self.path, memory_map=True, page_checksum_verification=True) as file:
                    table = file.read(columns)
        return conform(table, self.path, columns)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """One line about a file that cannot be read, whatever is wrong with it."""
        try:
            yield
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:  # of pyarrow and datasets
            raise ConfigError(f"{self.path}: cannot be read ({reason_of(error)})") from error


def shards_of(path: Path, *, key: str, phase: str | None = None, iteration: int | None = None) -> list[Shard]:
    """The shards of a store, oldest first.

    Args:
        path: a run folder, its `rollouts/`, a file of it, or a folder of `datasets`.
        key: what named it, for messages.
        phase, iteration: only files of "train" or "eval", only of this iteration. A folder of `datasets` may hold others.

    Raises:
        ConfigError: there is no store.
    """
    if path.is_file() or (path / DATASET).is_file():
        return [Shard(path)]
    if (path / SPLITS).is_file():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        raise ConfigError(f"{key}={path}: has the splits {', '.join(splits)}; name one of these folders")
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    named = [(match, file) for file in folder.glob("*.parquet") if (match := _NAME.fullmatch(file.name)) and file.is_file()]
    wanted = [(m, file) for m, file in named if phase is None or (phase == "eval") == (m["phase"] is not None)]
    wanted = [(m, file) for m, file in wanted if iteration in (None, _iteration(m))]
    if not wanted:
        asked = [] if phase is None else [f"of phase {phase}"]
        asked += [] if iteration is None else [f"of iteration {iteration + 1}"]
        what = " ".join(["no rollouts", *asked]) if named else "no rollouts"
        raise ConfigError(f"{key}={path}: has {what}; name a run that has rollouts/, a file of it, or a folder that datasets saved")
    wanted.sort(key=lambda pair: (_iteration(pair[0]), pair[0]["phase"] is not None))
    return [Shard(file) for _, file in wanted]


def _iteration(name: re.Match[str]) -> int:
    return -1 if name["iteration"] is None else int(name["iteration"])


def group_rows(table: pa.Table) -> Mapping[tuple[int, str, int], list[int]]:
    """The rows of each group, by iteration, phase and number, in the order in which the groups begin."""
    rows: dict[tuple[int, str, int], list[int]] = {}
    keys = zip(*(table[name].to_pylist() for name in ("iteration", "phase", "group")), strict=True)
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows
