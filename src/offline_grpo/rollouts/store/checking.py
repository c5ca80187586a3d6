"""Checks a table of rollouts that anybody may have written, before anything is learnt from it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import reduce
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute
from pydantic import FiniteFloat, TypeAdapter

from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.rollouts.store.rows import SCHEMA
from offline_grpo.types import FAILURES, FinishReason

pc: Any = pyarrow.compute  # it makes its functions when it is imported, where no type checker sees them
JSON = {
    "messages": TypeAdapter(list[dict[str, str]]),
    "fields": TypeAdapter(dict[str, Any]),
    "parts": TypeAdapter(dict[str, FiniteFloat]),
    "measured": TypeAdapter(dict[str, FiniteFloat]),
}

PER_TOKEN = ("logprobs", "is_sampled", "versions", "ref_logprobs", "advantages")
"""Columns that are as long as `completion_ids`."""
GROUP = ("iteration", "phase", "group")
"""What tells the groups of a record apart; those of another record have the same."""
PROBLEM = ("problem_id", "messages", "answer", "fields")
_JOINED = "as of several exports that were joined; name these one by one: rollouts.path=[A,B]"


def conform(table: pa.Table, where: object, names: Sequence[str] | None = None) -> pa.Table:
    """The table with columns of `SCHEMA` in its types: those of these `names`, or all. What may be null may be missing.

    Raises:
        ConfigError: a column is missing, of another type, or null where it must not be; names `where` and the column.
    """
    fields = [field for field in SCHEMA if names is None or field.name in names]
    return pa.table({field.name: _column(table, field, where) for field in fields})


def _column(table: pa.Table, field: pa.Field, where: object) -> pa.ChunkedArray:
    if field.name not in table.column_names:
        if not field.nullable:
            raise ConfigError(
                f"{where}: has no column {field.name}, so it is no store of rollouts; it has {', '.join(table.column_names)}"
            )
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table[field.name]
    try:
        column = column if column.type == field.type else column.cast(field.type)
    except pa.ArrowException as error:
        message = f"{where}: column {field.name} has type {column.type}, and must be {field.type} ({reason_of(error)})"
        raise ConfigError(message) from error
    if not field.nullable and column.null_count:
        raise ConfigError(f"{where}: column {field.name} has no value in {column.null_count} of {table.num_rows} rows")
    return column


def check_values(table: pa.Table, where: object, *, vocab_size: int | None, context: int | None) -> None:
    """Raise ConfigError unless a run can learn from every row.

    Args:
        table: as `conform` returns it.
        vocab_size, context: of the model; None where nothing is trained.
    """

    def refuse(bad: pa.ChunkedArray | pa.Array, what: str) -> None:
        rows = pc.indices_nonzero(pc.fill_null(bad, False))
        if len(rows):
            raise ConfigError(f"{where}: {what} (row {rows[0].as_py()}, and {len(rows) - 1} more)")

    lengths = pc.list_value_length(table["completion_ids"])
    for name in PER_TOKEN:
        refuse(pc.not_equal(pc.list_value_length(table[name]), lengths), f"{name} and completion_ids differ in length")
    prompts = pc.list_value_length(table["prompt_ids"])
    refuse(pc.equal(prompts, 0), "a prompt without a token, so nothing predicts the first one of the completion")
    if context is not None:
        refuse(
            pc.greater(pc.add(prompts, lengths), context),
            f"a sequence of more than the model's context of {context} tokens",
        )
    for name in ("prompt_ids", "completion_ids", *PER_TOKEN):
        values = pc.list_flatten(table[name])
        if values.null_count:
            raise ConfigError(f"{where}: {name} has no value for {values.null_count} tokens")
        if pa.types.is_floating(values.type) and not pc.all(pc.is_finite(values), min_count=0).as_py():
            raise ConfigError(f"{where}: {name} has a number that is not finite")
        if name.endswith("_ids") and len(values):
            ends = pc.min_max(values).as_py()
            if ends["min"] < 0 or (vocab_size is not None and ends["max"] >= vocab_size):
                wrong, last = (
                    (ends["min"] if ends["min"] < 0 else ends["max"]),
                    "" if vocab_size is None else f" to {vocab_size - 1}",
                )
                raise ConfigError(f"{where}: {name} has token {wrong}, and the model has 0{last}")
    for name in ("reward", "temperature", "advantage"):
        refuse(pc.invert(pc.is_finite(table[name])), f"a {name} that is not finite")
    refuse(pc.less_equal(table["temperature"], 0), "a temperature that is not above 0")
    for name, known in (("finish_reason", [str(reason) for reason in FinishReason]), ("failure", FAILURES)):
        refuse(
            pc.and_(pc.is_valid(table[name]), pc.invert(pc.is_in(table[name], pa.array(known)))), f"an unknown {name}"
        )
    refuse(
        pc.xor(pc.is_valid(table["messages"]), _all_valid(table, ("problem_id", "answer", "fields"))),
        "a part of a problem is missing",
    )
    for name, schema in JSON.items():
        for text in pc.unique(table[name].drop_null()).to_pylist():
            try:
                schema.validate_json(text)
            except ValueError as error:
                raise ConfigError(
                    f"{where}: {name} has {text[:60]!r}, which is no JSON of the form that runs write"
                ) from error


def _all_valid(table: pa.Table, names: Sequence[str]) -> pa.ChunkedArray:
    return reduce(pc.and_, [pc.is_valid(table[name]) for name in names])


def check_groups(table: pa.Table, where: object) -> None:
    """Raise ConfigError where groups of several records are mixed up, because their tables were joined.

    Prompts are compared by their problems: an environment's own may begin with other tokens in each completion.

    Args:
        table: as `conform` returns it.
    """
    counted = [(name, "count_distinct", pc.CountOptions(mode="all")) for name in PROBLEM]
    groups = table.group_by(GROUP).aggregate(counted)
    is_mixed = reduce(pc.or_, [pc.greater(groups[f"{name}_count_distinct"], 1) for name in PROBLEM])
    if mixed := groups.filter(is_mixed).select(GROUP).to_pylist():
        first = min((row["iteration"] + 1, row["group"] + 1) for row in mixed)
        raise ConfigError(
            f"{where}: a group has completions of different prompts (iteration {first[0]}, group {first[1]}), {_JOINED}"
        )
    if _is_joined(zip(*(table[name].to_pylist() for name in GROUP), strict=True)):
        raise ConfigError(f"{where}: its groups come again after others, {_JOINED}")


def _is_joined(keys: Iterable[Hashable]) -> bool:
    """Whether a record, row by row of these groups, is made of several: groups come again, and each part has whole
    ones, all of one size.

    A single record that was shuffled or sorted has rows of a group in many places too, but in pieces of different
    sizes.
    """
    parts: list[dict[Hashable, int]] = [{}]
    for key, rows in groupby(keys):
        if key in parts[-1]:
            parts.append({})
        parts[-1][key] = len(list(rows))
    sizes = [set(part.values()) for part in parts]
    return len(parts) > 1 and all(len(own) == 1 and own != {1} for own in sizes)
