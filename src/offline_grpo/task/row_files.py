"""Rows of local files, in the formats that data sets come in."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from offline_grpo.errors import ConfigError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_SHOWN_CHARS = 120


def shown(value: Any) -> str:
    """The beginning of a value, for error messages."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def file_rows(file: Path) -> list[tuple[str, Any]]:
    """Where each row is, and its value.

    Raises:
        ConfigError: the file cannot be read, or a row of it.
    """
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    try:
        return list(readers[file.suffix](file))
    except OSError as error:
        raise ConfigError(f"task.path: {file} cannot be read: {error}") from error


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """One array of objects, or, in spite of the name, one object on each line."""
    if not file.read_bytes().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _jsonl_rows(file)
        return
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
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
            except (ValueError, RecursionError) as error:
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
        except UnicodeDecodeError as error:  # of a piece of the file that was read ahead
            raise ConfigError(
                f"task.path: {file}, line {_first_line_of_other_encoding(file)}, is not UTF-8; save the file as UTF-8"
            ) from error


def _refuse_twice(file: Path, names: Sequence[str]) -> None:
    """Raise ConfigError for a column that occurs twice, of which rows would have the last one. Those without a name
    have no use.
    """
    twice = next((name for name in names if name.strip() and names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"task.path: {file} has more than one column {twice!r}; rename or remove all but one")


def _first_line_of_other_encoding(file: Path) -> int:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file).read()
        names = table.column_names
        _refuse_twice(file, names)
        columns = [as_written(column.to_pylist(), str(column.type)) for column in table.columns]
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"task.path: {file} has text that is not UTF-8 ({error}); write the file again with UTF-8 text"
        ) from error
    except pyarrow.ArrowException as error:
        raise ConfigError(f"task.path: {file} is not a readable parquet file: {error}") from error
    for number, values in enumerate(zip(*columns, strict=True), start=1):
        yield f"task.path: {file}, row {number},", dict(zip(names, values, strict=True))


def as_written(values: list[Any], kind: str) -> list[Any]:
    """Numbers of a column with less precision than Python's, with the digits that they were written with: 0.1, not
    0.10000000149.
    """
    import numpy

    narrow = {
        "float": numpy.float32,
        "float32": numpy.float32,
        "halffloat": numpy.float16,
        "float16": numpy.float16,
    }.get(kind)
    return values if narrow is None else [None if value is None else float(str(narrow(value))) for value in values]
