"""Rows of a data set, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.hub import need_dataset
from offline_grpo.types import Message

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
HELD_OUT_SPLITS = ("test", "validation")
"""Names of splits that are not for training, in the order in which they are looked for."""

_SPLIT_SPEC = re.compile(r"(?P<name>\w[\w.-]*)(?:\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\])?", re.ASCII)
_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True)
class Row:
    """One unchecked row of a data set, with its place for error messages; `index` is its number in its split, from
    0."""

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
    if source is None:
        values = _hub_rows(path, name, match["name"], key)
    else:
        values = [row for file in _split_files(source, name, match["name"], key) for row in _READERS[file.suffix](file)]
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
    # pandas makes floats of integers beside empty cells
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    is_number = isinstance(value, (float, Decimal)) and math.isfinite(value)
    # 0.00001 and not 1e-05, which no completion has
    text = format(Decimal(str(value)), "f") if is_number else str(value)
    # a column of decimals has the same number of digits after the point in each row
    if isinstance(value, Decimal) and "." in text:
        text = text.rstrip("0").rstrip(".")
    if not (is_number or isinstance(value, (str, int))) or not text.strip():
        raise ConfigError(f"{row.where} has no text in the field {name!r} ({key}): {shown(row.value)}")
    return text


def messages_or_text(row: Row, name: str, key: str) -> str | list[Message]:
    """The prompt of a row: text, or a list of chat messages that ends with one of the user."""
    value = field(row, name, key)
    if not isinstance(value, list):
        return text_field(row, name, key)
    messages: list[Message] = []
    for message in value:
        parts = [message.get(part) for part in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigError(
                f"{row.where} field {name!r} ({key}): a message must have role and content, both text: {shown(message)}"
            )
        messages.append({"role": message["role"], "content": message["content"]})
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
    local = Path(path).expanduser()
    if local.exists():
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
                f"{key}={split}, but task.path={source} is a single file, which is one split called train; set, "
                "for example, "
                "task.train_split='train[:-500]' task.eval_split='train[-500:]', or let task.path be a folder "
                "with a file for each split"
            )
        return [source]
    folder = _data_folder(source, name)
    files = _files_of(folder, split)
    if not files:
        raise ConfigError(f"{key}={split}: the folder {folder} (task.path) has none of {', '.join(_patterns(split))}")
    return files


def _data_folder(source: Path, name: str | None) -> Path:
    """Where the files of a folder are: in a subfolder named as the configuration, in `data`, or in the folder
    itself."""
    candidates = [source / name] if name is not None else [source / "data"]
    return next((folder for folder in candidates if folder.is_dir()), source)


def _patterns(split: str) -> list[str]:
    return [f"{split}{suffix}" for suffix in SUFFIXES] + [f"{split}-*.parquet"]


def _files_of(folder: Path, split: str) -> list[Path]:
    found = (sorted(folder.glob(pattern)) for pattern in _patterns(split))
    return next((files for files in found if files), [])


def _hub_rows(path: str, name: str | None, split: str, key: str) -> list[tuple[str, Any]]:
    data = _from_hub(path, name, f"{key}={split}", lambda datasets: datasets.load_dataset(path, name, split=split))
    kinds = {column: str(getattr(feature, "dtype", "")) for column, feature in (data.features or {}).items()}
    rows = ({column: as_written([value], kinds.get(column, ""))[0] for column, value in row.items()} for row in data)
    return [(f"task.path={path} ({name}, {split}), row {number},", row) for number, row in enumerate(rows, start=1)]


def _from_hub(path: str, name: str | None, what: str, ask: Any) -> Any:
    fix = f"set task.path to a local file ({', '.join(SUFFIXES)}), or to a folder with one such file for each split"
    need_dataset(path, "task.path", fix)

    import datasets

    try:
        return ask(datasets)
    except (OSError, ValueError) as error:  # missing data sets are OSErrors, unknown names and splits ValueErrors
        raise ConfigError(
            f"task.path={path} is not a local file or folder, and loading it from the Hugging Face Hub "
            f"(task.name={name}, "
            f"{what}) failed: {reason_of(error)}. Without a network, {fix}"
        ) from error


def shown(value: Any) -> str:
    """The beginning of a value, for error messages."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """One array of objects, or, in spite of the name, one object on each line."""
    if not file.read_bytes().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _jsonl_rows(file)
        return
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"task.path: {file} is not valid JSON ({error})") from error
    for number, value in enumerate(values, start=1):
        yield f"task.path: {file}, row {number},", value


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf")
            if not text.strip():
                continue
            where = f"task.path: {file}, line {number},"
            try:
                yield where, json.loads(text)
            except ValueError as error:
                start = line[:_SHOWN_CHARS].decode(errors="replace").strip()
                raise ConfigError(f"{where} is not valid JSON ({error}): {start!r}") from error


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """A header and rows; every cell is text."""
    csv.field_size_limit(2**31 - 1)  # the module's default of 128 KiB is less than a long prompt
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            _refuse_twice(file, reader.fieldnames or ())
            for number, value in enumerate(reader, start=1):
                where = f"task.path: {file}, row {number},"
                if None in value or None in value.values():
                    cells = shown(list(value.values()))
                    raise ConfigError(f"{where} has not as many cells as the header (commas separate cells): {cells}")
                yield where, value
        except csv.Error as error:
            raise ConfigError(f"task.path: {file}, line {reader.line_num + 1}, is not valid CSV ({error})") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"task.path: {file} is not UTF-8 ({error}); save the file as UTF-8") from error


def _refuse_twice(file: Path, names: Sequence[str]) -> None:
    """Raise ConfigError for a column that occurs twice, of which rows would have the last one. Those without a name
    have no use.
    """
    twice = next((name for name in names if name.strip() and names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"task.path: {file} has more than one column {twice!r}; rename or remove all but one")


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import parquet

    table = parquet.ParquetFile(file).read()
    names = table.column_names
    _refuse_twice(file, names)
    columns = [as_written(column.to_pylist(), str(column.type)) for column in table.columns]
    for number, values in enumerate(zip(*columns, strict=True), start=1):
        yield f"task.path: {file}, row {number},", dict(zip(names, values, strict=True))


def as_written(values: list[Any], kind: str) -> list[Any]:
    """Numbers of a column with less precision than Python's, with the digits that they were written with: 0.1, not
    0.10000000149.
    """
    import numpy

    types = {"float": numpy.float32, "float32": numpy.float32, "halffloat": numpy.float16, "float16": numpy.float16}
    narrow = types.get(kind)
    return values if narrow is None else [None if value is None else float(str(narrow(value))) for value in values]


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}
