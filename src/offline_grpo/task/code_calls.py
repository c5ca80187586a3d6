"""Two programs in a sandbox each, with a socket in between: one runs a completion's code and answers calls, the other
runs the tests. What tests expect and find is never in a process that the code can reach. Plain values cross; of any
other object a number does, and it is asked for what it does, but never compared with a value.

Pickles cross that can name plain types and numbers of objects, and nothing else. (What could read JSON starts slowly.)
`task/code.py` writes `serve(...)` or `judge(...)` behind this text.
"""

from __future__ import annotations

import builtins
import operator
import os
import sys
from _pickle import Pickler, Unpickler
from io import BytesIO

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported takes longer than a verdict
    from typing import Any

KINDS = (int, float, complex, str, bytes, bytearray, list, tuple, range, slice, set, frozenset, dict)
OF_ONE = ("call", "getattr", "len", "iter", "next", "str", "repr", "reversed", "enter", "exit")
OF_ONE += ("getitem", "setitem", "delitem", "neg", "abs")
OF_TWO = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv")  # of the code's own; never with a value
OF_TWO += ("floordiv", "mod", "pow", "matmul", "and", "or", "xor")
IS_JUDGE = False
OBJECTS: list[Any] = []
"""Those of this side that the other one knows by their numbers."""
READS, WRITES, VERDICTS = open(os.dup(0), "rb"), open(os.dup(0), "wb"), open(os.dup(1), "wb", 0)  # noqa: SIM115


class Remote:
    """An object of the other side. Its further methods are `ask`, see below."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __bool__(self) -> bool:
        return ask(self, "bool") if IS_JUDGE else True  # those of the tests are functions


class Packer(Pickler):
    def persistent_id(self, value: object) -> int | None:
        """Of an object: its number, which is below 0 if it is one of the code that goes back to it."""
        if value is None or isinstance(value, KINDS) or any(value is kind for kind in KINDS):
            return None
        if isinstance(value, Remote) and IS_JUDGE:
            return ~value._number
        OBJECTS.append(value)
        return len(OBJECTS) - 1

    def reducer_override(self, value: Any) -> Any:
        """A subclass of a plain type crosses as this type."""
        kind: Any = next((kind for kind in KINDS if isinstance(value, kind)), None)
        return NotImplemented if kind in (None, type(value)) else (kind, (kind(value),))


class Unpacker(Unpickler):
    def persistent_load(self, number: int) -> Any:
        return Remote(number) if number >= 0 or IS_JUDGE else OBJECTS[~number]

    def find_class(self, _: str, name: str) -> Any:
        return {kind.__name__: kind for kind in KINDS}[name]


def send(*message: Any) -> None:
    Packer(packed := BytesIO()).dump(message)
    try:
        WRITES.write(packed.getvalue())
        WRITES.flush()
    except OSError:
        os._exit(3)


def receive() -> Any:
    """The next message. When the other side has ended, so does this one: no test may take that for an error."""
    try:
        return Unpacker(READS).load()
    except Exception:
        os._exit(3)


def ask(remote: Remote, name: str, *args: Any, **named: Any) -> Any:
    """What an object of the other side does, which may call functions that it was given meanwhile."""
    if name in OF_TWO and not isinstance(args[0], Remote):
        return NotImplemented
    send("ask", remote._number, name, args, named)
    while (message := receive())[0] == "ask":
        answer(*message[1:])
    kind, value, changed = message
    if kind == "error":
        error: Any = getattr(builtins, value)
        raise error(*changed) if issubclass(error, (Exception, SystemExit)) else RuntimeError
    for before, after in zip((*args, *named.values()), changed, strict=False):
        if isinstance(before, (list, bytearray)):
            before[:] = after
        elif isinstance(before, (dict, set)):
            before.clear()
            before.update(after)
    return value


for _name in (*OF_ONE, *OF_TWO):
    setattr(Remote, f"__{_name}__", lambda self, *args, _name=_name, **named: ask(self, _name, *args, **named))


def answer(number: int, name: str, args: Any, named: Any) -> None:
    """Functions of the tests can be called, and nothing else."""
    try:
        name, target = "call" if IS_JUDGE else name, OBJECTS[number]
        function: Any = getattr(operator, name, None) or getattr(builtins, name, None)
        function = function or getattr(type(target), f"__{name}__")
        send("value", function(target, *args, **named), (*args, *named.values()))
    except (Exception, SystemExit) as error:
        kind = next(each for each in type(error).__mro__ if hasattr(builtins, each.__name__))
        send("error", kind.__name__, error.args if type(error) is kind else (str(error),))


def serve(code: str) -> None:
    """Run the code, say which names it has, and answer calls."""
    module = sys.modules["solution"] = type(sys)("solution")
    OBJECTS.append(module)
    exec(compile(code, "solution.py", "exec"), vars(module))
    send(*vars(module))
    while True:
        answer(*receive()[1:])


def judge(names: set[str], statements: list[tuple[str, bool]], folders: list[str]) -> None:
    """Run the tests: statements, some of which are a test each, or, with folders for pytest, the file tests.py. Write
    their number, and a letter for each: 1 if it passed, s if it was skipped, or 0. Of what the code has they see
    `names`.
    """
    module: Any = type(sys)("solution")
    sys.modules["solution"], module.__all__, solution = module, [*names & {*receive()}], Remote(0)
    module.__getattr__ = lambda name: getattr(solution, name)
    if folders:
        sys.path += folders
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

        outcomes, letters = dict[str, str](), {"passed": b"1", "skipped": b"s", "failed": b"0"}
        skipped_files = []

        class Report:
            def pytest_collectreport(self, report: Any) -> None:
                skipped_files.extend([report] * report.skipped)

            def pytest_collection_finish(self, session: Any) -> None:
                VERDICTS.write(b"%d\n" % (len(session.items) + len(skipped_files)) + b"s" * len(skipped_files))

            def pytest_runtest_logreport(self, report: Any) -> None:  # of parts of a test, such as subTest, then of it
                if outcomes.get(report.nodeid) != "failed" and (report.when != "teardown" or report.failed):
                    outcomes[report.nodeid] = report.outcome

            def pytest_runtest_logfinish(self, nodeid: str) -> None:
                VERDICTS.write(letters[outcomes[nodeid]])

        __import__("pytest").main(["-q", "-p", "no:cacheprovider", "tests.py"], plugins=[Report()])
        os._exit(0)
    space: dict[str, Any] = {}
    exec("from solution import *", space)
    VERDICTS.write(b"%d\n" % sum(is_test for _, is_test in statements))
    for text, is_test in statements:
        try:
            exec(text, space)
            passed = True
        except BaseException:
            passed = False
        VERDICTS.write(b"%d" % passed if is_test else b"")
    os._exit(0)


for _fd in range(3):  # what code and tests print is no verdict
    os.dup2(os.open(os.devnull, os.O_RDWR), _fd)
