"""Problems whose answer is a program, which is run on tests in a sandbox."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent
from typing import Annotated, ClassVar

from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.installed import install_command
from offline_grpo.sandbox import ENVIRONMENT, Limits, check, run
from offline_grpo.settings import Range, at_least
from offline_grpo.task.code_problems import MOST_STEPS, draw
from offline_grpo.task.problems import FormatWeight, asked
from offline_grpo.task.rows import Row, RowTask, field, shown, text_field
from offline_grpo.types import Message, Problem, Score, Split

Pairs = Sequence[Mapping[str, str]]
DIFFICULTY = Range(f"must be from 1 to {MOST_STEPS}", lambda count: 1 <= count <= MOST_STEPS)
PYTEST = re.compile(r"^(?:async )?(?:def test_|class \w*Test|class \w+\(.*TestCase)", re.MULTILINE)
CALLS = Path(__file__).with_name("code_calls.py")
BLOCK = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Code(RowTask):
    """Rows with a prompt and tests; or, without a `path`, problems that are drawn. `Score.parts`:

    tests       the share of the tests that the last code block of the completion passes, or, with `all_or_nothing`,
                whether it passes them all
    format      `format_weight` if there is a code block
    """

    is_deterministic: ClassVar[bool] = True
    path: str | None  # type: ignore[assignment]
    difficulty: Annotated[int, DIFFICULTY]
    num_problems: Annotated[int, at_least(10)]
    prompt_field: str
    tests_field: str
    shown_field: str | None
    prompt_template: Annotated[str, Range("must contain {prompt}", lambda text: "{prompt}" in text)]
    shown_template: Annotated[str, Range("must contain {shown}", lambda text: "{shown}" in text)]
    all_or_nothing: bool
    format_weight: FormatWeight
    command: Annotated[list[str], Range("name a program, such as [python,main.py]", bool)]
    file: str
    memory_mib: Annotated[int, at_least(32)]
    disk_mib: Annotated[int, at_least(1)]
    processes: Annotated[int, at_least(2)]
    sandbox: str
    timeout_s: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.sandbox)
        program, path = self.command[0], ENVIRONMENT["PATH"]
        is_there = program == "python" or shutil.which(program, path=path) is not None
        self.check("command", is_there, f"there is no {program} in {path}")

    def score(self, problem: Problem, text: str) -> Score:
        blocks = BLOCK.findall(text)
        judged = self._judged(dedent(blocks[-1]), problem.fields["tests"]) if blocks else (0.0, 0.0, set())
        passed, skipped, stopped = judged
        earned = float(passed == 1) if self.all_or_nothing else passed
        parts = {"tests": earned, "format": self.format_weight * bool(blocks)}
        measured = {"timed_out": float("time" in stopped), "skipped": skipped}
        return Score(sum(parts.values()), passed == 1, parts, measured=measured)

    def _judged(self, code: str, tests: str | Pairs) -> tuple[float, float, set[str | None]]:
        """The share that the code passes of the tests that pytest has not skipped, the share of those that it has, and
        the limits that have stopped the code.
        """
        # All tests have half of the time of scoring: a program that hangs is wrong, and not left out.
        time_s, isolation = self.timeout_s / 2, self.sandbox
        limits = Limits(time_s=time_s, memory_mib=self.memory_mib, disk_mib=self.disk_mib, processes=self.processes)
        if isinstance(tests, str):
            # Code and tests have a sandbox each, and a socket in between: see code_calls.py.
            (ours, theirs), calls = socket.socketpair(), CALLS.read_text()
            folders = _folders(tests)
            python, files = ["python", "-I", "-S", "main.py"], {"main.py": f"{calls}\nserve({code!r})\n"}
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(run, python, files, stdin=theirs, limits=limits, isolation=isolation)
                files = {"main.py": f"{calls}\nIS_JUDGE = True\n{_call(tests, folders)}\n", "tests.py": tests}
                found = run(python, files, stdin=ours, readable=folders, limits=limits, isolation=isolation)
                stopped = {found.stopped, running.result().stopped}
            number, _, letters = found.stdout.partition("\n")
            # pytest finds no test in a file whose imports fail, because the code has not such a name: 0 of 0.
            num_tests, skipped = int(number or 0), letters.count("s")
            return letters.count("1") / max(num_tests - skipped, 1), skipped / max(num_tests, 1), stopped
        deadline, num_passed, stopped = time.monotonic() + time_s, 0, set()
        for pair in tests:
            left, stdin = replace(limits, time_s=max(deadline - time.monotonic(), 0.0)), pair["input"].encode()
            found = run(self.command, {self.file: code}, stdin=stdin, limits=left, isolation=isolation)
            is_done = found.exit_code == 0 and found.stopped is None
            num_passed += is_done and _lines(found.stdout) == _lines(pair["output"])
            stopped.add(found.stopped)
        return num_passed / len(tests), 0.0, stopped

    def problem_of(self, problem_id: str, row: Row) -> Problem:
        prompt = self.prompt_template.replace("{prompt}", text_field(row, self.prompt_field, "task.prompt_field"))
        tests = _tests(row, self.tests_field, "task.tests_field")
        if self.shown_field is not None and row.value.get(self.shown_field):
            examples = _tests(row, self.shown_field, "task.shown_field")
            if not isinstance(examples, str):
                examples = "\n".join(f"{pair['input']}\n-> {pair['output']}" for pair in examples)
            prompt += self.shown_template.replace("{shown}", examples)
        answer, messages = row.value.get("answer", ""), asked(prompt, self.system_prompt)
        return Problem(problem_id, messages, answer if isinstance(answer, str) else "", {"tests": tests})

    def asked_by(self, row: Row, problem: Problem) -> Sequence[Message]:
        return [{"role": "user", "content": text_field(row, self.prompt_field, "task.prompt_field")}]

    def _load(self, spec: str, split: Split) -> tuple[list[Row], list[Problem]]:
        if self.path is not None:
            return super()._load(spec, split)
        drawn = draw(self.difficulty, self.num_problems)
        rows = [Row(f"the drawn problem {index}", index, value) for index, value in enumerate(drawn)]
        return rows, [self.problem_of(f"code-{row.index}", row) for row in rows]


def _tests(row: Row, name: str, key: str) -> str | Pairs:
    """The tests of a row. Raises ConfigError where there are none."""
    tests = field(row, name, key)
    try:
        if isinstance(tests, str):
            tree, is_file = ast.parse(tests), bool(_folders(tests))
            if is_file and "solution" not in tests:
                raise ValueError("a file of pytest begins with `from solution import ...`")
            if not (is_file or _tests_in(tree)):
                raise ValueError("none has an assert")
        elif not tests or not all(isinstance(pair[each], str) for pair in tests for each in ("input", "output")):
            raise ValueError("there is none")
        return tests
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        fix = "must be asserts, a file of pytest, or a list of {input: TEXT, output: TEXT}"
        raise ConfigError(f"{row.where} field {name!r} ({key}): {fix}; {reason_of(error)}: {shown(tests)}") from error


def _tests_in(tree: ast.Module) -> list[ast.stmt]:
    """The statements that are a test each: those with an assert, or else all calls, such as HumanEval's check(f)."""
    outside = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    asserts = [node for node in outside if any(isinstance(each, ast.Assert) for each in ast.walk(node))]
    return asserts or [node for node in outside if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]


