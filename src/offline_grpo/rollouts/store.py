"""The store of a run's rollouts: `rollouts/` in its folder, a Parquet file for each iteration (`iter_000.parquet`) and
evaluation (`eval_init.parquet`), and `images/` with the pictures of their prompts, which `recorder.py` writes. This
module finds and reads them, and folders of `datasets`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.hub import is_model_id
from offline_grpo.logger.samples import Decode
from offline_grpo.rollouts.recorder import FOLDER, FORMAT, IMAGES, KEY, Origin, tokenizer_hash
from offline_grpo.rollouts.rows import SCHEMA, groups_of, typed_column
from offline_grpo.types import Picture, RolloutGroup

DATASET = "dataset_info.json"
ORIGIN_FILE = "offline_grpo.json"
"""In a folder of `datasets` that was exported from a store, the origin, for which its tables have no place."""
_NAME = re.compile(r"(?P<phase>eval_)?(?:init|iter_(?P<iteration>\d+))\.parquet")


@dataclass(frozen=True)
class Shard:
    """A file of a store, or a folder of `datasets`. Its methods raise ConfigError where it cannot be read."""

    path: Path

    @property
    def phase(self) -> str | None:
        """Train or eval, None of a folder of `datasets`, which may hold both."""
        name = _NAME.fullmatch(self.path.name)
        return None if name is None else "eval" if name["phase"] else "train"

    @property
    def iteration(self) -> int | None:
        """Of its rollouts, -1 for those before training, where its name says so; a folder of `datasets` does not."""
        name = _NAME.fullmatch(self.path.name)
        return None if name is None else -1 if name["iteration"] is None else int(name["iteration"])

    @cached_property
    def origin(self) -> Origin | None:
        """Where its rollouts come from, None where it does not say."""
        try:
            if self.path.is_dir():
                text = file.read_bytes() if (file := self.path / ORIGIN_FILE).is_file() else None
            else:
                text = (pq.read_metadata(self.path).metadata or {}).get(KEY.encode())
            found = None if text is None else json.loads(text)
        except (OSError, pa.ArrowException, ValueError) as error:
            raise self._damaged(error) from error
        if found is None:
            return None
        if found["format"] != FORMAT:
            raise ConfigError(f"{self.path}: written in format {found['format']}, this version reads format {FORMAT}")
        return Origin(**{field.name: found[field.name] for field in fields(Origin)})

    @cached_property
    def decode(self) -> Decode | None:
        """Writes token ids as text, by the tokenizer that they are of; None where that is not on this machine."""
        from huggingface_hub import try_to_load_from_cache
        from tokenizers import Tokenizer

        if self.origin is None:
            return None
        # In the newest checkpoint of the run, beside the model that it trained, or in the Hub's cache of that.
        name, file = self.origin.model, "tokenizer.json"
        cached = try_to_load_from_cache(name, file) if is_model_id(name) else None
        checkpoints = sorted(self.path.parent.parent.glob(f"checkpoints/*/{file}"))
        for path in (*checkpoints[-1:], Path(name, file), *([Path(cached)] if isinstance(cached, str) else [])):
            if path.is_file():
                tokenizer = Tokenizer.from_file(str(path))
                if tokenizer_hash(tokenizer) == self.origin.tokenizer:
                    return partial(tokenizer.decode, skip_special_tokens=False)
        return None

    def picture(self, name: str) -> Picture:
        """The one of this name, which its rollouts have."""
        file = (self.path if self.path.is_dir() else self.path.parent) / IMAGES / name
        try:
            found = Picture(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"{file}: a picture of {self.path} cannot be read ({reason_of(error)})") from error
        if found.key != name:
            raise ConfigError(f"{file}: a picture of {self.path} is damaged; its bytes have another SHA-256")
        return found

    def groups(self, table: pa.Table, rows: Iterable[Sequence[int]]) -> list[RolloutGroup]:
        """The groups of these rows of its table."""
        return groups_of(table, rows, lru_cache(self.picture))

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Its rows with the columns of `SCHEMA`, or some of them, in the types of that schema."""
        wanted = [field for field in SCHEMA if columns is None or field.name in columns]
        try:
            if self.path.is_dir():
                import datasets

                table = datasets.Dataset.load_from_disk(str(self.path)).data.table
            else:
                with pq.ParquetFile(self.path, memory_map=True, page_checksum_verification=True) as file:
                    table = file.read(columns)
            # Files of earlier versions lack columns that may be null.
            names, blank = set(table.column_names), table.num_rows
            return pa.table(
                {
                    field.name: typed_column(table[field.name], field.type)
                    if field.name in names or not field.nullable
                    else pa.nulls(blank, field.type)
                    for field in wanted
                }
            )
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:  # of pyarrow and datasets
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self.path}: cannot be read ({reason_of(error)})")


def shards_of(path: Path, *, key: str, phase: str | None = None, iteration: int | None = None) -> list[Shard]:
    """The shards of a store, oldest first.

    Args:
        path: a run folder, its `rollouts/`, a file of it, or a folder of `datasets`.
        key: the setting that named it, for messages.
        phase, iteration: only files of "train" or "eval", only of this iteration. Folders of `datasets` may hold more.
    """
    if path.is_file() or (path / DATASET).is_file():
        return [Shard(path)]
    # Where nothing is found, the message names what could have been meant.
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    shards = [Shard(file) for file in folder.glob("*.parquet") if _NAME.fullmatch(file.name)]
    wanted = [s for s in shards if phase in (None, s.phase) and iteration in (None, s.iteration)]
    if not shards:
        runs = ", ".join(sorted(found.parent.name for found in path.glob(f"*/{FOLDER}"))[:6])
        fix = f"name one of its runs: {runs}" if runs else "name a run folder, a file of its rollouts/ or an export"
        raise ConfigError(f"{key}={path}: has no rollouts; {fix}")
    if not wanted:
        which = "" if iteration is None else f" of iteration {iteration + 1}"
        found = ", ".join(sorted(shard.path.stem for shard in shards)[-6:])
        raise ConfigError(f"{key}={path}: has no rollouts of phase {phase}{which}; the last that it has: {found}")
    return sorted(wanted, key=lambda shard: (shard.iteration or 0, shard.phase == "eval"))
