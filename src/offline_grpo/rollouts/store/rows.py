"""Rollouts as rows of a table, and back. The table has a row per completion, so that any tool for Parquet can read it.

Problems and reward parts are JSON, because their keys differ between tasks. What all completions of a group share is
repeated in each row, and compresses to almost nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json

from offline_grpo.disk import utf8
from offline_grpo.errors import ConfigError
from offline_grpo.types import FinishReason, Problem, Rollout, RolloutGroup, Score, Turn

_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)  # `json.dumps` makes one at each call
_HALVES = re.compile("[\ud800-\udfff]")
TOKENS, LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.float32())


def _always(name: str, kind: pa.DataType) -> pa.Field:
    """A column that is never null."""
    return pa.field(name, kind, nullable=False)


SCHEMA = pa.schema(
    [
        _always("iteration", pa.int64()),
        _always("phase", pa.string()),  # train or eval
        _always("group", pa.int64()),  # of the iteration; its completions are compared with each other
        pa.field("problem_id", pa.string()),  # this and the next three: null where the source has rollouts alone
        pa.field("messages", pa.string()),  # JSON: [{"role": ..., "content": ...}, ...]
        pa.field("answer", pa.string()),
        pa.field("fields", pa.string()),  # JSON: the rest of the problem's row in its data set
        _always("prompt_ids", TOKENS),  # [P] all before the first sampled token
        _always("completion_ids", TOKENS),  # [C] that token and all after it
        _always("logprobs", LOGPROBS),  # [C] nats, the sampler's
        pa.field("is_sampled", pa.list_(pa.bool_())),  # [C]; null: every token was sampled
        _always("version", pa.int64()),  # updates that the weights carried which drew the tokens, -1: unknown
        pa.field("versions", pa.list_(pa.int64())),  # [C]; null: `version` drew them all
        pa.field("ref_logprobs", LOGPROBS),  # [C] nats, if the source has those of a reference
        pa.field("teacher_logprobs", LOGPROBS),  # [C] nats, if there is a teacher
        _always("temperature", pa.float64()),
        pa.field("finish_reason", pa.string()),  # null where the source does not know
        _always("text", pa.string()),  # what was judged
        pa.field("reward", pa.float64()),  # null: it could not be scored
        pa.field("parts", pa.string()),  # JSON: {"name": weighted term of the reward}
        _always("is_correct", pa.bool_()),
        pa.field("failure", pa.string()),  # null, or why it could not be scored
        pa.field("measured", pa.string()),  # JSON: {"name": what else the task tells of it}; null: nothing
        pa.field("advantage", pa.float64()),  # null: an evaluation, or no reward; of advantages per token their mean
        pa.field("advantages", pa.list_(pa.float64())),  # [C]; null unless the source gives one per token
        pa.field("zero_advantage", pa.bool_()),
        pa.field("turn_starts", pa.list_(pa.int32())),  # [K] in completion_ids; null: no environment
        pa.field("turn_rewards", pa.list_(pa.float64())),  # [K]
        pa.field("conversation", pa.string()),  # JSON, as `messages`, which it begins with
    ]
)
_ITEMS = [f"{name}.list.element" for name in SCHEMA.names if pa.types.is_list(SCHEMA.field(name).type)]
_NUMBERS = [leaf for leaf in _ITEMS if not leaf.startswith("is_sampled")]


def table_of(
    phase: str, groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float | None]] | None, iteration: int
) -> pa.Table:
    """The rollouts of one iteration. Logprobs are kept in the float32 that training uses.

    Args:
        advantages: one number per rollout of each group, None in evaluations.
    """
    rows = [
        {"iteration": iteration, "phase": phase, "group": number, **problem, **_row(group, index)}
        | {"advantage": None if advantages is None else advantages[number][index]}
        for number, group in enumerate(groups)
        for problem in (_problem(group),)
        for index in range(len(group.rollouts))
    ]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def parquet(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The content of a file; equal tables give equal bytes. Each page has a checksum."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=[name for name in SCHEMA.names if not pa.types.is_list(SCHEMA.field(name).type)],  # type: ignore[arg-type]
        column_encoding=dict.fromkeys(_NUMBERS, "BYTE_STREAM_SPLIT"),
        write_page_checksum=True,
        store_schema=False,  # Arrow's own types are not needed
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    return sink.getvalue().to_pybytes()


def _problem(group: RolloutGroup) -> dict[str, Any]:
    problem = group.problem
    if problem is None:
        return dict.fromkeys(("problem_id", "messages", "answer", "fields"))
    return {
        "problem_id": utf8(problem.problem_id),
        "messages": _json([dict(message) for message in problem.messages]),
        "answer": utf8(problem.answer),
        "fields": _json(dict(problem.fields)),
    }


def _json(value: object) -> str:
    """JSON with escaped escapes for halves of surrogate pairs, as `utf8` makes them: readers refuse plain ones."""
    return _HALVES.sub(lambda half: f"\\\\u{ord(half[0]):04x}", _ENCODER.encode(value))


def _row(group: RolloutGroup, index: int) -> dict[str, Any]:
    rollout = group.rollouts[index]
    start = first_sampled(rollout)
    is_sampled, versions = rollout.is_sampled[start:], rollout.versions[start:]
    return {
        "prompt_ids": rollout.token_ids[:start],
        "completion_ids": rollout.token_ids[start:],
        "logprobs": rollout.logprobs[start:],
        "is_sampled": None if all(is_sampled) else is_sampled,
        "version": versions[0] if versions else -1,
        "versions": versions if len(set(versions)) > 1 else None,
        "ref_logprobs": None if rollout.ref_logprobs is None else rollout.ref_logprobs[start:],
        "teacher_logprobs": None if rollout.teacher_logprobs is None else rollout.teacher_logprobs[start:],
        "temperature": rollout.temperature,
        "finish_reason": rollout.finish_reason,
        "text": utf8(rollout.text),
        # whatever scoring.on_failure made of it; Arrow takes no large integers for a float
        "reward": None if rollout.score.failure is not None else float(rollout.score.reward),
        "parts": _json(dict(rollout.score.parts)),
        "is_correct": rollout.score.is_correct,
        "failure": rollout.score.failure,
        "measured": _json(dict(rollout.score.measured)) if rollout.score.measured else None,
        "advantages": None if group.advantages is None else group.advantages[index][start:],
        "zero_advantage": rollout.zero_advantage,
        "turn_starts": [turn.start - start for turn in rollout.turns] if rollout.turns else None,
        "turn_rewards": [turn.reward for turn in rollout.turns] if rollout.turns else None,
        "conversation": _json([dict(each) for each in rollout.conversation]) if rollout.conversation else None,
    }


def first_sampled(rollout: Rollout) -> int:
    """How many tokens the prompt has: all, where none was sampled."""
    return rollout.is_sampled.index(True) if True in rollout.is_sampled else len(rollout.token_ids)


def groups_of(table: pa.Table, rows: Iterable[Sequence[int]]) -> list[RolloutGroup]:
    """The groups of these rows."""
    rows = [list(row) for row in rows]
    members = iter(table.take([index for row in rows for index in row]).to_pylist())
    return [_group([next(members) for _ in row]) for row in rows]


def group_rows(table: pa.Table) -> dict[tuple[int, str, int], list[int]]:
    """The rows of each group, by iteration, phase and number, in the order of the table.

    Raises ConfigError if a group's rows are apart: in records that were joined, equal numbers are different groups.
    """
    rows: dict[tuple[int, str, int], list[int]] = {}
    keys = zip(*(table[name].to_pylist() for name in ("iteration", "phase", "group")), strict=True)
    for row, key in enumerate(keys):
        members = rows.setdefault(key, [])
        if members and members[-1] != row - 1:
            about = f"the rows of iteration {key[0] + 1}, group {key[2] + 1} are apart, as in records that were joined"
            raise ConfigError(f"rollouts.path: {about} or shuffled; name each record by itself: rollouts.path=[A,B]")
        members.append(row)
    return rows


def _group(members: Sequence[Mapping[str, Any]]) -> RolloutGroup:
    row = members[0]
    problem = None
    if row["messages"] is not None:
        messages, fields = from_json(row["messages"]), from_json(row["fields"])
        problem = Problem(row["problem_id"], tuple(messages), row["answer"], fields)
    advantages = None
    if all(member["advantages"] is not None for member in members):
        advantages = tuple((0.0,) * len(member["prompt_ids"]) + tuple(member["advantages"]) for member in members)
    return RolloutGroup(problem, tuple(_rollout(member) for member in members), advantages)


def _rollout(row: Mapping[str, Any]) -> Rollout:
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    blank, length = len(prompt), len(completion)
    ref, teacher = (
        None if row[name] is None else (0.0,) * blank + tuple(row[name])
        for name in ("ref_logprobs", "teacher_logprobs")
    )
    parts, measured = ({} if row[name] is None else from_json(row[name]) for name in ("parts", "measured"))
    reward = row["reward"] if row["failure"] is None else nan
    return Rollout(
        token_ids=(*prompt, *completion),
        is_sampled=(False,) * blank + (tuple(row["is_sampled"]) if row["is_sampled"] is not None else (True,) * length),
        logprobs=(0.0,) * blank + tuple(row["logprobs"]),
        versions=(0,) * blank + (tuple(row["versions"]) if row["versions"] is not None else (row["version"],) * length),
        temperature=row["temperature"],
        finish_reason=None if row["finish_reason"] is None else FinishReason(row["finish_reason"]),
        text=row["text"],
        score=Score(reward, row["is_correct"], parts, row["failure"], measured),
        ref_logprobs=ref,
        teacher_logprobs=teacher,
        zero_advantage=bool(row["zero_advantage"]),
        turns=tuple(_turns(row)),
        conversation=() if row["conversation"] is None else tuple(from_json(row["conversation"])),
    )


def _turns(row: Mapping[str, Any]) -> Iterator[Turn]:
    """A turn ends where the next one begins, or before that, where a token was not sampled."""
    starts, blank, length = row["turn_starts"] or [], len(row["prompt_ids"]), len(row["completion_ids"])
    is_sampled = row["is_sampled"] or [True] * length
    for start, limit, reward in zip(starts, [*starts, length][1:], row["turn_rewards"] or [], strict=True):
        end = next((i for i in range(start, limit) if not is_sampled[i]), limit)
        yield Turn(blank + start, blank + end, reward)
