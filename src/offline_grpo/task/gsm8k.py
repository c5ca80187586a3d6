"""GSM8K: grade-school word problems with numeric answers (arXiv:2110.14168), from the Hub or from local files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from offline_grpo.errors import ConfigError
from offline_grpo.task.answers import is_same_number, last_boxed, last_number
from offline_grpo.types import Problem, Score, Split

_ROW_FORM = '{"question": "...", "answer": "... #### 72"}'
_SUFFIXES = (".jsonl", ".parquet")
_SPLIT_SPEC = re.compile(r"(?P<name>\w[\w.-]*)(?:\[(?P<start>-?\d+)?:(?P<stop>-?\d+)?\])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Row:
    """One unchecked row of the data set. `where` describes its location for error messages."""

    where: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class GSM8K:
    r"""Word problems, scored by the final number.

    The answer is the content of the completion's last `\boxed{}` or, without a box, its last number. `Score.parts`:

        correct     1.0 if the answer equals the reference in value
        format      `format_weight` if there is a box and it is not empty

    Rows have the fields `question` and `answer`; the reference is the text after `####` in `answer`. The first call of `problems` reads
    them, once. Ids are `gsm8k-train-i` and `gsm8k-eval-i`, where i is the row's index in its file, from 0.

    Args:
        path: the Hub id of a data set, a local `.jsonl` or `.parquet` file, or a folder with one or more such files per split:
            `SPLIT.jsonl`, `SPLIT.parquet`, or `SPLIT-*.parquet` as in a copy of a Hub repository.
        name: the Hub configuration of the data set. In a local folder, the subfolder of this name is read if it exists.
        train_split: the split to train on, optionally with a slice: `train`, `train[:-500]`. A single file is a split called `train`.
        eval_split: the split to evaluate on: `test`, `train[-500:]`.
        system_prompt: the system message, or None for no system message.
        prompt_template: the user message; `{question}` is replaced by the question.
        format_weight: the reward for a boxed answer, right or wrong; 0 or more.

    Raises:
        ConfigError: a value is malformed. `problems` raises it if the data cannot be read or a row is malformed.
    """

    path: str
    name: str
    train_split: str
    eval_split: str
    system_prompt: str | None
    prompt_template: str
    format_weight: float

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ConfigError("task.path is blank; set it to a Hub id such as openai/gsm8k, or to a local file or folder")
        for key, spec in (("train_split", self.train_split), ("eval_split", self.eval_split)):
            if not _SPLIT_SPEC.fullmatch(spec):
                raise ConfigError(f"task.{key}={spec!r} must be the name of a split, such as train, or a slice of it, such as train[:-500]")
        if self.system_prompt is not None and not self.system_prompt.strip():
            raise ConfigError("task.system_prompt is blank; set it to null to send no system message")
        if "{question}" not in self.prompt_template:
            raise ConfigError(f"task.prompt_template={self.prompt_template!r} must contain {{question}}, which is replaced by the question")
        if not 0 <= self.format_weight < float("inf"):
            raise ConfigError(f"task.format_weight={self.format_weight} must be 0 or more")

    def problems(self, split: Split) -> tuple[Problem, ...]:
        """All problems of a split, in the order of the data."""
        return self._splits[split]

    def score(self, problem: Problem, text: str) -> Score:
        """Score the final number of `text`."""
        boxed = last_boxed(text)
        answer = last_number(text) if boxed is None else boxed
        is_correct = answer is not None and is_same_number(problem.answer, answer)
        parts = {"correct": float(is_correct), "format": self.format_weight if boxed else 0.0}
        return Score(reward=sum(parts.values()), is_correct=is_correct, parts=parts)

    @cached_property
    def _splits(self) -> dict[Split, tuple[Problem, ...]]:
        return {split: self._load(split) for split in Split}

    def _load(self, split: Split) -> tuple[Problem, ...]:
        key = f"{split}_split"
        spec = self.train_split if split is Split.TRAIN else self.eval_split
        match = _SPLIT_SPEC.fullmatch(spec)
        assert match is not None  # checked at construction
        source = _local_source(self.path)
        files = None if source is None else _split_files(source, self.name, match["name"], key)
        rows = _hub_rows(self.path, self.name, match["name"], key) if files is None else [row for file in files for row in _file_rows(file)]
        start, stop = (None if match[bound] is None else int(match[bound]) for bound in ("start", "stop"))
        indices = range(len(rows))[start:stop]
        if not indices:
            raise ConfigError(f"task.{key}={spec} selects none of the {len(rows)} rows of task.path={self.path}")
        return tuple(self._problem(f"gsm8k-{split}-{index}", rows[index]) for index in indices)

    def _problem(self, problem_id: str, row: Row) -> Problem:
        question, reference = _checked(row)
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        # Not str.format: templates and questions may contain other braces.
        prompt = self.prompt_template.replace("{question}", question)
        return Problem(problem_id, (*system, {"role": "user", "content": prompt}), reference)


def _checked(row: Row) -> tuple[str, str]:
    """The question and the reference answer of a row."""
    shown = repr(row.value) if len(repr(row.value)) <= 120 else repr(row.value)[:120] + "..."
    expected = f"; expected {_ROW_FORM}"
    if not isinstance(row.value, dict):
        raise ConfigError(f"{row.where} is not a JSON object: {shown}{expected}")
    for name in ("question", "answer"):
        value = row.value.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{row.where} has no text in the field {name!r}: {shown}{expected}")
    _, marker, reference = row.value["answer"].rpartition("####")
    if not marker or not reference.strip():
        raise ConfigError(f"{row.where} has no final answer after '####' in the field 'answer': {shown}{expected}")
    return row.value["question"], reference.strip()


def _local_source(path: str) -> Path | None:
    """The local file or folder at `path`, or None if `path` is a Hub id."""
    local = Path(path).expanduser()
    if local.exists():
        return local
    if local.suffix in _SUFFIXES or path.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"task.path={path} does not exist (looked for {local.absolute()})")
    return None


def _split_files(source: Path, name: str, split_name: str, key: str) -> list[Path]:
    """The files of a split."""
    if source.is_file():
        if source.suffix not in _SUFFIXES:
            raise ConfigError(f"task.path={source} must be a .jsonl or .parquet file, or a folder")
        if split_name != "train":
            raise ConfigError(
                f"task.{key}={split_name}, but task.path={source} is a single file, which is one split called train; set, for example, "
                "task.train_split='train[:-500]' task.eval_split='train[-500:]', or let task.path be a folder with a file for each split"
            )
        return [source]
    folder = source / name if (source / name).is_dir() else source
    wanted = (f"{split_name}.jsonl", f"{split_name}.parquet", f"{split_name}-*.parquet")
    found = [sorted(folder.glob(pattern)) for pattern in wanted]
    files = next((files for files in found if files), None)
    if files is None:
        raise ConfigError(f"task.{key}={split_name}: the folder {folder} (task.path) has none of {', '.join(wanted)}")
    return files


def _file_rows(file: Path) -> list[Row]:
    try:
        return list(_jsonl_rows(file) if file.suffix == ".jsonl" else _parquet_rows(file))
    except OSError as error:
        raise ConfigError(f"task.path: {file} cannot be read: {error}") from error


def _jsonl_rows(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"task.path: {file}, line {number},"
            try:
                yield Row(where, json.loads(line.decode("utf-8-sig")))
            except (ValueError, RecursionError) as error:
                shown = line[:120].decode(errors="replace").strip()
                raise ConfigError(f"{where} is not valid JSON ({error}): {shown!r}; expected {_ROW_FORM}") from error


def _parquet_rows(file: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        values = parquet.ParquetFile(file).read().to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"task.path: {file} is not a readable parquet file: {error}") from error
    for number, value in enumerate(values, start=1):
        yield Row(f"task.path: {file}, row {number},", value)


def _hub_rows(path: str, name: str, split_name: str, key: str) -> list[Row]:
    import datasets

    try:
        data = datasets.load_dataset(path, name, split=split_name)
    except (OSError, ValueError) as error:  # offline and missing data sets are OSErrors; unknown names and splits ValueErrors
        raise ConfigError(
            f"task.path={path} is not a local file or folder, and loading it from the Hugging Face Hub (task.name={name}, "
            f"task.{key}={split_name}) failed: {error}. Without a network, set task.path to a local .jsonl or .parquet file, or to a "
            "folder with one such file for each split"
        ) from error
    return [Row(f"task.path={path} ({name}, {split_name}), row {number},", dict(value)) for number, value in enumerate(data, start=1)]
