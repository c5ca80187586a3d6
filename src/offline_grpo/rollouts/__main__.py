"""`python -m offline_grpo.rollouts show|stats|export PATH`: read the rollouts that a run has recorded."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offline_grpo.disk import require_new, write_whole
from offline_grpo.errors import ConfigError, GrpoError, exit_status, require
from offline_grpo.logger import output_console, print_table
from offline_grpo.logger.samples import print_sample, record, visible
from offline_grpo.rollouts.atropos_groups import NOT_TRAINED
from offline_grpo.rollouts.recorder import write_pictures
from offline_grpo.rollouts.rows import NUMBERS, SCHEMA, best_first, group_rows, plain_rows
from offline_grpo.rollouts.store import ORIGIN_FILE, Shard, shards_of
from offline_grpo.types import Rollout, RolloutGroup


def run(arguments: Sequence[str] | None = None) -> None:
    """Read, and print or write."""
    # 1. What the command takes.
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.rollouts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "show": "what the model saw: best and worst completion of each group; green for advantages above 0, red below",
        "stats": "rewards, lengths, repetitions and how completions ended, by iteration and by length",
        "export": "write them for other tools",
    }
    for name, text in helps.items():
        add = commands.add_parser(name, help=text, description=text).add_argument
        add("path", metavar="PATH", type=Path, help="run folder, file of its rollouts/, or folder that datasets saved")
        if name == "export":
            add("out", metavar="OUT", type=Path, help="file, or folder for datasets, to write; a new one")
            add("--format", choices=("jsonl", "datasets", "atropos"), default="jsonl", help="default: jsonl")
        add("--phase", choices=("train", "eval"), default="train", help="default: train")
        add("--iteration", type=int, metavar="N", help="only that one; 1 is the first, 0 the evaluation before it")
        add("--skip-damaged", action="store_true", help="go on without files that cannot be read")
        if name == "show":
            add("--groups", type=int, default=4, metavar="N", help="of the newest iteration, or of N (default: 4)")
            add("--full", action="store_true", help="whole completions, and every one of a group")
    options = parser.parse_args(arguments)
    # 2. An output that is there already is refused before anything is read.
    number = options.iteration
    if options.command == "export":
        require_new(options.out, f"OUT={options.out}")
        options.out.parent.mkdir(parents=True, exist_ok=True)
    shards = shards_of(options.path, key="PATH", phase=options.phase, iteration=None if number is None else number - 1)
    tables = _tables(shards[::-1] if options.command == "show" else shards, options)
    # 3. `show` needs the newest table alone, so they are read one by one.
    first = next(tables, None)
    if first is None:
        raise ConfigError(f"PATH={options.path}: has no rollouts of phase {options.phase} that were asked for")
    if options.command == "show":
        shard, table = first
        show_groups(output_console(), shard, table, options.groups, full=options.full)
    elif options.command == "stats":
        print_stats(output_console(), (table for _, table in chain([first], tables)))
    else:
        count = export(chain([first], tables), options.out, options.format)
        print(f"wrote {count:,} {'groups' if options.format == 'atropos' else 'completions'} to {options.out}")


def _tables(shards: Sequence[Shard], options: argparse.Namespace) -> Iterator[tuple[Shard, pa.Table]]:
    """The tables that the options choose, without empty ones."""
    for shard in shards:
        try:
            table = shard.table()
        except ConfigError as error:
            if not options.skip_damaged:
                raise ConfigError(f"{error}; --skip-damaged skips this file") from error
            print(f"{error}; left out", file=sys.stderr)
            continue
        chosen = pc.field("phase") == options.phase
        if options.iteration is not None:
            chosen &= pc.field("iteration") == options.iteration - 1
        if (table := table.filter(chosen)).num_rows:
            yield shard, table


_ROWS, _BINS = 20, 5  # of the tables by iteration and by length


def show_groups(console: Console, shard: Shard, table: pa.Table, count: int, *, full: bool) -> None:
    """Print the first `count` groups, those with differing rewards first; `full`: whole and all completions."""
    decode = shard.decode
    rewards, advantages = (table[name].to_pylist() for name in ("reward", "advantage"))
    newest = max(table["iteration"].to_pylist())  # a folder of `datasets` has all
    found = [(key, rows) for key, rows in group_rows(table).items() if key[0] == newest]
    found.sort(key=lambda group: len({rewards[row] for row in group[1]}) == 1)
    for (iteration, phase, number), rows in found[:count]:
        order = best_first(rows, rewards)
        [group] = shard.groups(table, [order])
        pairs = zip(group.rollouts, order, strict=True)
        samples = [record(group, rollout, advantages[row], decode) for rollout, row in pairs]
        name = "" if group.problem is None else f", problem {visible(group.problem.problem_id)}"
        when = "before training" if iteration == -1 else f"iteration {iteration + 1}"
        title = f"{phase}, {when}, group {number + 1}{name}: {len(samples)} completions"
        console.rule(Text(title), align="left", style="dim")
        shown = samples if full or len(samples) == 1 else [samples[0], samples[-1]]
        for place, sample in enumerate(shown):  # a prompt that all share is shown once
            is_other = sample["rendered"][0] != shown[0]["rendered"][0]
            print_sample(console, sample, full=full, has_prompt=place == 0 or is_other)


def print_stats(console: Console, tables: Iterable[pa.Table]) -> None:
    """Totals, and tables by length and by iteration, of tables that have all columns and whole groups."""
    # Columns [R] of all completions; whether the same tokens came before in a group, and whether its rewards differ.
    names = ("iteration", "reward", "is_correct", "finish_reason", "failure")
    columns: dict[str, list] = {name: [] for name in (*names, "length", "repeated")}
    has_signal = []
    for table in tables:
        rows = table.select([*names, "completion_ids", "is_sampled"]).to_pydict()
        repeated = [False] * table.num_rows
        for members in group_rows(table).values():
            seen: set[tuple[int, ...]] = set()
            for row in members:
                tokens = tuple(rows["completion_ids"][row])
                repeated[row] = tokens in seen
                seen.add(tokens)
            has_signal.append(len({rows["reward"][row] for row in members} - {None}) > 1)
        pairs = zip(rows["completion_ids"], rows["is_sampled"], strict=True)
        lengths = [len(tokens) if mask is None else sum(mask) for tokens, mask in pairs]  # of what was sampled
        found = rows | {"length": lengths, "repeated": repeated}
        for name, column in columns.items():
            column.extend(found[name])
    of = {name: np.array(column) for name, column in columns.items()}
    of["reward"] = of["reward"].astype(float)  # None: NaN
    # Totals.
    count, lengths = len(of["reward"]), of["length"]
    reasons = Counter(reason or "unknown" for reason in of["finish_reason"])
    failures = Counter(failure.partition(":")[0] for failure in of["failure"] if failure is not None)
    correlation = "one of them does not vary"
    pair = np.stack([lengths, of["reward"]])[:, ~np.isnan(of["reward"])]
    if pair.size and pair.std(axis=1).all():
        correlation = f"correlation {np.corrcoef(pair)[0, 1]:+.2f}"
    repeated, equal = of["repeated"].mean(), 1 - np.mean(has_signal)
    lines = [
        f"{count:,} completions in {len(has_signal):,} groups, {lengths.sum():,} tokens",
        f"ended: {', '.join(f'{reason} {n / count:.1%}' for reason, n in reasons.most_common())}",
        f"repeated within their group: {repeated:.1%}; groups whose rewards are all equal: {equal:.1%}",
        f"reward against length: {correlation}",
    ]
    if failures:
        lines.append(f"not scored: {', '.join(f'{n:,} {cause}' for cause, n in failures.most_common())}")
    console.print("\n".join(lines), markup=False, highlight=False)
    # Fifths of the completions, from short to long.
    edges = np.unique(np.quantile(lengths, np.linspace(0, 1, _BINS + 1)[1:]).astype(int))
    pairs = zip([int(lengths.min()), *(edges[:-1] + 1)], edges, strict=True)
    bins = [(f"{low} to {high}", (lengths >= low) & (lengths <= high)) for low, high in pairs]
    print_table(console, _stats_table("length", bins, of))
    # Each iteration, or, of many, blocks of them.
    numbers = np.unique(of["iteration"])
    blocks = np.array_split(numbers, min(_ROWS, len(numbers)))
    texts = [str(b[0] + 1) if len(b) == 1 else f"{b[0] + 1} to {b[-1] + 1}" for b in blocks]
    masks = [np.isin(of["iteration"], block) for block in blocks]
    print_table(console, _stats_table("iteration", zip(texts, masks, strict=True), of))


def _stats_table(label: str, parts: Iterable[tuple[str, np.ndarray]], of: dict[str, np.ndarray]) -> Table:
    """Means over each part of the completions: its name, and a mask [R]."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (label, "completions", "reward", "correct", "tokens", "cut off", "repeated"):
        table.add_column(name, justify="left" if name == label else "right")
    for name, mask in parts:
        if mask.any():
            known = of["reward"][mask & ~np.isnan(of["reward"])]
            shown = (of["is_correct"], of["length"], of["finish_reason"] == "length", of["repeated"])
            correct, length, cut, repeated = (values[mask].mean() for values in shown)
            reward = f"{known.mean():.3f}" if len(known) else "-"
            shares = (f"{correct:.1%}", f"{length:.1f}", f"{cut:.1%}", f"{repeated:.1%}")
            table.add_row(name, f"{mask.sum():,}", reward, *shares)
    return table


