"""What the model writes: a few completions of every iteration in files, and of every evaluation on the console."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offline_grpo.disk import utf8, write_whole
from offline_grpo.errors import require
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import output_console
from offline_grpo.types import Rollout, RolloutGroup

Advantages = Sequence[Sequence[float | None]]
"""The advantage of each rollout of each group, None without a reward; of one that has an advantage per token, their
mean.
"""

_SHOWN_CHARS = 400


@dataclass(frozen=True)
class Samples(RunListener):
    """Writes `samples/iter_000.jsonl`, ... and, for evaluations, `samples/eval_init.jsonl`,
    `samples/eval_iter_009.jsonl`, ...
    """

    output_dir: Path
    per_iteration: int | str
    on_console: int

    def __post_init__(self) -> None:
        is_known = self.per_iteration == "all" or (isinstance(self.per_iteration, int) and self.per_iteration >= 0)
        require(is_known, "samples.per_iteration", self.per_iteration, "a number, 0 for none, or all")
        require(self.on_console >= 0, "samples.on_console", self.on_console, "must be 0 or more")

    def rollouts(
        self, name: str, groups: Sequence[RolloutGroup], *, advantages: Advantages | None, iteration: int
    ) -> None:
        if self.per_iteration != 0:
            suffix = "init" if iteration == -1 else f"iter_{iteration:03d}"
            path = self.output_dir / "samples" / f"{'eval_' if name == 'eval' else ''}{suffix}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            count = None if self.per_iteration == "all" else int(self.per_iteration)
            records = [sample | {"iteration": iteration} for sample in chosen(groups, advantages, count)]
            lines = (json.dumps(each, ensure_ascii=False, default=str) + "\n" for each in records)
            write_whole(path, utf8("".join(lines)))
        if name == "eval" and self.on_console:
            when = "before training" if iteration == -1 else f"after iteration {iteration + 1}"
            print_samples(output_console(), chosen(groups, advantages, self.on_console), when)


def chosen(groups: Sequence[RolloutGroup], advantages: Advantages | None, count: int | None) -> list[dict[str, Any]]:
    """The best and the worst completion of the first problems, differing rewards first; all if `count` is None."""
    scores = [[rollout.score for rollout in group.rollouts] for group in groups]
    rewards = [[score.reward if score.is_scored else -inf for score in row] for row in scores]
    picks = [(i, j) for i, row in enumerate(rewards) for j in range(len(row))]
    if count is not None:
        order = sorted(range(len(groups)), key=lambda i: max(rewards[i]) == min(rewards[i]))
        ends = [(i, rewards[i].index(end(rewards[i]))) for i in order for end in (max, min)]
        picks = list(dict.fromkeys(ends))[:count]
    return [record(groups[i], groups[i].rollouts[j], advantages[i][j] if advantages else None) for i, j in picks]


def record(group: RolloutGroup, rollout: Rollout, advantage: float | None) -> dict[str, Any]:
    """A completion as a line of JSON. What is unknown is null: without a problem or a reward, or the advantage in
    evaluations.
    """
    problem = group.problem
    return {
        "problem_id": None if problem is None else problem.problem_id,
        "prompt": None if problem is None else [dict(message) for message in problem.messages],
        "answer": None if problem is None else problem.answer,
        "completion": rollout.text,
        "reward": rollout.score.reward if rollout.score.is_scored else None,
        "parts": dict(rollout.score.parts),
        "advantage": advantage,
        "is_correct": rollout.score.is_correct,
        "finish_reason": rollout.finish_reason,
        "num_tokens": rollout.num_sampled,
    }


def prompt_text(sample: Mapping[str, Any]) -> str:
    """The last message of a record's prompt."""
    return sample["prompt"][-1]["content"] if sample["prompt"] else ""


def print_samples(console: Console, samples: Sequence[Mapping[str, Any]], when: str) -> None:
    """Prompt, completion and reward of each record, folded to the console's width."""
    for number, sample in enumerate(samples, start=1):
        verdict = "correct" if sample["is_correct"] else "wrong"
        title = f"sample {number}/{len(samples)} {when} | {verdict} | reward {sample['reward']:.3f}"
        console.print(title, markup=False, highlight=False, emoji=False)
        grid = Table.grid(padding=(0, 2), pad_edge=True)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        texts = {"prompt": prompt_text(sample), "wrote": sample["completion"], "answer": sample["answer"] or ""}
        for label, text in texts.items():
            grid.add_row(label, Text(visible(text)))
        console.print(grid)


def visible(text: str) -> str:
    """A text for one cell of a terminal: its beginning and end, with escapes for what does not print."""
    middle = _SHOWN_CHARS // 2
    short = text if len(text) <= _SHOWN_CHARS else f"{text[:middle]} ... {text[-middle:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)
