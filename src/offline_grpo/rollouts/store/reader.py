"""Reads stores: those of runs, single files of them, and folders of `datasets`. Whatever is in them, reading ends with
rows or one line.

for shard in shards_of(Path("outputs/DATE/TIME"), key="PATH"):
    shard.origin                       # which model, tokenizer, weights and configuration
    table = shard.table()              # a row per completion; rows.py says what the columns mean
    shard.table(["iteration", "reward"])
    groups_of(table)                   # the same as typed objects
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from offline_grpo.disk import parse_json
from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.rollouts.store.checking import GROUP, check_groups, check_values, conform
from offline_grpo.rollouts.store.origin import FOLDER, FORMAT, KEY, Origin
from offline_grpo.rollouts.store.rows import SCHEMA

DATASET, SPLITS = "dataset_info.json", "dataset_dict.json"
ORIGIN_FILE = "offline_grpo.json"
"""In a folder of `datasets` that was exported from a store, the origin, for which its tables have no place."""
AHEAD = 4
"""Files that are read and checked while an earlier one is used: pyarrow does either without Python's lock."""
MAX_NAMED = 6
"""Runs, or iterations, that a message lists."""
_NAME = re.compile(r"(?P<phase>eval_)?(?:init|iter_(?P<iteration>\d+))\.parquet")


@dataclass(frozen=True)
class Shard:
    """A file of a store, or a folder of `datasets`."""

    path: Path

    @property
    def iteration(self) -> int | None:
        """Of its rollouts, -1 for those before training, where its name says so; a folder of `datasets` does not."""
        name = _NAME.fullmatch(self.path.name)
        return None if name is None else _iteration(name)

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
            raise ConfigError(
                f"{self.path}: says where its rollouts come from in a way that no run does ({error})"
            ) from error
        if origin.format != FORMAT:
            raise ConfigError(f"{self.path}: written in format {origin.format}, this version reads format {FORMAT}")
        return origin

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Its rows with the columns of `rows.SCHEMA`, or some of them. Their values are not checked, see
        `checking.check_values`.

        Raises:
            ConfigError: the file is damaged, a column is missing or of another type; names the file.
        """
        with self._told():
            if self.path.is_dir():
                import datasets

                table = datasets.Dataset.load_from_disk(str(self.path)).data.table
            else:
                with pq.ParquetFile(self.path, memory_map=True, page_checksum_verification=True) as file:
                    self._check_names(file.schema_arrow.names)
                    table = file.read(columns)
        return conform(table, self.path, columns)

    def _check_names(self, names: Sequence[str]) -> None:
        """Of a run's file: no checksum covers the names, and a column that may be missing would count as missing under
        another one.
        """
        unknown = [name for name in names if name not in SCHEMA.names]
        if unknown and self.origin is not None:
            raise ConfigError(
                f"{self.path}: has a column {unknown[0]!r}, which no run writes; the file is damaged, or a newer version's"
            )

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
        phase, iteration: only files of "train" or "eval", only of this iteration. A folder of `datasets` may hold
        others.

    Raises:
        ConfigError: there is no store.
    """
    needed = "name a run that has rollouts/, a file of it, or a folder that datasets saved"
    if path.is_file() and not _is_parquet(path):
        raise ConfigError(f"{key}={path}: is no Parquet file, as those of rollouts/ are; {needed}")
    if path.is_file() or (path / DATASET).is_file():
        return [Shard(path)]
    if not path.exists():
        raise ConfigError(f"{key}={path}: is not there; {needed}")
    if (path / SPLITS).is_file():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        raise ConfigError(f"{key}={path}: has the splits {', '.join(splits)}; name one of these folders")
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    named = [
        (match, file) for file in folder.glob("*.parquet") if (match := _NAME.fullmatch(file.name)) and file.is_file()
    ]
    wanted = [(m, file) for m, file in named if phase is None or (phase == "eval") == (m["phase"] is not None)]
    wanted = [(m, file) for m, file in wanted if iteration in (None, _iteration(m))]
    if not wanted and named:
        asked = [] if phase is None else [f"of phase {phase}"]
        asked += [] if iteration is None else [f"of iteration {iteration + 1}"]
        raise ConfigError(
            f"{key}={path}: has no rollouts {' '.join(asked)}; it has {_contents([match for match, _ in named])}"
        )
    if not wanted:
        runs = sorted(
            {file.parent.parent for file in path.glob(f"*/{FOLDER}/*.parquet")},
            key=lambda run: (len(run.name), run.name),
        )
        more = ", ..." if len(runs) > MAX_NAMED else ""
        fix = f"name one of its runs: {', '.join(run.name for run in runs[:MAX_NAMED])}{more}" if runs else needed
        raise ConfigError(f"{key}={path}: has no rollouts; {fix}")
    wanted.sort(key=lambda pair: (_iteration(pair[0]), pair[0]["phase"] is not None))
    return [Shard(file) for _, file in wanted]


def checked(
    shards: Sequence[Shard], *, vocab_size: int | None, context: int | None
) -> Iterator[tuple[Shard, Future[pa.Table]]]:
    """Each shard with its table, in order. `result()` raises ConfigError where `Shard.table`, `check_values` or
    `check_groups` refuses it.

    Args:
        vocab_size, context: of the model; None where nothing is trained.
    """

    def read(shard: Shard) -> pa.Table:
        table = shard.table()
        check_values(table, shard.path, vocab_size=vocab_size, context=context)
        check_groups(table, shard.path)
        return table

    threads, read_ahead = ThreadPoolExecutor(AHEAD), deque[tuple[Shard, Future[pa.Table]]]()
    try:
        for shard in shards:
            read_ahead.append((shard, threads.submit(read, shard)))
            if len(read_ahead) > AHEAD:
                yield read_ahead.popleft()
        while read_ahead:
            yield read_ahead.popleft()
    finally:
        threads.shutdown(cancel_futures=True)


def _is_parquet(path: Path) -> bool:
    """By its first letters; a file that cannot be opened may be one."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return True


def _contents(names: Sequence[re.Match[str]]) -> str:
    """`train 1 to 6; eval 0, 10, 20`: the iterations of each phase."""
    parts = []
    for phase in ("train", "eval"):
        found = sorted(_iteration(match) + 1 for match in names if (match["phase"] is None) == (phase == "train"))
        if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
            parts.append(f"{phase} {found[0]} to {found[-1]}")
        elif found:
            parts.append(
                f"{phase} {', '.join(map(str, found[:MAX_NAMED]))}{f', ... {found[-1]}' if len(found) > MAX_NAMED else ''}"
            )
    return "; ".join(parts)


def _iteration(name: re.Match[str]) -> int:
    return -1 if name["iteration"] is None else int(name["iteration"])


def group_rows(table: pa.Table) -> Mapping[tuple[int, str, int], list[int]]:
    """The rows of each group, by iteration, phase and number, in the order in which the groups begin."""
    rows: dict[tuple[int, str, int], list[int]] = {}
    keys = zip(*(table[name].to_pylist() for name in GROUP), strict=True)
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows
