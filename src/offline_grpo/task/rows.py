"""Rows of a data set, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.hub import need_dataset
from offline_grpo.task.row_files import SUFFIXES, as_written, file_rows, shown
from offline_grpo.types import Message

HELD_OUT_SPLITS = ("test", "validation")
"""Names of splits that are not for training, in the order in which they are looked for."""

_SPLIT_SPEC = re.compile(r"(?P<name>\w[\w.-]*)(?:\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Row:
    """One unchecked row of a data set. `where` says for error messages where it is, `index` is its number in its split,
    from 0.
    """

    where: str
    index: int
    value: Any


def check_spec(key: str, spec: str) -> None:
    """Raise ConfigError unless `spec` is the name of a split, or a slice of one."""
    if not _SPLIT_SPEC.fullmatch(spec):
        raise ConfigError(
            f"{key}={spec!r} must be the name of a split, such as train, or a slice of it, such as train[:-500]"
        )


def read_split(path: str, name: str | None, spec: str, key: str) -> list[Row]:
    """The rows of a split, or of a slice of it.

    Args:
        path: the Hub id of a data set; a local file, which is one split called train; or a folder with one or more
            files for each split: `SPLIT.jsonl`, `.json`, `.csv` or `.parquet`, or `SPLIT-*.parquet` as in a copy of a
            Hub repository.
        name: the Hub configuration of the data set; in a local folder, the subfolder of this name is read if it exists.
        spec: `train`, `train[:-500]`.
        key: the setting that `spec` is the value of, for error messages.

    Raises:
        ConfigError: the data cannot be read, or the slice is empty.
    """
    match = _SPLIT_SPEC.fullmatch(spec)
    assert match is not None  # see `check_spec`
    source = _local_source(path)
    files = None if source is None else _split_files(source, name, match["name"], key)
    values = (
        _hub_rows(path, name, match["name"], key)
        if files is None
        else [row for file in files for row in file_rows(file)]
    )
    start, stop = (None if match[bound] is None else int(match[bound]) for bound in ("start", "stop"))
    rows = [Row(where, index, value) for index, (where, value) in enumerate(values)][start:stop]
    if not values:
        raise ConfigError(f"task.path={path}: has no rows for {key}={spec}")
    if not rows:
        raise ConfigError(f"{key}={spec} selects none of the {len(values)} rows of task.path={path}")
    return rows


def held_out_split(path: str, name: str | None) -> str | None:
    """The data set's split for evaluation, None if it has no such split."""
    source = _local_source(path)
    if source is None:
        names = _from_hub(path, name, "splits", lambda datasets: datasets.get_dataset_split_names(path, name))
    elif source.is_file():
        names = []
    else:
        names = [split for split in HELD_OUT_SPLITS if _files_of(_data_folder(source, name), split)]
    return next((split for split in HELD_OUT_SPLITS if split in names), None)


def text_field(row: Row, name: str, key: str) -> str:
    """A field of a row as text; numbers are written out, whole ones without a point.

    Raises:
        ConfigError: the row has no such field, or no text or number in it.
    """
    value = field(row, name, key)
    if (
        isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    ):  # pandas makes floats of integers beside empty cells
        value = int(value)
    is_number = isinstance(value, (float, Decimal)) and math.isfinite(value)
    text = (
        format(Decimal(str(value)), "f") if is_number else str(value)
    )  # 0.00001 and not 1e-05, which no completion has
    if (
        isinstance(value, Decimal) and "." in text
    ):  # its column has the same number of digits after the point in each row
        text = text.rstrip("0").rstrip(".")
    if not (is_number or isinstance(value, (str, int))) or not text.strip():
        raise ConfigError(f"{row.where} has no text in the field {name!r} ({key}): {shown(row.value)}")
    return encodable(row, name, key, text)


def encodable(row: Row, name: str, key: str, text: str) -> str:
    """The text, unless it has half a character, such as `\\ud800` in JSON of which something has been cut off. Raises
    ConfigError then.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ConfigError(
            f"{row.where} field {name!r} ({key}): has half a character ({half}), which no tokenizer reads; mend it"
        ) from None
    return text


def messages_or_text(row: Row, name: str, key: str) -> str | list[Message]:
    """The prompt of a row: text, or a list of chat messages that ends with one of the user."""
    value = field(row, name, key)
    if not isinstance(value, list):
        return text_field(row, name, key)
    messages: list[Message] = []
    for message in value:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(part), str) for part in ("role", "content")
        ):
            raise ConfigError(
                f"{row.where} field {name!r} ({key}): a message must have role and content, both text: {shown(message)}"
            )
        messages.append({"role": message["role"], "content": encodable(row, name, key, message["content"])})
    if not messages or messages[-1]["role"] != "user":
        raise ConfigError(
            f"{row.where} field {name!r} ({key}): the last message must have the role user: {shown(value)}"
        )
    return messages


def field(row: Row, name: str, key: str) -> Any:
    """A field of a row, which must be an object that has it."""
    if not isinstance(row.value, Mapping):
        raise ConfigError(f"{row.where} is not a JSON object: {shown(row.value)}")
    if name not in row.value:
        names = ", ".join(map(str, row.value))
        hint = "; separate the columns with commas" if len(row.value) == 1 and {";", "\t"} & set(names) else ""
        raise ConfigError(f"{key}={name}: {row.where} has no such field; it has {names}{hint}")
    return row.value[name]


def _local_source(path: str) -> Path | None:
    """The local file or folder at `path`, or None if `path` is a Hub id."""
    try:
        local = Path(path).expanduser()
        exists = local.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder that may not be read, an unknown ~user
        fix = "set it to a local file or folder, or to a Hub id"
        raise ConfigError(f"task.path={path}: cannot be looked for ({reason_of(error)}); {fix}") from error
    if exists:
        return local
    if local.suffix in SUFFIXES or path.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"task.path={path} does not exist (looked for {local.absolute()})")
    return None


def _split_files(source: Path, name: str | None, split: str, key: str) -> list[Path]:
    """The files of a split."""
    if source.is_file():
        if source.suffix not in SUFFIXES:
            raise ConfigError(f"task.path={source} must be a file of the kind {', '.join(SUFFIXES)}, or a folder")
        if split != "train":
            raise ConfigError(
                f"{key}={split}, but task.path={source} is a single file, which is one split called train; set, for example, "
                "task.train_split='train[:-500]' task.eval_split='train[-500:]', or let task.path be a folder with a file for each split"
            )
        return [source]
    folder = _data_folder(source, name)
    files = _files_of(folder, split)
    if not files:
        raise ConfigError(f"{key}={split}: the folder {folder} (task.path) has none of {', '.join(_patterns(split))}")
    return files


def _data_folder(source: Path, name: str | None) -> Path:
    """Where the files of a folder are: in a subfolder named as the configuration, in `data`, or in the folder itself."""
    candidates = [source / name] if name is not None else [source / "data"]
    return next((folder for folder in candidates if folder.is_dir()), source)


def _patterns(split: str) -> list[str]:
    return [f"{split}{suffix}" for suffix in SUFFIXES] + [f"{split}-*.parquet"]


def _files_of(folder: Path, split: str) -> list[Path]:
    found = (sorted(folder.glob(pattern)) for pattern in _patterns(split))
    return next((files for files in found if files), [])


def _hub_rows(path: str, name: str | None, split: str, key: str) -> list[tuple[str, Any]]:
    data = _from_hub(path, name, f"{key}={split}", lambda datasets: datasets.load_dataset(path, name, split=split))
    kinds = {
        column: str(getattr(feature, "dtype", ""))
        for column, feature in (getattr(data, "features", None) or {}).items()
    }
    rows = ({column: as_written([value], kinds.get(column, ""))[0] for column, value in row.items()} for row in data)
    return [(f"task.path={path} ({name}, {split}), row {number},", row) for number, row in enumerate(rows, start=1)]


def _from_hub(path: str, name: str | None, what: str, ask: Any) -> Any:
    fix = f"set task.path to a local file ({', '.join(SUFFIXES)}), or to a folder with one such file for each split"
    need_dataset(path, "task.path", fix)

    import datasets

    try:
        return ask(datasets)
    except (
        OSError,
        ValueError,
    ) as error:  # offline and missing data sets are OSErrors; unknown names and splits ValueErrors
        raise ConfigError(
            f"task.path={path} is not a local file or folder, and loading it from the Hugging Face Hub (task.name={name}, "
            f"{what}) failed: {reason_of(error)}. Without a network, {fix}"
        ) from error