def export(tables: Iterable[tuple[Shard, pa.Table]], out: Path, kind: str) -> int:
    """Write checked tables of a store for other tools. Returns how many completions, or groups, they had."""
    # 1. A folder for `datasets.load_from_disk`, which `rollouts=replay` reads too: one table, and the origin beside it
    # where all files have the same.
    if kind == "datasets":
        import datasets

        shards, parts = zip(*tables, strict=True)
        pairs = pa.list_(pa.struct([NUMBERS.key_field, NUMBERS.item_field]))  # `datasets` knows no maps
        types = [pairs if field.type == NUMBERS else field.type for field in SCHEMA]
        whole = pa.concat_tables(parts).cast(pa.schema(zip(SCHEMA.names, types, strict=True)))
        datasets.disable_progress_bars()
        datasets.Dataset(whole).save_to_disk(out)
        for shard, table in zip(shards, parts, strict=True):
            names = {name for row in table["images"].to_pylist() for own in row or () for name in own}
            write_pictures(out, map(shard.picture, names))
        origins = [shard.origin for shard in shards]
        if origins[0] is not None and len({None if o is None else (o.tokenizer, o.architecture) for o in origins}) == 1:
            write_whole(out / ORIGIN_FILE, json.dumps(asdict(origins[0])))
        return whole.num_rows
    # 2. A line for each completion, with the columns of the store, where problems and parts are objects; or for each
    # group what has a reward of it.
    lines: Iterable[dict[str, Any]]
    if kind == "jsonl":
        rows = (row for _, table in tables for row in plain_rows(table.drop_columns(["routes"])))
        lines = (row | {"fields": None if row["fields"] is None else from_json(row["fields"])} for row in rows)
    else:
        found = (shard.groups(table, group_rows(table).values()) for shard, table in tables)
        groups = (group.scored() for groups in found for group in groups)
        lines = map(scored_data, filter(None, groups))
    count = 0
    try:
        with out.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                count += 1
    except GrpoError:  # half of them are no export
        out.unlink()
        raise
    return count


