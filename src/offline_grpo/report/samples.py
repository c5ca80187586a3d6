"""What is read of a run's recorded completions: samples through training, and which held-out problems were solved."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offline_grpo.errors import ConfigError
from offline_grpo.report.history import History, by_number

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from offline_grpo.report.runs import Configuration, Run
    from offline_grpo.rollouts.store.reader import Shard

MAX_SAMPLES, MAX_CHARS, MAX_TOKENS = 300, 4000, 600
MAX_EVALUATIONS, MAX_PROBLEMS = 100, 200
SEPARATOR = "\0"
Solved = Mapping[str, Counter[bool]]
"""Held-out problem (id, SEPARATOR, a hash of what it asks) -> how many of its answers are right, and wrong."""
FACTS = ("problem_id", "answer", "reward", "is_correct", "advantage", "finish_reason")


def samples_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The best and the worst completion of some groups of some iterations, evenly over the runs and their length."""
    budget = max(MAX_SAMPLES // len(runs), 4)
    return [{"run": run.name} | sample for run in runs for sample in _of_run(run.history.run_dir, budget)]


def _of_run(folder: Path, budget: int) -> Iterator[dict[str, Any]]:
    """From the store, or from `samples/` where there is none."""
    num_groups = 4 if budget >= 100 else 1
    if shards := _shards_of(folder, "train"):
        for shard in _evenly(shards, budget // (2 * num_groups)):
            yield from _of_shard(shard, num_groups)
        return
    files = sorted(folder.glob("samples/iter_*.jsonl"), key=lambda path: by_number(path.name))
    for path in _evenly(files, budget // 4):
        with path.open(encoding="utf-8") as file:  # `str.splitlines` would end lines inside a text too, at U+2028
            for line in map(json.loads, islice(file, 4)):
                pieces = [(line["completion"], line["advantage"])]
                yield _sample(line, line["prompt"] or [], line["num_tokens"], pieces)


def highest_reward(folder: Path) -> float | None:
    """Of all recorded completions of training; None where nothing is on record."""
    shards = _shards_of(folder, "train")
    return max((float(max(shard.table(["reward"])["reward"].to_pylist())) for shard in shards), default=None)


def _shards_of(folder: Path, phase: str) -> list[Shard]:
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
    row: Mapping[str, Any], messages: Sequence[Mapping[str, str]], num_tokens: int, pieces: Sequence[Any]
) -> dict[str, Any]:
    return {name: row[name] for name in FACTS} | {
        "iteration": int(row["iteration"]) + 1,
        "prompt": _shortened("\n".join(str(message.get("content")) for message in messages)),
        "num_tokens": num_tokens,
        "pieces": [[_shortened(text), advantage] for text, advantage in pieces],
    }


def _pieces(row: Mapping[str, Any], model: str | None) -> list[tuple[str, float | None]]:
    """The completion in stretches of tokens with the same advantage; None for those that the model did not write."""
    advantages, is_sampled, ids = row["advantages"], row["is_sampled"], row["completion_ids"]
    is_whole = advantages is None and is_sampled is None
    tokenizer = None if model is None or is_whole else _tokenizer_of(model)
    if tokenizer is None:
        return [(row["text"], row["advantage"])]
    of_tokens = advantages or [row["advantage"]] * len(ids), is_sampled or [True] * len(ids)
    each = zip(_texts(tokenizer, ids), *of_tokens, strict=True)
    tokens = [(text, advantage if sampled else None) for text, advantage, sampled in islice(each, MAX_TOKENS) if text]
    stretches = [
        ("".join(text for text, _ in part), advantage)
        for advantage, part in groupby(tokens, key=lambda token: token[1])
    ]
    return stretches + ([(f" … {len(ids) - MAX_TOKENS:,} more tokens", None)] if len(ids) > MAX_TOKENS else [])


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """The text of each token; a character of several tokens comes with the last of them, and the others are empty."""
    before, start = 0, 0  # tokens in between are decoded again: how a token reads depends on the one before
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[before:end], skip_special_tokens=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            yield ""
            continue
        yield text[len(tokenizer.decode(ids[before:start], skip_special_tokens=False)) :]
        before, start = start, end


@cache
def _tokenizer_of(model: str) -> Tokenizer | None:
    """The model's tokenizer, if this machine has it; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    found: object = Path(model) / "tokenizer.json"
    if not Path(model).is_dir() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        found = try_to_load_from_cache(model, "tokenizer.json")
    return Tokenizer.from_file(str(found)) if isinstance(found, (str, Path)) and Path(found).is_file() else None


def _shortened(text: str) -> str:
    half, left_out = MAX_CHARS // 2, len(text) - MAX_CHARS
    return text if left_out <= 0 else f"{text[:half]} … {left_out:,} letters left out … {text[-half:]}"


def solved_over_time(run: Run) -> dict[str, Any] | None:
    """How often each held-out problem was solved in each evaluation on record; None without two evaluations."""
    shards = _evenly(_shards_of(run.history.run_dir, "eval"), MAX_EVALUATIONS)
    return _heat_map([str(_completed(shard) or "before") for shard in shards], [_solved(shard) for shard in shards])


def solved_by_configuration(
    names: Sequence[str], groups: Sequence[Configuration], known: Mapping[str, Solved]
) -> dict[str, Any] | None:
    """The same of the last evaluation for each configuration, over its seeds; None without two configurations.

    Args:
        known: run -> what it solved at the end.
    """
    tables: dict[str, dict[str, Counter[bool]]] = {}
    for name, group in zip(names, groups, strict=True):
        for run in group.counted:
            for problem, count in known.get(run.name, {}).items():
                tables.setdefault(name, {}).setdefault(problem, Counter()).update(count)
    return _heat_map(list(tables), list(tables.values()))


def _heat_map(columns: Sequence[str], tables: Sequence[Solved]) -> dict[str, Any] | None:
    """`share` is [problems][columns], None where a problem was not asked; of many problems some, the hardest first."""
    if len(tables) < 2:
        return None
    shares = [{problem: count[True] / count.total() for problem, count in table.items()} for table in tables]
    rows = {problem: [table.get(problem) for table in shares] for problem in {p: 0 for table in tables for p in table}}
    hardest = sorted(rows, key=lambda problem: (sum(share or 0.0 for share in rows[problem]), problem))
    shown = _evenly(hardest, MAX_PROBLEMS)
    names = [_shortened(each.partition(SEPARATOR)[0])[:60] for each in shown]
    return {"columns": columns, "problems": names, "share": [rows[each] for each in shown]}


def solved(history: History) -> Solved:
    """What was solved in the evaluation that the last pass@1 is of; nothing where the store does not have it."""
    steps = history.series("eval", "pass@1").steps
    return next(
        (_solved(shard) for shard in _shards_of(history.run_dir, "eval") if _completed(shard) in steps[-1:]), {}
    )


def _completed(shard: Shard) -> int:
    """Iterations before this evaluation."""
    return (shard.iteration or 0) + 1


def _solved(shard: Shard) -> Solved:
    """Problems are told apart by what they ask, too: in two runs of a sweep, `eval-7` may be two problems."""
    table = shard.table(["problem_id", "messages", "answer", "is_correct"])
    found: dict[str, Counter[bool]] = {}
    names: dict[Any, str] = {}
    for *asked, is_correct in zip(*(table[name].to_pylist() for name in table.column_names), strict=True):
        if tuple(asked) not in names:
            content = repr(tuple(asked[1:])).encode(errors="surrogatepass")
            names[tuple(asked)] = f"{asked[0]}{SEPARATOR}{hashlib.sha256(content).hexdigest()}"
        found.setdefault(names[tuple(asked)], Counter())[is_correct] += 1
    return found
