"""`task=code`: verdicts are those of a bare run, and no completion earns what it has not computed."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from factories import compose_config

from offline_grpo.config.compose import typed
from offline_grpo.config.problems import build_task
from offline_grpo.errors import ConfigError
from offline_grpo.score import scores
from offline_grpo.task.code import Code
from offline_grpo.task.code_problems import STEPS, draw
from offline_grpo.types import Problem, Score, Split


def make(*overrides: str) -> Code:
    task: Any = build_task(typed(compose_config("task=code", "scoring.timeout_s=60", *overrides)).task)
    return task


@pytest.fixture(scope="module")
def task() -> Code:
    return make()


@pytest.fixture(scope="module")
def hasty() -> Code:
    """For what never ends: it gets three seconds."""
    return make("scoring.timeout_s=6")


def judged(task: Code, code: str, tests: Any, shown: Any = None) -> Score:
    return task.score(
        Problem("p", (), "", {"tests": tests, "shown": shown}), f"I think.\n```python\n{code}\n```\nDone."
    )


def bare(code: str, tests: str) -> float:
    """The share of asserts that pass, in this process."""
    space: dict[str, Any] = {}
    try:
        exec(code, space)
    except Exception:
        return 0.0
    passed = []
    for line in tests.splitlines():
        try:
            exec(line, space)
            passed.append(True)
        except Exception:
            passed.append(False)
    return sum(passed) / len(passed)


def test_verdicts_equal_those_of_a_bare_run_on_200_solutions(task: Code) -> None:
    rows = [*draw(1, 100), *draw(3, 100)]
    other = [rows[i - 1]["answer"] for i in range(len(rows))]
    broken = (
        "def f(x):\n    return x",
        "def f(x)\n    return x",
        "def g(x):\n    return x",
        "def f(x): raise KeyError(x)",
    )
    codes = [(row["answer"], other[i], broken[i % 4], row["answer"])[i % 4] for i, row in enumerate(rows)]
    codes[5] = rows[5]["answer"].replace("return", "return x if len(str(x)) > 3 else")
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda pair: judged(task, pair[0], pair[1]["tests"]), zip(codes, rows, strict=True))]
    expected = [bare(code, row["tests"]) for code, row in zip(codes, rows, strict=True)]
    assert [score.reward for score in found] == expected
    assert [score.is_correct for score in found] == [share == 1 for share in expected]
    assert 90 < sum(share == 1 for share in expected) < 150
    assert any(0 < share < 1 for share in expected)


TESTS = "assert f(2) == 4\nassert f(-31) == 961\nassert f(7) == 49"
ANY = (
    "class Any:\n    def __eq__(self, other): return True\n    __lt__ = __le__ = __gt__ = __ge__ = __eq__\n"
    "    def __sub__(self, other): return 0\n    __rsub__ = __add__ = __radd__ = __mod__ = __sub__\n"
    "    def __hash__(self): return 1\n    def __float__(self): return 1.0\n    def __abs__(self): return 0\n"
    "def f(x): return Any()\n"
)
READ = (
    "import gc, inspect, re, sys\n"
    "def f(x):\n"
    "    texts = [o for o in gc.get_objects() if isinstance(o, str)] + [str(vars(m)) for m in sys.modules.values()]\n"
    "    frame = inspect.currentframe()\n"
    "    while frame: texts += [repr(frame.f_locals), repr(frame.f_globals)]; frame = frame.f_back\n"
    "    for folder, _, files in __import__('os').walk('/tmp'):\n"
    "        texts += [open(folder + '/' + file).read() for file in files]\n"
    "    found = re.search(r'assert f\\(' + str(x) + r'\\) == (-?\\d+)', ' '.join(texts))\n"
    "    return int(found[1]) if found else None"
)
WRITE = (
    "import os\nfor fd in range(40):\n"
    "    try: os.write(fd, b'3\\n111\\n' + __import__('pickle').dumps(('value', True, ())) * 9)\n"
    "    except OSError: pass\n"
)
PICKLES = (
    "import sys, pickle, struct\nM = sys.modules['__main__']\n"
    "def say(body):\n    M.WRITES.write(b'\\x80\\x04' + body + b'.')\n    M.WRITES.flush()\n"
    "def word(text): return b'\\x8c' + bytes([len(text)]) + text.encode()\n"
    "def name(module, text): return word(module) + word(text) + b'\\x93'\n"
)  # what the code's side of the socket can say, whatever Packer would
FORGERIES = {
    "says so": "print('3\\n111', flush=True)\nprint('PASSED, reward 1.0')",
    "exits 0": "import sys\nsys.exit(0)",
    "ends at once": "import os\nos._exit(0)",
    "ends in a test": "import os\ndef f(x): os._exit(0)",
    "ends at its end": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): raise SystemExit(0)",
    "writes the verdict": WRITE + "def f(x): return None",
    "writes the verdict and ends": WRITE + "os._exit(0)",
    "equals everything": ANY,
    "is a number that equals everything": "class N(int):\n    __eq__ = lambda self, other: True\ndef f(x): return N(1)",
    "assertions": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\ndef f(x): return 0",
    "builtins": "import builtins\nfor n in ('abs', 'all', 'eval', 'exec', 'compile', 'isinstance'):\n"
    "    setattr(builtins, n, lambda *a: True)\ndef f(x): return 0",
    "the peer": "M = __import__('sys').modules['__main__']\nsend = M.send\n"
    "M.send = lambda *message: send('value', True, ())\ndef f(x): return 0",
    "reads the tests": READ,
    "asks the tests": "import sys\nM = sys.modules['__main__']\ndef f(x): return M.ask(M.Remote(0), 'getattr', 'f')(x)",
    "raises assertions": "def f(x): raise AssertionError",
    "skips": "import pytest\ndef f(x): pytest.skip('no')",
    "never answers": "import time\ndef f(x): time.sleep(99)",
    "answers for ever": "import itertools\ndef f(x): return itertools.count()",
    "a process that stays": "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(99)\nf = abs",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "def f(x): return [bytes(10**8) for _ in range(99)]",
    "a long answer": "def f(x): return 'x' * 10**9",
    "deep": "def f(x):\n    v = []\n    for _ in range(10**5): v = [v]\n    return v",
    "a pickle that runs a program": PICKLES + "def f(x): say(name('posix', 'system') + word('true') + b'\\x85R')",
    "a pickle that evaluates": PICKLES + "def f(x):\n"
    "    say(word('value') + name('builtins', 'eval') + word('4') + b'\\x85R)\\x87')",
    "a pickle of the judge's own": PICKLES + "for n in ('Remote', 'VERDICTS', 'judge', 'os'):\n"
    "    say(word('value') + name('__main__', n) + b')\\x87')\ndef f(x): return 0",
    "an error that evaluates": PICKLES + "def f(x):\n    M.send('error', 'exec', 'VERDICTS.write(b\"111\")')",
    "a pickle that changes objects": PICKLES + "def f(x):\n    M.OBJECTS.append(len)\n"
    "    equal = b'}' + word('__eq__') + b'K\\x01Qs'\n"  # {'__eq__': object 1}, set on object 1 and on int
    "    say(word('value') + b'K\\x01Q(N' + equal + b'tb)\\x87')\n    M.receive()\n"
    "    say(word('value') + name('builtins', 'int') + b'(N' + equal + b'tb)\\x87')",
    "a pickle without an end": PICKLES + "def f(x):\n"
    "    say(b'\\x8d' + struct.pack('<Q', 2**62))\n    say(b'Nr\\xff\\xff\\xff\\x7f' * 99)",
    "asks for ever": "M = __import__('sys').modules['__main__']\n"
    "def f(x):\n    while True: M.send('ask', 0, 'call', (), {})",
    "closes the socket": "import os, socket\nM = __import__('sys').modules['__main__']\n"
    "def f(x):\n    socket.socket(fileno=M.READS.fileno()).shutdown(socket.SHUT_RDWR)\n    return 0",
    "sends the socket itself": "import array, socket\nM = __import__('sys').modules['__main__']\ndef f(x):\n"
    "    s = socket.socket(fileno=M.READS.fileno())\n    fds = array.array('i', [s.fileno()] * 99)\n"
    "    s.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])\n    return 0",
    "a class that equals everything": "class M(type):\n    __eq__ = lambda self, other: True\n    __hash__ = None\n"
    "class C(metaclass=M): pass\ndef f(x): return C",
    "kills all": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    os.kill(-1, 9)",
    "a loop": "def f(x):\n    v = []\n    v.append(v)\n    return v",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "fork bomb" else name for name in FORGERIES],
)
def test_what_was_not_computed_earns_nothing(hasty: Code, name: str) -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}, {*os.listdir("/proc/self/fd")}
    score = judged(hasty, FORGERIES[name], TESTS)
    assert (score.reward, score.is_correct) == (0.0, False)
    after = {each.pid for each in psutil.Process().children(recursive=True)}, {*os.listdir("/proc/self/fd")}
    assert after == before


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def all(v): return True\ndef f(x): return 0", "assert all(f(i) == i * i for i in (2, 3))"),
        (
            "class math:\n    isclose = staticmethod(lambda a, b: True)\ndef f(x): return 0",
            "assert math.isclose(f(2), 4)",
        ),
        (ANY, "assert abs(f(2) - 4) < 1e-6"),
        (ANY, "assert 4 <= f(2) <= 4"),
        (ANY, "assert f(2) in (4, 5)"),
        (ANY, "assert isinstance(f(2), int) and f(2) == 4"),
        ("import os\ndef f(x): os._exit(0)", "try:\n    f(2)\n    assert False\nexcept ValueError:\n    pass"),
        (
            "def test_1(): pass\ntest_2 = test_3 = test_1\nf = 0\ncheck = lambda *a: True",
            "from solution import *\ndef test_f():\n    assert f(2) == 4",
        ),
        (
            "pytest_plugins = []\npytest = 0\ndef f(x): return 0",
            "import pytest\nfrom solution import *\ndef test_f():\n    assert f(2) == pytest.approx(4)",
        ),
        (ANY, "import pytest\nfrom solution import f\ndef test_f():\n    assert f(2) == pytest.approx(4)"),
        (
            "import os, threading\ndef f(x): threading.Timer(0.2, os._exit, [0]).start()",
            "import time\nf(1)\ntime.sleep(1)\ntry:\n    f(2)\n    assert False\nexcept OSError:\n    pass",
        ),
        (
            "def isclose(*args, **named): return True\ndef f(x): return 0",
            "from math import isclose\nfrom solution import *\ndef test_f():\n    assert isclose(f(2), 4)",
        ),
        (
            "def near(*args): return True\ndef f(x): return 0",
            "from solution import *\ndef near(a, b):\n    return a == b\ndef test_f():\n    assert near(f(2), 4)",
        ),
        (
            PICKLES + "def f(g):\n    defaults = b'(N}' + word('__defaults__') + b'K\\x00\\x85stb'\n"
            "    say(word('value') + b'J\\xff\\xff\\xff\\xffQ' + defaults + b')\\x87')",  # of the tests' first object
            "def g(x=5):\n    return x\nf(g)\nassert g() == 0",
        ),
        ("__builtins__ = {}\ndef f(x): return 0", "assert f(2) == 0 and isinstance(__builtins__, int)"),
        ("def f(g): return g.__globals__['KEY']", "KEY = 5\nassert f(lambda: 1) == 5"),
        ("def f(g): return g.__defaults__[0]", "assert f(lambda x=5: x) == 5"),
    ],
)
def test_what_compares_is_the_tests_own(task: Code, code: str, tests: str) -> None:
    assert judged(task, code, tests).reward == 0


OBJECTS = (
    "import math\nLIMIT = 3\n"
    "class Stack:\n    def __init__(self, *v): self.v = [*v]\n    def push(self, x): self.v.append(x)\n"
    "    def pop(self): return self.v.pop()\n    def __len__(self): return len(self.v)\n"
    "    def __eq__(self, other): return self.v == other.v\n    def __iter__(self): return iter(self.v)\n"
    "    def __enter__(self): return self\n    def __exit__(self, *error): pass\n"
    "    def __getitem__(self, at): return self.v[at]\n    def __mod__(self, other): return self.v[0] % other.v[0]\n"
    "def end(): raise SystemExit(3)\ndef text(b): return b.decode()\n"
    "def test_even(n): return n % 2 == 0\ndef same(g): return g\n"
    "def sort(v): v.sort()\ndef count(n): yield from range(n)\ndef apply(g, v): return [g(x) for x in v]\n"
    "class Bad(ValueError): pass\ndef bad(): raise Bad('no')\ndef area(r): return math.pi * r * r\n"
    "def table(): return {(1, 2): {3}, 'b': b'x'}\n"
    "def sum(a, b): return a + b\n"
)


@pytest.mark.parametrize(
    "tests",
    [
        "s = Stack(1)\ns.push(2)\nassert len(s) == 2\nassert s.pop() == 2\nassert s.v == [1]\nassert list(s) == [1]",
        "assert Stack(1) == Stack(1)\nassert Stack(1) != Stack(2)\nassert Stack(1) != 1",
        "v = [3, 1]\nsort(v)\nassert v == [1, 3]\nv = [3, 1]\nsort(v=v)\nassert v == [1, 3]",
        "assert not Stack()\nassert Stack(1, 2, 3)[1:] == [2, 3]\nassert Stack(7) % Stack(4) == 3",
        "import pytest\nfrom solution import *\ndef test_errors():\n    with pytest.raises(UnicodeDecodeError):\n"
        "        text(b'\\xff')\n    with pytest.raises(KeyError, match='^7$'):\n        table()[7]\n"
        "    with pytest.raises(SystemExit, match='3'):\n        end()\n    assert text(b'a') == 'a'",
        "assert list(count(3)) == [0, 1, 2]\nassert apply(lambda x: x + 1, [1, 2]) == [2, 3]\nassert LIMIT == 3",
        "assert math.isclose(area(1), math.pi)\nassert table() == {(1, 2): {3}, 'b': b'x'}",
        "try:\n    bad()\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'",
        "def check(candidate):\n    assert candidate(3)[1] == 1\ncheck(lambda n: [*count(n)])",
        "from solution import sum\nassert sum(1, 2) == 3",
        "import pytest\nfrom solution import *\n@pytest.mark.parametrize('n', [1, 2])\ndef test_count(n):\n"
        "    assert list(count(n)) == [*range(n)]\ndef test_bad():\n    with pytest.raises(ValueError, match='no'):\n"
        "        bad()\nclass TestStack:\n    def test_pop(self):\n        assert Stack(5).pop() == 5",
        "import unittest\nfrom solution import Stack\nclass PartsTest(unittest.TestCase):\n    def test_pop(self):\n"
        "        for i in range(3):\n            with self.subTest(i=i):\n                assert Stack(i).pop() == i",
        "with Stack(1) as s:\n    assert s.pop() == 1\nassert test_even(2)\nassert same(len) and same(len)([1]) == 1",
        "import unittest\nfrom solution import Stack\nclass Checks(unittest.TestCase):\n    def test_pop(self):\n"
        "        self.assertEqual(Stack(5).pop(), 5)",
    ],
)
def test_tests_use_objects_of_the_code_as_if_they_were_here(task: Code, tests: str) -> None:
    assert judged(task, OBJECTS, tests).reward == 1


def test_a_share_of_the_tests_is_paid_or_all_or_nothing(task: Code, hasty: Code) -> None:
    tests = "assert f(1) == 1\nassert f(2) == 4\nprint('x')\nassert f(3) == 3"
    code = "print('hello' * 10**6)\ndef f(x): return x"
    score = judged(task, code, tests)
    assert (score.reward, score.parts) == (pytest.approx(2 / 3), {"tests": 2 / 3, "format": 0.0})
    strict = make("task.all_or_nothing=true", "task.format_weight=0.1")
    assert judged(strict, code, tests).parts == {"tests": 0.0, "format": 0.1}
    assert judged(strict, "def f(x): return [0, 1, 4, 3][x]", tests).parts == {"tests": 1.0, "format": 0.1}
    assert strict.score(Problem("p", (), "", {"tests": tests}), "def f(x): return x").reward == 0
    hanging = "def f(x):\n    while x == 2: pass\n    return x"
    score = judged(hasty, hanging, tests)
    assert score.reward == pytest.approx(1 / 3), "tests before the one that hangs count"
    assert (score.measured["timed_out"], judged(task, code, tests).measured["timed_out"]) == (1, 0)
    parts = "import unittest\nfrom solution import f\nclass MyTest(unittest.TestCase):\n    def test_f(self):\n"
    parts += "        for i in (1, 2):\n            with self.subTest(i=i):\n                self.assertEqual(f(i), 1)"
    assert judged(task, code, parts).reward == 0, "a part of a test"


def test_code_without_the_name_that_a_file_of_pytest_imports_is_wrong(task: Code) -> None:
    # pytest then finds none of its tests. The reward is 0: without one, the completion would not be trained on.
    tests = "from solution import Stack\n\ndef test_push():\n    Stack().push(1)"
    assert judged(task, "class Heap: pass", tests) == Score(
        0.0, False, {"tests": 0.0, "format": 0.0}, measured={"timed_out": 0.0, "skipped": 0.0}
    )


def test_tests_that_pytest_skips_do_not_count(task: Code) -> None:
    begins = "import pytest\nfrom solution import f\n"
    skipped = (
        "@pytest.mark.skip\ndef test_a(): assert f(1) == 2\n"
        "def test_b():\n    pytest.skip('no')\n"
        "@pytest.mark.xfail\ndef test_c(): assert f(1) == 2\n"
    )
    others = "def test_d(): assert f(3) == 9\n"
    wrong, right = "def f(x): return x", "def f(x): return x * x"
    for code, reward in ((wrong, 0), (right, 1)):
        score = judged(task, code, begins + skipped + others)
        assert (score.reward, score.is_correct, score.measured["skipped"]) == (reward, reward == 1, 3 / 4)

    # Where none is left, none passes, and `measured/skipped` says why. A file that is skipped is one test.
    for tests in (begins + skipped, f"import pytest\npytest.importorskip('nowhere')\n{begins}{others}"):
        score = judged(task, right, tests)
        assert (score.reward, score.is_correct, score.measured["skipped"]) == (0, False, 1)

    # A part of a test that is skipped leaves the others, and what fails after a skip has failed.
    parts = "import unittest\nfrom solution import f\nclass MyTest(unittest.TestCase):\n    def test_f(self):\n"
    parts += (
        "        for i in (0, 2):\n            with self.subTest(i=i):\n                if i == 0: self.skipTest('')\n"
    )
    parts += "                self.assertEqual(f(i), 4)\n"
    assert [judged(task, code, parts).reward for code in (wrong, right)] == [0, 1]


def test_complex_numbers_and_ranges_are_plain_values(task: Code) -> None:
    tests = (
        "assert f(1j) == [1j, -1 + 0j]\nassert g(4) == range(1, 4)\nassert g(range(3)) == range(3)\nassert f(1) == 1j"
    )
    code = "def f(x): return [x, x * x]\ndef g(x): return x if isinstance(x, range) else range(1, x)"
    assert judged(task, code, tests).reward == bare(code, tests) == 3 / 4


def test_the_last_block_is_run_also_where_it_is_cut(task: Code) -> None:
    problem = Problem("p", (), "", {"tests": "assert f(2) == 3"})
    text = "```python\ndef f(x): return x\n```\nBetter:\n```\ndef f(x): return x + 1\n"
    assert task.score(problem, text).reward == task.score(problem, f"{text}```\nDone").reward == 1
    in_a_list = "1. The code:\n   ```python\n   def f(x):\n       return x + 1\n   ```"
    assert task.score(problem, in_a_list).reward == 1


def test_programs_of_any_language_read_input_and_write_output() -> None:
    pairs = [
        {"input": "2 3\n", "output": "5\n"},
        {"input": "4 5", "output": "9  \n\n"},
        {"input": "1 1", "output": "3"},
    ]
    assert judged(make(), "a, b = map(int, input().split())\nprint(a + b)", pairs).reward == pytest.approx(2 / 3)
    assert judged(make("task.file=sum.py"), "print(sum(map(int, input().split())))", pairs).reward == pytest.approx(
        2 / 3
    )
    shell = make("task.file=main.sh", "task.command=[sh,main.sh]")
    assert judged(shell, "read a b\necho $((a + b))", pairs).reward == pytest.approx(2 / 3)
    assert judged(shell, "read a b\necho $((a + b))\nexit 1", pairs).reward == 0
    assert judged(shell, "while :; do echo 5; done", pairs).reward == 0
    with pytest.raises(ConfigError, match=r"task.command=\['nodee', 'main.js'\]: there is no nodee in "):
        make("task.command=[nodee,main.js]")
    with pytest.raises(ConfigError, match=r"task.command=\[\]: name a program"):
        make("task.command=[]")


def test_drawn_problems_have_twenty_kinds_and_are_held_out_apart(task: Code) -> None:
    assert sum(map(len, STEPS.values())) >= 10
    with pytest.raises(ConfigError, match=r"task.difficulty=7: must be from 1 to 6"):
        make("task.difficulty=7")
    for difficulty in (1, 2, 6):
        rows = draw(difficulty, 300)
        assert rows == draw(difficulty, 300)
        assert len({row["answer"] for row in rows}) == 300
        assert all(bare(row["answer"], f"{row['tests']}\n{row['shown']}") == 1 for row in rows)
        assert all(row["prompt"].count(", then ") == difficulty - 1 for row in rows)
        assert all(not {*row["tests"].splitlines()} & {*row["shown"].splitlines()} for row in rows)
    train, held_out = (task.problems(split) for split in (Split.TRAIN, Split.EVAL))
    prompts = [{problem.messages[0]["content"].partition("\n")[0] for problem in each} for each in (train, held_out)]
    assert not prompts[0] & prompts[1]
    assert len(held_out) == len(prompts[1]) == round(0.1 * len(prompts[0] | prompts[1]))


def test_rows_of_ones_own_are_scored_in_processes_as_in_a_run(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "Double.", "tests": "assert f(2) == 4", "shown": "assert f(1) == 2"},
        {"prompt": "Add.", "tests": [{"input": "1 2", "output": "3"}]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ["task=code", f"task.path={file}", "scoring.workers=2"]
    double = "```python\ndef f(x): return 2 * x\n```"
    assert [score.reward for score in scores(words, [double, "no code", "```\nimport os\nos._exit(0)\n```"])] == [
        1,
        0,
        0,
    ]
    add = "```\nprint(sum(map(int, input().split())))\n```"
    assert [score.reward for score in scores([*words, "scoring.sandbox=none"], [add, double], row=1)] == [1, 0]
    [problem, _] = make(f"task.path={file}", "task.prompt_template='{prompt} Go.'").all_rows
    assert problem.messages[0]["content"] == "Double. Go.\n\nIt passes tests such as these:\n\nassert f(1) == 2"


BROKEN = ["f(", "x = 1", "def test_f():\n  f(", "def test_f():\n  assert f(1) == 1"]


@pytest.mark.parametrize("tests", ["", *BROKEN, [], [{"input": "1"}], [3], 7])
def test_rows_without_tests_are_refused(tmp_path: Path, tests: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "p", "tests": tests}))
    with pytest.raises(ConfigError, match=r"rows.jsonl, row 1, field 'tests' \(task.tests_field\): must be asserts"):
        _ = make(f"task.path={file}").all_rows


def test_the_page_is_true(tmp_path: Path) -> None:
    """Its rows, its reward and its environment."""
    page = (Path(__file__).parents[3] / "docs" / "code.md").read_text()
    (tmp_path / "my.jsonl").write_text(page.partition("```json\n")[2].partition("```")[0])
    double, stack, add = make(f"task.path={tmp_path}/my.jsonl").all_rows
    task = make()
    for problem, code in (
        (double, "def double(x): return x * 2"),
        (stack, "class Stack(list): pass"),
        (add, "print(sum(map(int, input().split())))"),
    ):
        assert judged(task, code, problem.fields["tests"]).is_correct
    space: dict[str, Any] = {}
    exec(page.partition("```python\n# my_code.py")[2].partition("```\n")[0], space)
    assert [space["prints"](code, "42") for code in ("print(6 * 7)", "print(6)", "exit(42)")] == [True, False, False]
    tool = space["Python"]()
    tool.reset(answer="3")
    assert (tool.get_reward(), tool.python("print(1 + 2)"), tool.get_reward()) == (False, "3\n", True)
    assert "ZeroDivisionError" in tool.python("1 / 0")
