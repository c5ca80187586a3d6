"""Tasks whose problems are the rows of a data set, from local files or from the Hugging Face Hub."""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from offline_grpo.errors import ConfigError, reason_of, require
from offline_grpo.hub import need_dataset
from offline_grpo.settings import Range
from offline_grpo.task.pictures import check_pictures, with_pictures
from offline_grpo.task.problems import HALF, BaseTask, Share, SystemPrompt, is_whole
from offline_grpo.types import Message, Picture, Problem, Schema, Split

log = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
HELD_OUT_SPLITS = ("test", "validation")
"""Names of splits that are not for training, in the order in which they are looked for."""

_SPLIT_SPEC = re.compile(r"(?P<name>\w[\w.-]*)(?:\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\])?", re.ASCII)
_SPLIT = Range(
    "must be a split, such as train, or a slice of it, such as train[:-500]",
    lambda spec: _SPLIT_SPEC.fullmatch(spec) is not None,
)
_SHOWN_CHARS = 120
_LARGEST = 1e38  # of float32


@dataclass(frozen=True, slots=True)
class Row:
    """One unchecked row, with its place for error messages; `index` is its number in its split, from 0."""

    where: str
    index: int
    value: Any


def _local_source(path: str) -> Path | None:
    """The local file or folder at `path`, or None if `path` is a Hub id."""
    local = Path(path).expanduser()
    if local.exists():
        return local
    if local.suffix in SUFFIXES or path.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"task.path={path} does not exist (looked for {local.absolute()})")
    return None


def _files_of(source: Path, name: str | None, split: str) -> list[Path]:
    """The files of a split: in a subfolder named as the configuration, in `data`, or in the folder itself."""
    inner = source / (name or "data")
    folder = inner if inner.is_dir() else source
    files = (folder / f"{split}{suffix}" for suffix in SUFFIXES)
    return [file for file in files if file.exists()][:1] or sorted(folder.glob(f"{split}-*.parquet"))


def _from_hub(path: str, name: str | None, what: str, function: str, **settings: str) -> Any:
    """What a function of `datasets` says of a data set; `what` it is asked for, in words."""
    kinds = f"a local file ({', '.join(SUFFIXES)}), or to a folder with one such file for each split"
    fix = f"use task=math_sample or task=ifeval_sample, or set task.path to {kinds}"
    need_dataset(path, "task.path", fix)

    import datasets

    try:
        found = getattr(datasets, function)(path, name, **settings)
        for column, kind in found.features.items() if function == "load_dataset" else ():
            # Files of pictures stay as they are.
            if isinstance(kind, datasets.Image):
                found = found.cast_column(column, datasets.Image(decode=False))
            elif isinstance(getattr(kind, "feature", None), datasets.Image):
                found = found.cast_column(column, datasets.List(datasets.Image(decode=False)))
        return found
    except (OSError, ValueError) as error:  # missing data sets are OSErrors, unknown names and splits ValueErrors
        about = f"task.path={path}: is no local file or folder, and loading it from the Hub (task.name={name}, {what})"
        raise ConfigError(f"{about} failed: {reason_of(error)}. Without a network, {fix}") from error


def file_rows(file: Path, key: str = "task.path") -> Iterator[tuple[str, Any]]:
    """The rows of the file that `key` names, each with its place."""
    number = 0
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet

            rows = parquet.ParquetFile(file).read().to_pylist()
        elif file.suffix == ".csv":
            # A header and rows; every cell is text. The module's own limit of 128 KiB is less than a long prompt.
            csv.field_size_limit(2**31 - 1)
            text = file.read_bytes().decode("utf-8-sig")
            rows = csv.DictReader(StringIO(text, newline=""), strict=True)
        else:
            # An object on each line; in a .json file perhaps one array of objects instead.
            text = file.read_text(encoding="utf-8-sig")
            is_array = file.suffix == ".json" and text.lstrip().startswith("[")
            rows = json.loads(text) if is_array else (json.loads(line) for line in text.split("\n") if line.strip())
        for value in rows:
            if file.suffix == ".csv" and (None in value or None in value.values()):
                raise csv.Error("not as many cells as the header; commas separate cells")
            number += 1
            yield f"{key}: {file}, row {number},", value
    except (ValueError, RecursionError, csv.Error) as error:
        kind = file.suffix.removeprefix(".").upper()
        raise ConfigError(f"{key}: {file}, row {number + 1}, is not valid {kind} ({reason_of(error)})") from error


