"""What a page shows of the rollout stores: completions through training, and how often each held-out problem was
solved.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offline_grpo.errors import ConfigError
from offline_grpo.report.history import History, by_number

if TYPE_CHECKING:
    from offline_grpo.report.configurations import Configuration
    from offline_grpo.rollouts.store.reader import Shard

MAX_SAMPLES, MAX_CHARS, MAX_TOKENS = 300, 4000, 600
MAX_EVALUATIONS, MAX_PROBLEMS = 100, 200
SEPARATOR = "\0"
Solved = Mapping[str, Counter[bool]]
"""Held-out problem (id, SEPARATOR, what it asks as a hash) -> how many of its answers are right, and wrong."""
FACTS = ("iteration", "problem_id", "answer", "reward", "is_correct", "advantage", "finish_reason")


def samples_of(folders: Mapping[str, Path], damaged: list[str]) -> list[dict[str, Any]]:
    """The best and the worst completion of some groups of some iterations, evenly over the runs and their length."""
    budget = max(MAX_SAMPLES // len(folders), 4)
    return [{"run": run} | sample for run, folder in folders.items() for sample in _of_run(folder, budget, damaged)]


def _of_run(folder: Path, budget: int, damaged: list[str]) -> Iterator[dict[str, Any]]:
    """From the store, or from `samples/` where there is none."""
    num_groups = 4 if budget >= 100 else 1
    if shards := _shards(folder, "train"):
        for shard in _evenly(shards, budget // (2 * num_groups)):
            try:
                yield from _of_shard(shard, num_groups)
            except ConfigError as error:
                damaged.append(str(error))
        return
    for path in _evenly(
        sorted(folder.glob("samples/iter_*.jsonl"), key=lambda path: by_number(path.name)), budget // 4
    ):
        try:
            with path.open(encoding="utf-8") as file:  # `str.splitlines` would end lines inside a text too, at U+2028
                for line in map(json.loads, islice(file, 4)):
                    yield _sample(
                        line, line["prompt"] or [], line["num_tokens"], [(line["completion"], line["advantage"])]
                    )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            damaged.append(f"{path}: cannot be read ({error!r:.80})")


def _shards(folder: Path, phase: str) -> list[Shard]:
    from offline_grpo.rollouts.store.reader import shards_of  # pyarrow

    try:
        return shards_of(folder / "rollouts", key="RUN", phase=phase)
    except ConfigError:  # nothing is on record
        return []


def _evenly(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, the first and the last included."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int))]


def _of_shard(shard: Shard, num_groups: int) -> Iterator[dict[str, Any]]:
    from offline_grpo.rollouts.store.rows import group_rows

    table = shard.table()
    rewards, rows = table["reward"].to_numpy(), []
    for members in _evenly(list(group_rows(table).values()), num_groups):
        order = sorted(members, key=lambda row: -rewards[row])
        rows += dict.fromkeys((order[0], order[-1]))
    model = None if shard.origin is None else shard.origin.model
    for row in table.take(rows).to_pylist():
        yield _sample(row, json.loads(row["messages"] or "[]"), len(row["completion_ids"]), _pieces(row, model))


def _sample(
    row: Mapping[str, Any], messages: Sequence[Mapping[str, str]], num_tokens: int, pieces: list[Any]
) -> dict[str, Any]:
    prompt = _shortened("\n".join(str(message.get("content")) for message in messages))
    shown = [[_shortened(text), advantage] for text, advantage in pieces]
    iteration = int(row["iteration"]) + 1
    return {name: row[name] for name in FACTS} | {
        "iteration": iteration,
        "prompt": prompt,
        "num_tokens": num_tokens,
        "pieces": shown,
    }


def _pieces(row: Mapping[str, Any], model: str | None) -> list[tuple[str, float | None]]:
    """The completion in stretches of tokens with the same advantage; None for those that the model did not write."""
    advantages, is_sampled, ids = row["advantages"], row["is_sampled"], row["completion_ids"]
    if model is None or (advantages is None and is_sampled is None):
        return [(row["text"], row["advantage"])]
    from offline_grpo.rollouts.store.show import pieces, tokenizer_of

    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        return [(row["text"], row["advantage"])]
    each = zip(
        pieces(tokenizer, ids),
        advantages or [row["advantage"]] * len(ids),
        is_sampled or [True] * len(ids),
        strict=True,
    )
    tokens = [(text, advantage if sampled else None) for text, advantage, sampled in islice(each, MAX_TOKENS) if text]
    stretches = [
        ("".join(text for text, _ in part), advantage)
        for advantage, part in groupby(tokens, key=lambda token: token[1])
    ]
    return stretches + ([(f" … {len(ids) - MAX_TOKENS:,} more tokens", None)] if len(ids) > MAX_TOKENS else [])


def _shortened(text: str) -> str:
    half = MAX_CHARS // 2
    return (
        text
        if len(text) <= MAX_CHARS
        else f"{text[:half]} … {len(text) - MAX_CHARS:,} letters left out … {text[-half:]}"
    )


def solved_over_time(folder: Path, damaged: list[str]) -> dict[str, Any] | None:
    """How often each held-out problem was solved in each evaluation on record; None without two evaluations."""
    names, tables = [], []
    for shard in _evenly(_shards(folder, "eval"), MAX_EVALUATIONS):
        if counts := _solved(shard, damaged):
            names.append(str(_completed(shard)) if _completed(shard) else "before")
            tables.append(counts)
    return _heat_map(names, tables)


def solved_by_configuration(
    groups: Sequence[tuple[str, Configuration]], known: Mapping[str, Solved]
) -> dict[str, Any] | None:
    """The same of the last evaluation for each configuration, over its seeds; None without two configurations.

    Args:
        known: run -> what it solved at the end.
    """
    tables: dict[str, dict[str, Counter[bool]]] = {}
    for name, group in groups:
        for run in group.counted:
            for problem, count in known.get(run.name, {}).items():
                tables.setdefault(name, {}).setdefault(problem, Counter()).update(count)
    return _heat_map(list(tables), list(tables.values()))


def _heat_map(columns: Sequence[str], tables: Sequence[Solved]) -> dict[str, Any] | None:
    """`share` is [problems][columns], None where a problem was not asked. Of many problems some, evenly over all when
    they are in the order of their mean, the hardest first.
    """
    if len(tables) < 2:
        return None
    shares = [{problem: count[True] / count.total() for problem, count in table.items()} for table in tables]
    asked = dict.fromkeys(problem for table in tables for problem in table)
    rows = {problem: [table.get(problem) for table in shares] for problem in asked}
    hardest = sorted(rows, key=lambda problem: (sum(share or 0.0 for share in rows[problem]), problem))
    shown = _evenly(hardest, MAX_PROBLEMS)
    return {
        "columns": columns,
        "problems": [_shortened(each.partition(SEPARATOR)[0])[:60] for each in shown],
        "share": [rows[each] for each in shown],
    }


def solved(history: History, damaged: list[str]) -> Solved:
    """What was solved in the evaluation that the last pass@1 on record is of; nothing where the store does not have it."""
    steps = history.series("eval", "pass@1").steps
    shards = [shard for shard in _shards(history.run_dir, "eval") if _completed(shard) in steps[-1:]]
    return next((_solved(shard, damaged) for shard in shards), {})


def _completed(shard: Shard) -> int:
    """Iterations before this evaluation."""
    return 0 if "init" in shard.path.stem else int(shard.path.stem.rpartition("_")[2]) + 1


def _solved(shard: Shard, damaged: list[str]) -> Solved:
    """Problems are told apart by what they ask, too: in two runs of a sweep, `eval-7` may be two problems."""
    found: dict[str, Counter[bool]] = {}
    try:
        table = shard.table(["problem_id", "messages", "answer", "is_correct"])
    except ConfigError as error:
        damaged.append(str(error))
        return found
    messages = table["messages"].combine_chunks().dictionary_encode()  # one text for all of a group
    texts = messages.dictionary.to_pylist()
    columns = (table["problem_id"], messages.indices, table["answer"], table["is_correct"])
    names: dict[Any, str] = {}
    for *asked, is_correct in zip(*(column.to_pylist() for column in columns), strict=True):
        if tuple(asked) not in names:
            problem, text, answer = asked
            content = repr((None if text is None else texts[text], answer))
            names[tuple(asked)] = (
                f"{problem}{SEPARATOR}{hashlib.sha256(content.encode(errors='surrogatepass')).hexdigest()}"
            )
        found.setdefault(names[tuple(asked)], Counter())[is_correct] += 1
    return found
