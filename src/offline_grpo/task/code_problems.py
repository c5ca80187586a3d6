"""Problems for `task=code` that need no data: functions of one line, with a solution, tests and examples."""

from __future__ import annotations

import random

NUM_TESTS, NUM_SHOWN = 8, 2
STEPS = {
    "number": {
        "add {a}": "({x} + {a})",
        "multiply by {a}": "({x} * {a})",
        "subtract from {a}": "({a} - {x})",
        "take the remainder of the division by {a}": "({x} % {a})",
        "take the larger of it and {a}": "max({x}, {a})",
        "square": "({x}) ** 2",
        "take the sum of its decimal digits, without its sign": "sum(map(int, str(abs({x}))))",
        "halve if it is even": "(lambda n: n // 2 if n % 2 == 0 else n)({x})",
    },
    "text": {
        "repeat {b} times": "({x} * {b})",
        "reverse": "{x}[::-1]",
        "write in capital letters": "{x}.upper()",
        "leave out every letter {c}": "{x}.replace({c!r}, '')",
        "put the number of its characters behind it": "(lambda s: s + str(len(s)))({x})",
        "keep the first {b} characters": "{x}[:{b}]",
    },
    "list": {
        "add {a} to each number": "[n + {a} for n in {x}]",
        "keep the numbers above {a}": "[n for n in {x} if n > {a}]",
        "sort, the largest first": "sorted({x}, reverse=True)",
        "leave out repeated numbers and sort, the smallest first": "sorted(set({x}))",
        "put the sum of its numbers at its end": "(lambda v: v + [sum(v)])({x})",
        "keep every number at an even index, counted from 0": "{x}[::2]",
    },
}
"""Kinds of value; what is done with it, in words; and in Python."""
MOST_STEPS = min(map(len, STEPS.values()))


def draw(difficulty: int, count: int) -> list[dict[str, str]]:
    """At most `count` rows with `prompt`, `tests`, `shown` and the solution, `answer`; the same on every machine. A
    function does `difficulty` things in turn. With one thing there are fewer than a thousand.
    """
    rng, rows = random.Random(f"code {difficulty}"), dict[str, dict[str, str]]()
    for _ in range(20 * count):
        kind = rng.choice([*STEPS])
        words, expression = [], "x"
        for step in rng.sample([*STEPS[kind]], difficulty):
            given = {"a": rng.randint(2, 99), "b": rng.randint(2, 5), "c": rng.choice("abcde")}
            words.append(step.format(**given))
            expression = STEPS[kind][step].format(x=expression, **given)
        answer = f"def f(x):\n    return {expression}"
        if answer in rows or len(rows) == count:
            continue
        values: list[int | str | list[int]] = []
        while len(values) < NUM_TESTS + NUM_SHOWN:
            values += [value] if (value := _value(kind, rng)) not in values else []
        asserts = [f"assert f({x!r}) == {eval(expression, {'x': x})!r}" for x in values]
        of = " of whole numbers" if kind == "list" else ""
        prompt = f"Write a Python function f(x). x is a {kind}{of}. The result: {', then '.join(words)}."
        tests, shown = "\n".join(asserts[NUM_SHOWN:]), "\n".join(asserts[:NUM_SHOWN])
        rows[answer] = {"prompt": prompt, "tests": tests, "shown": shown, "answer": answer}
    return [*rows.values()]


def _value(kind: str, rng: random.Random) -> int | str | list[int]:
    if kind == "text":
        return "".join(rng.choices("abcde xyz", k=rng.randint(1, 9)))
    numbers = [rng.randint(-30, 60) for _ in range(rng.randint(1, 7))]
    return numbers if kind == "list" else numbers[0]