# What a row says.


def text_field(row: Row, name: str, key: str) -> str:
    """A field of a row as text; numbers are written out. Raises ConfigError if it has no text or number."""
    value = field(row, name, key)
    if isinstance(value, float) and abs(value) < _LARGEST:
        narrow = np.float32(value)  # from a column of this type: 0.1, and not 0.10000000149011612
        value = Decimal(str(narrow if float(narrow) == value else value))
    # 0.00001 and not 1e-05, which no completion has; 2 and not 2.0, as pandas writes integers beside empty cells
    text = format(value.normalize(), "f") if isinstance(value, Decimal) else str(value)
    if not isinstance(value, (str, int, Decimal)) or not text.strip():
        raise ConfigError(f"{row.where} has no text in the field {name!r} ({key}): {shown(row.value)}")
    return text


def messages_or_text(row: Row, name: str, key: str) -> str | list[Message]:
    """The prompt of a row: text, or a list of chat messages that ends with one of the user. They are whole, with calls
    of tools, names and whatever else the chat template may write.
    """
    value = without_none(field(row, name, key))
    if not isinstance(value, list):
        return text_field(row, name, key)
    messages: list[Message] = []
    for given in value:
        message: Message = {}
        try:
            # Content is empty beside calls of tools alone.
            names = [call["function"]["name"] for call in given.get("tool_calls") or ()]
            message = {"role": given["role"], "content": "" if names else given["content"], **given}
            parts = message["content"] if isinstance(message["content"], list) else []
            said = [part["text"] for part in parts if part["type"] == "text"] if parts else [message["content"]]
            are_texts = all(isinstance(text, str) for text in (message["role"], *said, *names))
        except (KeyError, TypeError, AttributeError):
            are_texts = False
        if not are_texts:
            fix = "a message must have role and content, both text (content may also be a list of parts, {type: text, "
            fix += "text: ...} and {type: image}); tool_calls are [{function: {name, ...}}]"
            raise ConfigError(f"{row.where} field {name!r} ({key}): {fix}: {shown(given)}")
        messages.append(message)
    if not messages or messages[-1]["role"] != "user":
        fix = "the last message must have the role user"
        raise ConfigError(f"{row.where} field {name!r} ({key}): {fix}: {shown(value)}")
    return messages


def with_pictures_of(
    row: Row, messages: Sequence[Message], name: str | None, folder: Path
) -> tuple[list[Message], tuple[Picture, ...]]:
    """Messages with their pictures, see `with_pictures`: those of their parts, and of the row's column `name`, one or
    a list of them. Raises ConfigError for anything else.
    """
    value = row.value.get(name)
    if name is not None and name not in row.value:
        known = f"{', '.join(row.value)}; null in it is no picture"
        raise ConfigError(f"task.image_field={name}: {row.where} has no such field; it has {known}")
    column = value if isinstance(value, list) else [] if value in (None, "") else [value]
    try:
        return with_pictures(messages, column, folder)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{row.where} (task.image_field={name}): {reason_of(error)}") from error


