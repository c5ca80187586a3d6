"""`python -m offline_grpo.score [GROUP=OPTION] [KEY=VALUE]... TEXT`: the reward of a completion, without a model (in
Python: `scores`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from math import nan
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from offline_grpo.commands import cli
from offline_grpo.config import compose as conf
from offline_grpo.config.problems import build_task, isolated
from offline_grpo.errors import ConfigError, ScoreError, require
from offline_grpo.generation.judging import Judgement
from offline_grpo.interfaces import Task
from offline_grpo.logger.samples import visible
from offline_grpo.settings import RunConfig
from offline_grpo.task.rows import Row, field, file_rows
from offline_grpo.types import Problem, Score, Split

ROW = "number of the problem, from 0: the row of a data set, or else the training problem (default: 0)"
EPILOG = "The last line is the reward alone, of a file their mean, or nan. If one has none, the exit code is 1."


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.score", description=__doc__, epilog=EPILOG)
    about = "settings as of a run, and at last the completion, behind -- if it begins with -; - reads it from stdin"
    parser.add_argument("words", metavar="KEY=VALUE|TEXT", nargs="*", help=about)
    about = 'in place of TEXT: rows with "completion", and with "row" where that is not N'
    parser.add_argument("--file", type=Path, help=about)
    parser.add_argument("--row", type=int, default=0, metavar="N", help=ROW)
    options = parser.parse_intermixed_args(arguments)
    words: list[str] = options.words

    # The completions of each problem, by their places.
    asked: dict[int, dict[str, str]] = {}
    if options.file is None:
        # Where the last word is a setting, the text was forgotten.
        last = words[-1] if words else ""
        known = {each.name for each in fields(RunConfig)} | {"experiment", "mode", "hydra"}
        is_setting = "=" in last and re.split(r"[./]", conf.key_of(last))[0] in known
        fix = "the last word must be the completion; - reads one from stdin, also one that looks like a setting"
        require(bool(words) and not is_setting, "TEXT", last, fix)
        text = sys.stdin.buffer.read().decode(errors="replace") if words.pop() == "-" else last
        asked[options.row] = {"the completion": text}
    else:
        require(options.file.is_file(), "--file", options.file, "is no file")
        for index, (where, value) in enumerate(file_rows(options.file, "--file")):
            text = field(Row(where, index, value), "completion", "--file")
            number = value.get("row", None if "problem_id" in value else options.row)  # samples of a run have others
            if not isinstance(text, str) or type(number) is not int:
                raise ConfigError(f"{where} must have a text as completion, and as row the number of a problem")
            asked.setdefault(number, {})[f"line {index + 1}"] = text

    # Those of one problem are a group, which functions that reward groups see whole.
    found: list[Score] = []
    with trial(words) as (_, task, problems):
        for problem, texts in [(chosen(problems, row), texts) for row, texts in asked.items()]:
            own = Judgement(task, problem, [*texts.values()]).scores()
            for place, score in zip(texts, own, strict=True):
                show(f"{place}, {problem.problem_id}", problem, score)
            found += own
    rewards = [score.reward for score in found if score.is_scored]
    print(f"{fmean(rewards) if rewards else nan:.10g}", flush=True)
    if len(rewards) < max(len(found), 1):
        raise ScoreError(f"{len(found) - len(rewards)} of {len(found)} completions have no reward")


def scores(words: Sequence[str], texts: Sequence[str], row: int = 0) -> list[Score]:
    """What a run with these overrides gives each text for, as completions of one problem: see `trial`."""
    with trial(words) as (_, task, problems):
        return Judgement(task, chosen(problems, row), texts).scores()


@contextmanager
def trial(words: Sequence[str]) -> Iterator[tuple[RunConfig, Task, Sequence[Problem]]]:
    """The settings of a run with these overrides, its task, scored and played as in the run, and its problems: of a
    data set all rows, also those that are held out; else those of training. In the end, what the task's code has
    printed is shown.
    """
    conf.register()
    config = conf.typed(conf.composed(conf.readable(words)))
    task = build_task(config.task)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        log = Path(folder, "scoring.log")
        # once its processes have ended
        stack.callback(lambda: log.exists() and sys.stderr.write(log.read_text(errors="replace")))
        all_rows: Sequence[Problem] | None = getattr(task, "all_rows", None)
        yield config, isolated(task, config, Path(folder), stack), all_rows or task.problems(Split.TRAIN)


def chosen(problems: Sequence[Problem], row: int) -> Problem:
    fix = f"the task has {len(problems)} problems, 0 to {len(problems) - 1}"
    require(0 <= row < len(problems), "--row", row, fix)
    return problems[row]


def show(about: str, problem: Problem, score: Score) -> None:
    """Print a score: its parts, the reward, and what else was measured."""
    print(visible(f"{about}, answer {problem.answer}" if problem.answer else about))
    for name, value in score.parts.items():
        print(f"  {visible(name):<22} {value:>10.6g}")
    total = f"{'total':<22} {score.reward:>10.6g}, which counts as {'right' if score.is_correct else 'wrong'}"
    print(f"  {total if score.is_scored else visible(f'no reward: {score.failure}', full=True)}")
    for name, value in score.measured.items():
        print(f"  {visible(name):<22} {value:>10.6g}")


if __name__ == "__main__":
    cli.run_command(run)