def _folders(tests: str) -> list[str]:
    """Where pytest is, if they need it."""
    if not PYTEST.search(tests):
        return []
    if (found := importlib.util.find_spec("pytest")) is None or found.origin is None:
        raise ConfigError(f"task.tests_field: tests that are files of pytest need {install_command('code')}")
    return [str(Path(found.origin).parents[1])]


def _call(tests: str, folders: Sequence[str]) -> str:
    """Of `judge` in code_calls.py. What compares is the tests' own: the code may give them no name that is a builtin, a
    module, or bound by them.
    """
    tree = ast.parse(tests)
    nodes, found = [*ast.walk(tree)], _tests_in(tree)
    bindings = [node for node in nodes if isinstance(node, (ast.alias, ast.FunctionDef, ast.ClassDef))]
    bound = {getattr(node, "asname", None) or node.name for node in bindings} | {*dir(builtins), "__builtins__"}
    dotted = [node.value for node in nodes if isinstance(node, ast.Attribute)]
    modules = {node.id for node in dotted if isinstance(node, ast.Name)} & sys.stdlib_module_names - bound
    names = {node.id for node in nodes if isinstance(node, ast.Name)} - bound - modules
    statements = [(f"import {name}", False) for name in modules]
    statements += [(ast.unparse(node), node in found) for node in tree.body]
    return f"judge({names!r}, {statements!r}, {folders!r})"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