def without_bytes(value: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the columns that are files, or have some."""

    def has_bytes(value: object) -> bool:
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        return isinstance(value, bytes) or any(map(has_bytes, inner))

    return {str(key): each for key, each in value.items() if not has_bytes(each)}


def tools_of(row: Row) -> tuple[Schema, ...]:
    """The schemas in the column `tools`, or in its JSON text. Another kind of column of this name has none."""
    value = without_none(field(row, "tools", "tools")) if "tools" in row.value else None
    try:
        listed: Any = json.loads(value) if isinstance(value, str) else value
        functions = [each.get("function", each) for each in ([listed] if isinstance(listed, Mapping) else listed)]
        if all(isinstance(each["name"], str) for each in functions):
            return tuple({"type": "function", "function": each} for each in functions)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    if not re.search(r"[\"'](?:function|parameters)[\"']", str(value)):
        return ()
    fix = "must be a list of schemas of functions that have names, or JSON of it; another column needs another name"
    raise ConfigError(f"{row.where} field 'tools': {fix}: {shown(value)}")


def without_none(value: Any) -> Any:
    """Without entries that are None, which tables have for keys that other rows have."""
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def field(row: Row, name: str, key: str) -> Any:
    if not isinstance(row.value, Mapping):
        raise ConfigError(f"{row.where} is not a JSON object: {shown(row.value)}")
    if name not in row.value:
        names = ", ".join(map(str, row.value))
        raise ConfigError(f"{key}={name}: {row.where} has no such field; it has {names}")
    if not is_whole(row.value[name]):
        raise ConfigError(f"{row.where} field {name!r} ({key}): {HALF}: {shown(row.value[name])}")
    return row.value[name]


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


@dataclass(frozen=True, kw_only=True)
class RowTask(BaseTask, ABC):
    """A task, less `score`, whose subclass says what problem a row is. `path` is the Hub id of a data set, with its
    configuration `name`; a local file, which is one split called train; or a folder with one or more files for each
    split: `SPLIT.jsonl`, `.json`, `.csv` or `.parquet`, or `SPLIT-*.parquet` as in a copy of a Hub repository, perhaps
    in a subfolder `name`.

    Ids are `train-i` and `eval-i`, where i is the row's number in its split, from 0. The first call of `problems` reads
    the rows, once. Without a split for evaluation, those rows are held out whose prompts come first in the order of a
    fixed hash, each prompt once.
    """

    path: Annotated[str, Range("set it to a local file or folder, or to a Hub id", lambda path: bool(path.strip()))]
    name: str | None
    train_split: Annotated[str, _SPLIT]
    eval_split: Annotated[str | None, _SPLIT]
    eval_frac: Share
    system_prompt: SystemPrompt

    @property
    def folder(self) -> Path:
        """Where relative paths in rows begin."""
        source = Path(self.path).expanduser()
        return source if source.is_dir() else source.parent

    @abstractmethod
    def problem_of(self, problem_id: str, row: Row) -> Problem:
        """The problem of a row. Raises ConfigError where the row is malformed."""

    def asked_by(self, row: Row, problem: Problem) -> Sequence[Message]:
        """What the row itself says, without what settings add to it: these must not change which rows are held out."""
        return problem.messages if self.system_prompt is None else problem.messages[1:]

    def messages(self, row: Row, prompt: Sequence[Message]) -> tuple[Message, ...]:
        """The prompt, after the system message. Raises ConfigError if the prompt has one of its own."""
        if self.system_prompt is None:
            return tuple(prompt)
        if prompt[0]["role"] == "system":
            fix = f"{row.where} has a system message of its own; set it to null"
            raise ConfigError(f"task.system_prompt={self.system_prompt!r}: {fix}")
        return ({"role": "system", "content": self.system_prompt}, *prompt)

    @cached_property
    def all_rows(self) -> Sequence[Problem]:
        """The problems of `train_split` in their order, also those that are held out of it."""
        return self._load(self.train_split, Split.TRAIN)[1]

    @cached_property
    def _splits(self) -> Mapping[Split, Sequence[Problem]]:
        rows, train = self._load(self.train_split, Split.TRAIN)
        # Without a setting the data set's own split for evaluation, if it has one; otherwise a part of these rows.
        spec, path, name = self.eval_split, self.path, self.name
        if spec is None and path is not None:
            source = _local_source(path)
            if source is None:
                names = _from_hub(path, name, "splits", "get_dataset_split_names")
            else:
                names = [] if source.is_file() else [each for each in HELD_OUT_SPLITS if _files_of(source, name, each)]
            spec = next((each for each in HELD_OUT_SPLITS if each in names), None)
        if spec is not None:
            return {Split.TRAIN: train, Split.EVAL: self._load(spec, Split.EVAL)[1]}
        asked = [
            [*self.asked_by(row, problem), *({"picture": picture.key} for picture in problem.pictures)]
            for row, problem in zip(rows, train, strict=True)
        ]
        return hold_out(train, asked, self.eval_frac)

    def _load(self, spec: str, split: Split) -> tuple[list[Row], list[Problem]]:
        """The rows of the data set's split, or slice of one, `spec`, and their problems."""
        match, key, path = _SPLIT_SPEC.fullmatch(spec), f"task.{split}_split", self.path
        assert match is not None  # see `_SPLIT`
        # All rows, each with its place: from the Hub, from a file, or from a folder's files.
        source, name = _local_source(path), match["name"]
        if source is None:
            values = _from_hub(path, self.name, f"{key}={name}", "load_dataset", split=name)
            place = f"task.path={path} ({self.name}, {name})"
            found = [(f"{place}, row {number},", value) for number, value in enumerate(values, 1)]
        else:
            files = [source] if source.is_file() else _files_of(source, self.name, name)
            if source.is_file() and source.suffix not in SUFFIXES:
                raise ConfigError(f"task.path={source} must be a file of the kind {', '.join(SUFFIXES)}, or a folder")
            if source.is_file() and name != "train":
                fix = "set, for example, task.train_split='train[:-500]' task.eval_split='train[-500:]'"
                raise ConfigError(f"{key}={name}: task.path={source} is a file, one split called train; {fix}")
            if not files:
                kinds = ", ".join([*(f"{name}{suffix}" for suffix in SUFFIXES), f"{name}-*.parquet"])
                raise ConfigError(f"{key}={name}: the folder {source} (task.path) has none of {kinds}")
            found = [row for file in files for row in file_rows(file)]
        start, stop = (None if match[bound] is None else int(match[bound]) for bound in ("start", "stop"))
        rows = [Row(where, index, value) for index, (where, value) in enumerate(found)][start:stop]
        if not rows:
            raise ConfigError(f"{key}={spec} selects none of the {len(found)} rows of task.path={path}")
        # Templates may not know all that messages have, which then is not read.
        problems = [self.problem_of(f"{split}-{row.index}", row) for row in rows]
        pairs = zip(rows, problems, strict=True)
        check_pictures((row.where, picture) for row, problem in pairs for picture in problem.pictures)
        names = {name for problem in problems for message in problem.messages for name in message}
        if more := sorted(names - {"role", "content", "tool_calls", "tool_call_id"}):
            log.info("messages in rows have %s too, of which the model reads what its template writes", ", ".join(more))
        return rows, problems


def hold_out(
    problems: Sequence[Problem], asked: Sequence[Sequence[Message]], eval_frac: float
) -> Mapping[Split, Sequence[Problem]]:
    """Both splits of problems that have none, by a hash of what each asks. Raises ConfigError if all ask the same."""
    # all problems with the same prompt are on the same side, whatever their order and whatever is added
    contents = ("\0".join("\0".join(map(str, each.values())) for each in messages) for messages in asked)
    hashes = [hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest() for content in contents]
    different = sorted(set(hashes))
    # The first prompts in the order of their hashes, each once: copies would count as independent answers.
    fix = f"the data has {len(different)} different prompts; it needs 2 or more"
    require(len(different) > 1, "task.eval_frac", eval_frac, fix)
    chosen = set(different[: max(1, round(eval_frac * len(different)))])
    held_out: dict[str, Problem] = {}
    left: list[Problem] = []
    for key, problem in zip(hashes, problems, strict=True):
        if key in chosen:
            held_out.setdefault(key, problem)
        else:
            left.append(problem)
    counts = len(held_out), len(different), len(left), len(problems), eval_frac
    log.info("held out: %d of %d distinct rows; %d of all %d are left for training (task.eval_frac=%s)", *counts)
    return {Split.TRAIN: left, Split.EVAL: list(held_out.values())}
