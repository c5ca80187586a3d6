"""What is read of a run's recorded completions: samples through training, and which held-out problems were solved."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from offline_grpo.errors import ConfigError
from offline_grpo.logger.samples import record
from offline_grpo.report.runs import Run
from offline_grpo.types import Picture

if TYPE_CHECKING:
    from offline_grpo.rollouts.store import Shard

T = TypeVar("T")
MAX_SAMPLES, MAX_CHARS, MIN_CHARS = 300, 8000, 400
MAX_EVALUATIONS, MAX_PROBLEMS = 100, 200
FACTS = ("problem_id", "answer", "reward", "is_correct", "advantage", "finish_reason", "num_tokens")


@dataclass(frozen=True, slots=True)
class Tried:
    """A held-out problem: how many of its answers are right. Its id is a name alone: another task numbers it anew."""

    problem_id: str
    num_right: int = 0
    num: int = 0

    @property
    def share(self) -> float:
        return self.num_right / self.num


Solved = Mapping[tuple[str, ...], Tried]
"""Held-out problems by what is asked: messages, answer, and the rest of the row."""


def samples_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The best and the worst completion of some groups of some iterations, evenly over the runs and their length."""
    from offline_grpo.rollouts.rows import best_first, group_rows  # pyarrow

    budget = max(MAX_SAMPLES // len(runs), 4)
    num_groups = 4 if budget >= 100 else 1
    found = []
    for run in runs:
        shards = _evenly(_shards_of(run.folder, "train"), budget // (2 * num_groups))
        decode = shards[0].decode if shards else None  # of a large tokenizer, which takes a second
        for shard in shards:
            table = shard.table()
            rewards, advantages = (table[name].to_pylist() for name in ("reward", "advantage"))
            for members in _evenly(list(group_rows(table).values()), num_groups):
                # Both ends of the group.
                order = best_first(members, rewards)
                rows = list(dict.fromkeys((order[0], order[-1])))
                [group] = shard.groups(table, [rows])
                for rollout, row in zip(group.rollouts, rows, strict=True):
                    sample = record(group, rollout, advantages[row], decode)
                    # The many texts of a long episode are together as long as a few.
                    longest = max(MAX_CHARS // len(sample["rendered"]), MIN_CHARS)
                    about = {
                        "run": run.name,
                        "iteration": table["iteration"][row].as_py() + 1,
                        "images": [_small(shard.picture(name)) for name in sample["images"]],
                        "rendered": [(who, _ends(text, longest)) for who, text in sample["rendered"]],
                    }
                    found.append({name: sample[name] for name in FACTS} | about)
    return found


def _ends(text: str, longest: int) -> str:
    """The two ends of a text that is longer."""
    half, left_out = longest // 2, len(text) - longest
    return text if left_out <= 0 else f"{text[:half]} … {left_out:,} letters left out … {text[-half:]}"


def _small(picture: Picture) -> str:
    """The picture for a page, as a URL of its own, with at most 200 pixels in each direction."""
    from PIL import Image

    image, file = Image.open(BytesIO(picture.data)).convert("RGB"), BytesIO()
    image.thumbnail((200, 200))
    image.save(file, "WEBP", quality=85)
    return f"data:image/webp;base64,{b64encode(file.getvalue()).decode()}"


def highest_reward(folder: Path) -> float | None:
    """Of all recorded completions of training; None where nothing is on record."""
    shards = _shards_of(folder, "train")
    rewards = (reward for shard in shards for reward in shard.table(["reward"])["reward"].to_pylist())
    return max((float(reward) for reward in rewards if reward is not None), default=None)


def _shards_of(folder: Path, phase: str) -> list[Shard]:
    from offline_grpo.rollouts.store import shards_of  # pyarrow

    try:
        return shards_of(folder / "rollouts", key="RUN", phase=phase)
    except ConfigError:  # nothing is on record
        return []


def _evenly(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of them, the first and the last included."""
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int))]


def solved_over_time(run: Run) -> dict[str, Any] | None:
    """How often each held-out problem was solved in each evaluation on record; None without two evaluations."""
    shards = _evenly(_shards_of(run.folder, "eval"), MAX_EVALUATIONS)
    names = ["before" if shard.iteration == -1 else str((shard.iteration or 0) + 1) for shard in shards]
    return heat_map(names, [_solved(shard) for shard in shards])


def heat_map(columns: Sequence[str], tables: Sequence[Solved]) -> dict[str, Any] | None:
    """`share` is [problems][columns], None where a problem was not asked; of many problems some, the hardest first.
    Nothing without two columns.
    """
    if len(tables) < 2:
        return None
    names = {problem: tried.problem_id for table in reversed(tables) for problem, tried in table.items()}
    rows = {problem: [table[problem].share if problem in table else None for table in tables] for problem in names}
    hardest = sorted(rows, key=lambda problem: (sum(share or 0.0 for share in rows[problem]), names[problem]))
    shown = _evenly(hardest, MAX_PROBLEMS)
    return {
        "columns": columns,
        "problems": [names[each][:60] for each in shown],
        "share": [rows[each] for each in shown],
    }


def summed(tables: Sequence[Solved]) -> Solved:
    """What several runs solved together."""
    found: dict[tuple[str, ...], Tried] = {}
    for table in tables:
        for problem, new in table.items():
            old = found.get(problem, Tried(new.problem_id))
            found[problem] = Tried(old.problem_id, old.num_right + new.num_right, old.num + new.num)
    return found


def solved(run: Run) -> Solved:
    """What was solved in the evaluation that the last pass@1 is of; nothing where the store does not have it."""
    steps = run.series("eval/pass@1").steps
    shards = (shard for shard in _shards_of(run.folder, "eval") if (shard.iteration or 0) + 1 in steps[-1:])
    return next(map(_solved, shards), {})


def _solved(shard: Shard) -> Solved:
    names = ["problem_id", "is_correct", "messages", "answer", "fields", "images"]
    table = shard.table(names)
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return summed([{tuple(map(str, asked)): Tried(str(name or ""), right, 1)} for name, right, *asked in rows])
