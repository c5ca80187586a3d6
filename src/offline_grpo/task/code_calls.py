"""Two programs in a sandbox each, with a socket in between: one runs a completion's code and answers calls, the other
runs the tests. What tests expect and find is never in a process that the code can reach. Plain values cross; of any
other object a number does, and it is asked for what it does, but never compared with a value.

    python code_calls.py solution|tests [FOLDER OF PYTEST]
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # what is imported takes longer than a verdict
    from typing import Any

KINDS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, dict, bytes, bytearray)}
MADE_OF: dict[Any, tuple[str, ...]] = {complex: ("real", "imag"), range: ("start", "stop", "step")}
OF_ONE = ("len", "iter", "next", "getitem", "setitem", "delitem", "str", "repr", "enter", "exit", "reversed")
OF_TWO = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv")  # of the code's own; never with a value
OF_TESTS = ("__", "test", "Test", "pytest")  # names that begin so are not asked of the code


class Remote:
    """An object of the other side."""

    __hash__ = object.__hash__

    def __init__(self, peer: Any, number: int) -> None:
        self._peer, self._number = peer, number

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask(self._number, f".{name}")

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._peer.ask(self._number, "", *args, **named)

    def __bool__(self) -> bool:
        return True


def _forward(name: str, is_of_two: bool) -> None:
    def method(self: Remote, *args: Any) -> Any:
        if is_of_two and not isinstance(args[0], Remote):
            return NotImplemented
        return self._peer.ask(self._number, name, *args)

    setattr(Remote, name, method)


for _name in (*OF_ONE, *OF_TWO):
    _forward(f"__{_name}__", _name in OF_TWO)


class Peer:
    """One end of the socket."""

    def __init__(self, channel: int, is_judge: bool, first: object = None) -> None:
        self.file, self.is_judge, self.objects = open(channel, "rb"), is_judge, [first]  # noqa: SIM115

    def ask(self, number: int, name: str, *args: Any, **named: Any) -> Any:
        """What an object of the other side does, which may call functions that it was given meanwhile."""
        self.send({"ask": [number, name, self.pack(args), self.pack(named)]})
        while "ask" in (message := self.receive()):
            self.answer(*message["ask"])
        if "error" in message:
            kind: Any = getattr(builtins, message["error"][0], None)
            is_error = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_error else RuntimeError)(message["error"][1])
        for before, after in zip(args, self.unpack(message["args"]), strict=False):  # it may have changed them
            if type(before) is type(after) is list:
                before[:] = after
            elif type(before) is type(after) and isinstance(before, (dict, set)):
                before.clear()
                before.update(after)
        return self.unpack(message["value"])

    def answer(self, number: int, name: str, args: Any, named: Any) -> None:
        try:
            if self.is_judge and name:
                raise TypeError("functions of the tests can be called, and nothing else")
            target: Any = self.objects[number]
            args, named = self.unpack(args), self.unpack(named)
            if name.startswith("__") and not hasattr(target, name):
                raise TypeError(f"a {type(target).__name__} has no {name}")  # as Python says without it
            function = getattr(target, name.removeprefix(".")) if name else target
            value = function if name.startswith(".") else function(*args, **named)
            reply = {"value": self.pack(value), "args": self.pack([] if self.is_judge else args)}
        except Exception as error:
            reply = {"error": [type(error).__name__, str(error)]}
        self.send(reply)

    def pack(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        for name, kind in KINDS.items():
            if isinstance(value, kind):
                return {name: [self.pack(each) for each in (value.items() if kind is dict else value)]}
        if type(value) in MADE_OF:
            return {type(value).__name__: [getattr(value, part) for part in MADE_OF[type(value)]]}
        if isinstance(value, Remote):
            return {"yours": value._number}
        if self.is_judge and not isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            raise TypeError(f"tests can pass plain values and functions, not {value!r:.80}")
        self.objects.append(value)
        return {"mine": len(self.objects) - 1}

    def unpack(self, packed: Any) -> Any:
        if not isinstance(packed, dict):
            return packed
        [(name, value)] = packed.items()
        if name in ("mine", "yours"):
            return Remote(self, value) if name == "mine" else self.objects[value]
        if name in ("complex", "range"):
            return (complex if name == "complex" else range)(*value)
        return KINDS[name](map(self.unpack, value))

    def send(self, message: Any) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self.file.fileno(), rest) :]
        except OSError:
            os._exit(3)

    def receive(self) -> Any:
        """The next message. When the other side has ended, so does this one: no test may take that for an error."""
        try:
            line = self.file.readline()
        except OSError:
            line = b""
        return json.loads(line) if line else os._exit(3)


def serve(channel: int) -> None:
    """Run the code, say which names it has, and answer calls."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    peer = Peer(channel, is_judge=False, first=module)
    with open("solution.py") as file:
        exec(compile(file.read(), "solution.py", "exec"), module.__dict__)
    peer.send([*vars(module)])
    while True:
        peer.answer(*peer.receive()["ask"])