def scored_data(group: RolloutGroup) -> dict[str, Any]:
    """What `POST /scored_data` takes (atroposlib's `ScoredData`): masks are -100 or the token, logprobs 1 where nobody
    sampled. It knows no rollouts of several sequences: each is one, with the score of its rollout.
    """
    whole = group.rollouts
    rollouts = [r for r in whole for _ in r.starts]  # of each sequence
    fix = "Atropos' format cannot say which tokens top_p, top_k or min_p left; export jsonl or datasets"
    require(all(r.alternatives is None for r in whole), "--format", "atropos", fix)
    fix = "Atropos' trainers get no pictures; export jsonl or datasets"
    require(not any(r.pictures for r in whole), "--format", "atropos", fix)

    def cut(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
        return [list(row[start:end]) for row, r in zip(rows, whole, strict=True) for start, end in r.bounds]

    def rows(of: Callable[[Rollout], Iterable[Any]], blank: float) -> list[list[float]]:
        return cut([value if s else blank for value, s in zip(of(r), r.is_sampled, strict=True)] for r in whole)

    zeroed = [{"set_advantage_to_zero": True} if r.zero_advantage else {} for r in rollouts]
    found: dict[str, Any] = {
        "tokens": cut(r.token_ids for r in whole),
        "masks": rows(lambda r: r.token_ids, NOT_TRAINED),
        "scores": [r.score.reward for r in rollouts],
        "inference_logprobs": rows(lambda r: r.logprobs, 1.0),
        "overrides": [{"temperature": r.temperature, **zero} for r, zero in zip(rollouts, zeroed, strict=True)],
    }
    # What a source gave beside the rewards, and what a prompt was, only where all rollouts have it.
    if group.advantages is not None:
        found["advantages"] = cut(group.advantages)
    if all(r.ref_logprobs is not None for r in rollouts):
        found["ref_logprobs"] = rows(lambda r: r.ref_logprobs or (), 0.0)
    if all(r.teacher_logprobs is not None and r.temperature == 1.0 for r in rollouts):  # as Atropos' servers give them
        found["distill_token_ids"] = cut([[token] for token in r.token_ids] for r in whole)
        found["distill_logprobs"] = cut([[logprob] for logprob in r.teacher_logprobs or ()] for r in whole)
    if group.problem is not None:
        prompt = [dict(message) for message in group.problem.messages]
        found["messages"] = [[*prompt, {"role": "assistant", "content": r.text}] for r in rollouts]
    return found


if __name__ == "__main__":
    raise SystemExit(exit_status(run))
