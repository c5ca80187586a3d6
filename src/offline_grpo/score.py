"""`python -m offline_grpo.score [GROUP=OPTION] [KEY=VALUE]... TEXT`: the reward of a completion, without a model (in
Python: `scores`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from math import nan
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from textwrap import wrap

from offline_grpo.commands import cli
from offline_grpo.config import compose as conf
from offline_grpo.config.problems import build_task, isolated
from offline_grpo.errors import ConfigError, ScoreError, require
from offline_grpo.generation.judging import Judgement
from offline_grpo.interfaces import Task, TaskFacts
from offline_grpo.logger.samples import visible
from offline_grpo.settings import RunConfig
from offline_grpo.task.rows import RowTask
from offline_grpo.types import Problem, Score, Split

ROW = "number of the problem, from 0: the row of a data set, or else the training problem (default: 0)"
LINE = '{"completion": TEXT}, with "row": NUMBER where that is not N'
EPILOG = "The last line is the reward alone, of a file their mean, or nan. If one has none, the exit code is 1."
PRINTED_CHARS = 4000  # of what the code that scores prints, its end is shown


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.score", description=__doc__, epilog=EPILOG)
    about = "settings as of a run, and at last the completion, behind -- if it begins with -; - reads it from stdin"
    parser.add_argument("words", metavar="KEY=VALUE|TEXT", nargs="*", help=about)
    parser.add_argument("--file", type=Path, help=f"in place of TEXT, on each line {LINE}")
    parser.add_argument("--row", type=int, default=0, metavar="N", help=ROW)
    options = parser.parse_intermixed_args(arguments)

    # The completions of each problem, by their places. Where the last word is a setting, the text was forgotten.
    words: list[str] = options.words
    if options.file is None:
        last = words[-1] if words else ""
        root = conf.key_of(last).replace("/", ".").split(".")[0] if "=" in last else ""
        is_setting = root in {each.name for each in fields(RunConfig)} | {"experiment", "mode", "hydra"}
        fix = "the last word must be the completion; - reads one from stdin, also one that looks like a setting"
        require(bool(words) and not is_setting, "TEXT", last, fix)
        text = words.pop()
        text = sys.stdin.buffer.read().decode(errors="replace") if text == "-" else text
        asked, faults = {options.row: {"the completion": text}}, []
    else:
        asked, faults = read(options.file, options.row)

    # Those of one problem are a group, which functions that reward groups see whole. A line that is wrong costs itself.
    config, task = configured(words, in_turns=False)
    num_rows, rewards = len(problems_of(task)), list[float]()
    with judging(config, task) as judged:
        for row, texts in asked.items():
            if options.file is not None and not 0 <= row < num_rows:
                faults += [f"{place} asks for row {row} of {num_rows}" for place in texts]
                continue
            problem = problem_of(task, row)
            for place, score in zip(texts, Judgement(judged, problem, [*texts.values()]).scores(), strict=True):
                print(*shown(f"{place}, {problem.problem_id}", task, problem, score), sep="\n")
                rewards += [score.reward] if score.is_scored else []
    print(f"{fmean(rewards) if rewards else nan:.10g}", flush=True)
    about = f"{len(faults)} lines were not scored, such as {next(iter(faults), '')}"
    require(not faults, "--file", options.file, about)
    num_asked = sum(map(len, asked.values()))
    if len(rewards) < max(num_asked, 1):
        raise ScoreError(f"{num_asked - len(rewards)} of {num_asked} completions have no reward")


def read(file: Path, row: int) -> tuple[dict[int, dict[str, str]], list[str]]:
    """Completions by the number of their problem, and by line; and which lines have none."""
    asked: dict[int, dict[str, str]] = {}
    faults = []
    try:
        lines = file.read_bytes().decode("utf-8-sig", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError("--file", file, f"cannot be read ({error.strerror})") from error
    for place, line in ((f"line {number}", line) for number, line in enumerate(lines, 1) if line.strip()):
        try:
            value = json.loads(line)
            own = value["row"] if "problem_id" in value else value.get("row", row)  # as samples of a run have it
            if type(own) is not int:
                raise ValueError
            asked.setdefault(own, {})[place] = value["completion"].encode(errors="replace").decode()
        except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
            faults.append(f"{place}, which is not {LINE}")
    return asked, faults


def scores(words: Sequence[str], texts: Sequence[str], row: int = 0) -> list[Score]:
    """What a run with these overrides gives each text for, as completions of one problem: see `problem_of`."""
    config, task = configured(words, in_turns=False)
    with judging(config, task) as judged:
        return Judgement(judged, problem_of(task, row), texts).scores()


def configured(words: Sequence[str], *, in_turns: bool) -> tuple[RunConfig, Task]:
    """The settings of a run with these overrides, and its task. Raises ConfigError for one that is played in turns,
    unless `in_turns`.
    """
    conf.register()
    config = conf.typed(conf.composed(conf.readable(words)))
    task = build_task(config.task)
    if TaskFacts.of(task).plays and not in_turns:
        fix = "is played in turns, and a text alone has no score; use python -m offline_grpo.play --typed"
        raise ConfigError("task", type(task).__name__.lower(), fix)
    return config, task


def problems_of(task: Task) -> Sequence[Problem]:
    """Of a data set all rows, also those that are held out; else the training problems."""
    return task.all_rows if isinstance(task, RowTask) else task.problems(Split.TRAIN)


def problem_of(task: Task, row: int) -> Problem:
    """The one of `problems_of` with this number, from 0. Raises ConfigError where there is none."""
    found = problems_of(task)
    require(0 <= row < len(found), "--row", row, f"the task has {len(found)} problems, 0 to {len(found) - 1}")
    return found[row]


@contextmanager
def judging(config: RunConfig, task: Task) -> Iterator[Task]:
    """The task, scored and played as in a run. What its code has printed is shown in the end."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        log = Path(folder, "scoring.log")
        # once its processes have ended
        stack.callback(lambda: log.exists() and sys.stderr.write(log.read_text(errors="replace")[-PRINTED_CHARS:]))
        yield isolated(task, config, Path(folder), stack)


def shown(about: str, task: Task, problem: Problem, score: Score) -> Iterator[str]:
    """Lines about a score: its parts, with their weights where those are settings, and the reward."""
    yield visible(f"{about}, answer {problem.answer}" if problem.answer else about)
    own = getattr(task, "tasks", {}).get(problem.task, task)
    weights = {each.name: each.weight for own in getattr(own, "rewards", {}).values() for each in own.functions}
    for name, value in score.parts.items():
        weight = weights.get(name.partition("/")[0]) or getattr(own, f"{name}_weight", None) or 1.0
        product = "" if weight == 1.0 else f" = {weight:g} x {value / weight:g}"
        yield f"  {visible(name):<22} {value:>10.6g}{product}"
    verdict = f"{'total':<22} {score.reward:>10.6g}, which counts as {'right' if score.is_correct else 'wrong'}"
    yield f"  {verdict if score.is_scored else visible(f'no reward: {score.failure}', full=True)}"
    measured = ", ".join(f"{visible(name)} {value:g}" for name, value in score.measured.items())
    yield from wrap(measured, 80, initial_indent="  ", subsequent_indent="  ")


if __name__ == "__main__":
    cli.run_command(run)