def judge(channel: int, verdicts: Any, folder: str) -> None:
    """Run the tests; write their number, and a digit for each: 1 if it passed."""
    peer = Peer(channel, is_judge=True)
    with open("tests.py") as file:
        tree = ast.parse(file.read())
    nodes = [*ast.walk(tree)]
    # Names of the code for tests. None stands in for what compares: what tests import or define, builtins, modules.
    bound = {alias.asname or alias.name for node in nodes for alias in _imported(node)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names = {name for name in peer.receive() if not name.startswith(OF_TESTS)} - bound - {*dir(builtins)}
    module: Any = types.ModuleType("solution")
    sys.modules["solution"], module.__all__ = module, sorted(names - sys.stdlib_module_names)
    module.__getattr__ = lambda name: peer.ask(0, "." if name.startswith(OF_TESTS) else f".{name}")  # "." is none
    if folder:
        sys.path.append(folder)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

        class Report:
            def pytest_collection_finish(self, session: Any) -> None:
                verdicts.write(b"%d\n" % len(session.items))

            def pytest_runtest_logreport(self, report: Any) -> None:
                verdicts.write(b"%d" % report.passed if report.when == "call" else b"")

        importlib.import_module("pytest").main(["-q", "-p", "no:cacheprovider", "tests.py"], plugins=[Report()])
        return
    used = {node.id for node in nodes if isinstance(node, ast.Name)} & names
    with_dot = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules = used & with_dot & sys.stdlib_module_names  # that the code has imported for them
    space = {name: importlib.import_module(name) for name in modules}
    space |= {name: peer.ask(0, f".{name}") for name in used - modules}
    tests = tests_in(tree)
    verdicts.write(b"%d\n" % len(tests))
    for node in tree.body:
        try:
            exec(compile(ast.Module([node], []), "tests.py", "exec"), space)
            passed = True
        except BaseException:
            passed = False
        verdicts.write(b"%d" % passed if node in tests else b"")


def _imported(node: ast.AST) -> list[ast.alias]:
    is_own = isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module != "solution")
    return node.names if is_own else []  # type: ignore[attr-defined]


def tests_in(tree: ast.Module) -> list[ast.stmt]:
    """The statements that are a test each: those with an assert, or else all calls, such as HumanEval's check(f)."""
    outside = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    asserts = [node for node in outside if any(isinstance(each, ast.Assert) for each in ast.walk(node))]
    return asserts or [node for node in outside if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]


def main(role: str, folder: str = "") -> None:
    channel, null = os.dup(0), os.open(os.devnull, os.O_RDWR)
    sys.set_int_max_str_digits(0)
    os.dup2(null, 0)
    if role == "solution":
        os.dup2(null, 1)
        os.dup2(null, 2)
        serve(channel)
    with open(os.dup(1), "wb", 0) as verdicts:  # what tests print is none
        os.dup2(null, 1)
        judge(channel, verdicts, folder)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
