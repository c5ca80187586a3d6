"""Rollouts as rows of a table, and back. The table has a row per completion, so that any tool for Parquet can read it.

What all completions of a group share is repeated in each row, and compresses to almost nothing.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from math import inf, nan
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import from_json

from offline_grpo.errors import ConfigError
from offline_grpo.formats import utf8
from offline_grpo.types import FinishReason, Picture, Problem, Rollout, RolloutGroup, Score, Turn, num_pictures

# Once, because `json.dumps` would make one at each call.
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, default=lambda each: f"<{len(each)} bytes>" if isinstance(each, bytes) else str(each)
)
_HALVES = re.compile("[\ud800-\udfff]")
TOKENS, LOGPROBS = pa.list_(pa.int32()), pa.list_(pa.float32())
NAMES = pa.list_(pa.list_(pa.string()))
NUMBERS = pa.map_(pa.string(), pa.float64())
_TEXTS = ("role", "content", "reasoning_content", "tool_call_id", "name")
_JSON = ("tool_calls", "other")  # "other": what else a message has, and what of `_TEXTS` is no text in it
MESSAGES = pa.list_(pa.struct([(name, pa.string()) for name in (*_TEXTS, *_JSON)]))


def _always(name: str, kind: pa.DataType) -> pa.Field:
    """A column that is never null."""
    return pa.field(name, kind, nullable=False)


SCHEMA = pa.schema(
    [
        _always("iteration", pa.int64()),
        _always("phase", pa.string()),  # train or eval
        _always("group", pa.int64()),  # of the iteration; its completions are compared with each other
        pa.field("problem_id", pa.string()),  # this and the next three: null where the source has rollouts alone
        pa.field("messages", MESSAGES),
        pa.field("answer", pa.string()),
        # the rest of the problem's row in its data set; JSON, as its keys differ between tasks
        pa.field("fields", pa.string()),
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
        pa.field("parts", NUMBERS),  # weighted terms of the reward by name
        _always("is_correct", pa.bool_()),
        pa.field("failure", pa.string()),  # null, or why it could not be scored
        pa.field("measured", NUMBERS),  # what else the task tells of it, by name; null: nothing
        pa.field("advantage", pa.float64()),  # null: an evaluation, or no reward; of advantages per token their mean
        pa.field("advantages", pa.list_(pa.float64())),  # [C]; null unless the source gives one per token
        pa.field("zero_advantage", pa.bool_()),
        pa.field("turn_starts", pa.list_(pa.int32())),  # [K] in completion_ids; null: no environment
        pa.field("turn_rewards", pa.list_(pa.float64())),  # [K]
        pa.field("conversation", MESSAGES),  # which `messages` is the beginning of; of the last sequence
        pa.field("sequence_starts", pa.list_(pa.int32())),  # those after the first, in completion_ids; null: none
        # [C] tokens that the sampler's filters left beside the drawn one; null: the whole vocabulary
        pa.field("alternatives", pa.list_(TOKENS)),
        # of each sequence, the names of its pictures in `images/`, the SHA-256 of their bytes; null: it has none
        pa.field("images", NAMES),
        # a file of numpy's, [prompt and completion, blocks, K]: the experts that tokens went to; 255 or 65535: unknown
        pa.field("routes", pa.binary()),
    ]
)


def _leaves(field: pa.Field) -> list[str]:
    """The columns that Parquet makes of one."""
    if field.type == MESSAGES:
        return [f"{field.name}.list.element.{name}" for name in (*_TEXTS, *_JSON)]
    if field.type == NUMBERS:
        return [f"{field.name}.key_value.{name}" for name in ("key", "value")]
    depth = 2 if field.type in (pa.list_(TOKENS), NAMES) else int(pa.types.is_list(field.type))
    return [field.name + ".list.element" * depth]


_PER_TOKEN = [field for field in SCHEMA if pa.types.is_list(field.type) and field.type not in (MESSAGES, NAMES)]
_OTHERS = [field for field in SCHEMA if field not in _PER_TOKEN and field.name != "routes"]
_REPEATED = [leaf for field in _OTHERS for leaf in _leaves(field)]
_NUMBERS = [leaf for field in _PER_TOKEN if field.name != "is_sampled" for leaf in _leaves(field)]


def table_of(
    phase: str, groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float | None]] | None, iteration: int
) -> pa.Table:
    """The rollouts of one iteration. Logprobs are kept in the float32 that training uses.

    Args:
        advantages: one number per rollout of each group, None in evaluations.
    """
    rows = []
    for number, group in enumerate(groups):
        # What the group's rows share.
        problem: dict[str, Any] = dict.fromkeys(("problem_id", "messages", "answer", "fields"))
        if group.problem is not None:
            problem = {
                "problem_id": utf8(group.problem.problem_id),
                "messages": list(map(_stored, group.problem.messages)),
                "answer": utf8(group.problem.answer),
                "fields": _json(dict(group.problem.fields)),
            }
        shared = {"iteration": iteration, "phase": phase, "group": number, **problem}
        for index, rollout in enumerate(group.rollouts):
            # The prompt is all before the first sampled token, and everything where none was sampled.
            start = [*rollout.is_sampled, True].index(True)
            is_sampled, versions = rollout.is_sampled[start:], rollout.versions[start:]
            row = {
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
                "parts": _numbers(rollout.score.parts),
                "is_correct": rollout.score.is_correct,
                "failure": rollout.score.failure,
                "measured": _numbers(rollout.score.measured) or None,
                "advantage": None if advantages is None else advantages[number][index],
                "advantages": None if group.advantages is None else group.advantages[index][start:],
                "zero_advantage": rollout.zero_advantage,
                "turn_starts": [turn.start - start for turn in rollout.turns] or None,
                "turn_rewards": [turn.reward for turn in rollout.turns] or None,
                "conversation": list(map(_stored, rollout.conversation)) or None,
                "sequence_starts": [first - start for first in rollout.starts[1:]] or None,
                "alternatives": None if rollout.alternatives is None else rollout.alternatives[start:],
                "routes": None if rollout.routes is None else _file(rollout.routes),
                "images": [[picture.key for picture in own] for own in rollout.pictures] or None,
            }
            rows.append(shared | row)
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def parquet(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The content of a file; equal tables give equal bytes. Each page has a checksum."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=_REPEATED,  # type: ignore[arg-type]
        column_encoding=dict.fromkeys(_NUMBERS, "BYTE_STREAM_SPLIT"),
        write_page_checksum=True,
        store_schema=False,  # Arrow's own types are not needed
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    return sink.getvalue().to_pybytes()


def _json(value: object) -> str:
    """JSON with escaped escapes for halves of surrogate pairs, as `utf8` makes them: readers refuse plain ones."""
    return _HALVES.sub(lambda half: f"\\\\u{ord(half[0]):04x}", _ENCODER.encode(value))


def _file(routes: np.ndarray) -> bytes:
    """The content of an .npy file of as small numbers as there are; `_routes` is the inverse."""
    np.save(file := BytesIO(), routes.astype(np.uint8 if routes.max(initial=0) < 255 else np.uint16))
    return file.getvalue()


def _routes(file: bytes | None) -> np.ndarray | None:
    if file is None:
        return None
    stored = np.load(BytesIO(file))
    return np.where(stored == np.iinfo(stored.dtype).max, -1, stored.astype(np.int16))


def _numbers(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(utf8(name), float(value)) for name, value in values.items()]


def _stored(message: Mapping[str, Any]) -> dict[str, str]:
    """A message with the fields of `MESSAGES`; `_message` is the inverse."""
    found = {name: utf8(message[name]) for name in _TEXTS if isinstance(message.get(name), str)}
    other = {name: value for name, value in message.items() if name not in found}
    if "tool_calls" in other:
        found["tool_calls"] = _json(other.pop("tool_calls"))
    return found | ({"other": _json(other)} if other else {})


def _message(stored: Mapping[str, str | None]) -> dict[str, Any]:
    found: dict[str, Any] = {name: value for name, value in stored.items() if value is not None}
    if "tool_calls" in found:
        found["tool_calls"] = from_json(found["tool_calls"])
    other = found.pop("other", None)
    return found if other is None else found | from_json(other)


def plain_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows, messages and reward parts as they were before they were recorded."""
    rows = table.to_pylist()
    for row in rows:
        for name in row.keys() & {"messages", "conversation"}:
            row[name] = None if row[name] is None else list(map(_message, row[name]))
        for name in row.keys() & {"parts", "measured"}:
            row[name] = None if row[name] is None else dict(row[name])
    return rows


