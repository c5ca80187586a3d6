"""Recorded rollouts for other tools: lines of JSON, a folder of `datasets`, groups as Atropos' API takes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic_core import from_json

from offline_grpo.disk import write_whole
from offline_grpo.rollouts.atropos.groups import NOT_TRAINED
from offline_grpo.rollouts.store.reader import ORIGIN_FILE, Shard
from offline_grpo.rollouts.store.rows import NUMBERS, SCHEMA, group_rows, groups_of, plain_rows
from offline_grpo.types import Rollout, RolloutGroup

Tables = Iterable[tuple[Shard, pa.Table]]
"""Files of a store, with their checked tables."""
_BLANK = 1.0
"""The logprob that Atropos gives to tokens which nobody sampled."""


def to_json_lines(tables: Tables, out: Path) -> int:
    """A line per completion, with the columns of the store; problems and parts are objects. Returns how many."""

    def lines() -> Iterator[dict[str, Any]]:
        for _, table in tables:
            for row in plain_rows(table):
                yield row | {"fields": None if row["fields"] is None else from_json(row["fields"])}

    return _write_lines(out, lines())


def to_atropos(tables: Tables, out: Path) -> int:
    """A line per group of what has a reward, each a body for `POST /scored_data`. Returns how many."""
    groups = (group.scored() for _, table in tables for group in groups_of(table, group_rows(table).values()))
    return _write_lines(out, map(scored_data, filter(None, groups)))


def to_datasets(tables: Tables, out: Path) -> int:
    """A folder for `datasets.load_from_disk`, which `rollouts=replay` reads too. Returns the number of its rows."""
    import datasets

    # One table; the origin lies beside it, where all files have the same.
    shards, parts = zip(*tables, strict=True)
    pairs = pa.list_(pa.struct([NUMBERS.key_field, NUMBERS.item_field]))  # `datasets` knows no maps
    kinds = [pairs if field.type == NUMBERS else field.type for field in SCHEMA]
    whole = pa.concat_tables(parts).cast(pa.schema(zip(SCHEMA.names, kinds, strict=True)))
    datasets.disable_progress_bars()
    datasets.Dataset(whole).save_to_disk(out)
    origins = [shard.origin for shard in shards]
    if origins[0] is not None and len({None if o is None else (o.tokenizer, o.architecture) for o in origins}) == 1:
        write_whole(out / ORIGIN_FILE, json.dumps(asdict(origins[0])))
    return whole.num_rows


FORMATS = {"jsonl": to_json_lines, "datasets": to_datasets, "atropos": to_atropos}


def scored_data(group: RolloutGroup) -> dict[str, Any]:
    """A group as atroposlib's `ScoredData` has it: masks are -100 or the token, logprobs 1 where nobody sampled."""
    rollouts = group.rollouts

    def rows(of: Callable[[Rollout], Iterable[Any]], blank: float) -> list[list[Any]]:
        return [[value if s else blank for value, s in zip(of(r), r.is_sampled, strict=True)] for r in rollouts]

    zeroed = [{"set_advantage_to_zero": True} if r.zero_advantage else {} for r in rollouts]
    found: dict[str, Any] = {
        "tokens": [list(r.token_ids) for r in rollouts],
        "masks": rows(lambda r: r.token_ids, NOT_TRAINED),
        "scores": [r.score.reward for r in rollouts],
        "inference_logprobs": rows(lambda r: r.logprobs, _BLANK),
        "overrides": [{"temperature": r.temperature, **zero} for r, zero in zip(rollouts, zeroed, strict=True)],
    }
    # What a source gave beside the rewards, and what a prompt was, only where all rollouts have it.
    if group.advantages is not None:
        found["advantages"] = [list(row) for row in group.advantages]
    if all(r.ref_logprobs is not None for r in rollouts):
        found["ref_logprobs"] = rows(lambda r: r.ref_logprobs or (), 0.0)
    if all(r.teacher_logprobs is not None and r.temperature == 1.0 for r in rollouts):  # as Atropos' servers give them
        found["distill_token_ids"] = [[[token] for token in r.token_ids] for r in rollouts]
        found["distill_logprobs"] = [[[logprob] for logprob in r.teacher_logprobs or ()] for r in rollouts]
    if group.problem is not None:
        prompt = [dict(message) for message in group.problem.messages]
        found["messages"] = [[*prompt, {"role": "assistant", "content": r.text}] for r in rollouts]
    return found


def _write_lines(out: Path, lines: Iterable[dict[str, Any]]) -> int:
    count = 0
    with out.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            count += 1
    return count