def typed_column(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray | pa.Array:
    """A column in its type of `SCHEMA`: in earlier files nested ones are JSON, and `datasets` has lists for maps."""
    is_json = pa.types.is_nested(kind) and not pa.types.is_nested(column.type)
    if not is_json and pa.types.is_map(kind) == pa.types.is_map(column.type):
        return column.cast(kind)
    values = column.to_pylist()
    if is_json:
        values = [None if text is None else from_json(text) for text in values]
    if is_json and kind == MESSAGES:
        values = [None if messages is None else list(map(_stored, messages)) for messages in values]
    return pa.array(values, kind)


def groups_of(table: pa.Table, rows: Iterable[Sequence[int]], picture: Callable[[str], Picture]) -> list[RolloutGroup]:
    """The groups of these rows; `picture` reads one by its name."""
    rows = [list(row) for row in rows]
    taken = table.take(pa.array([index for row in rows for index in row], pa.int64()))
    plain, groups = iter(plain_rows(taken)), []
    for numbers in rows:
        members = [next(plain) for _ in numbers]
        first, problem, advantages = members[0], None, None
        pictures = [tuple(tuple(map(picture, own)) for own in row["images"] or ()) for row in members]
        if first["messages"] is not None:
            fields, messages = from_json(first["fields"]), tuple(first["messages"])
            asked = sum(map(num_pictures, messages))  # further ones came in an episode
            own = pictures[0][0][:asked] if asked else ()
            problem = Problem(first["problem_id"], messages, first["answer"], fields, pictures=own)
        if all(row["advantages"] is not None for row in members):
            advantages = tuple((0.0,) * len(row["prompt_ids"]) + tuple(row["advantages"]) for row in members)
        rollouts = []
        for row, images in zip(members, pictures, strict=True):
            prompt, completion = row["prompt_ids"], row["completion_ids"]
            blank, length = len(prompt), len(completion)
            is_sampled = tuple(row["is_sampled"] or (True,) * length)
            versions = tuple(row["versions"] or (row["version"],) * length)
            # Logprobs of the prompt are not on record; they are ignored.
            logprobs, ref, teacher = (
                None if row[name] is None else (0.0,) * blank + tuple(row[name])
                for name in ("logprobs", "ref_logprobs", "teacher_logprobs")
            )
            # A turn ends where the next one begins, or before that, where a token was not sampled.
            turns, starts = [], row["turn_starts"] or []
            in_order = [*sorted(starts), length]
            for start, reward in zip(starts, row["turn_rewards"] or [], strict=True):
                limit = in_order[bisect_right(in_order, start)]
                end = next((i for i in range(start, limit) if not is_sampled[i]), limit)
                turns.append(Turn(blank + start, blank + end, reward))
            reward = row["reward"] if row["failure"] is None else nan
            rollout = Rollout(
                token_ids=(*prompt, *completion),
                is_sampled=(False,) * blank + is_sampled,
                logprobs=logprobs or (),
                versions=(0,) * blank + versions,
                temperature=row["temperature"],
                finish_reason=None if row["finish_reason"] is None else FinishReason(row["finish_reason"]),
                text=row["text"],
                score=Score(reward, row["is_correct"], row["parts"] or {}, row["failure"], row["measured"] or {}),
                ref_logprobs=ref,
                teacher_logprobs=teacher,
                zero_advantage=bool(row["zero_advantage"]),
                turns=tuple(turns),
                conversation=tuple(row["conversation"] or ()),
                starts=(0, *(blank + first for first in row["sequence_starts"] or ())),
                alternatives=None if (sets := row["alternatives"]) is None else ((),) * blank + tuple(map(tuple, sets)),
                pictures=images,
                routes=_routes(row["routes"]),
            )
            rollouts.append(rollout)
        groups.append(RolloutGroup(problem, tuple(rollouts), advantages))
    return groups


def best_first(rows: Sequence[int], rewards: Sequence[float | None]) -> list[int]:
    """The rows of a group by the rewards of all rows of its table; those without a reward last."""
    return sorted(rows, key=lambda row: inf if (reward := rewards[row]) is None else -reward)


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
