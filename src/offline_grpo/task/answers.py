"""Extracts the answer from a completion and compares it with the reference. No function here raises or hangs, whatever
the text.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_ANSWER_CHARS = 80
MAX_SYMBOLS = 8
"""Answers that are longer, or have more signs, brackets and fractions, count as wrong: parsing time grows exponentially
with these.
"""

MAX_FORMULA_SYMBOLS = 14
"""The same for formulas, which have more of them; what they may contain is limited in other ways."""

MAX_NESTED_POWER = 4
"""The same for powers of brackets within brackets, multiplied with each other: `((x+1)^2)^2` has 4."""

_NUMBER_TAIL_CHARS = 1000
_SIGN_AND_CURRENCY = re.compile(r"-\\?[$€£](?=[0-9.])")
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
    r"|(?:^|(?<=[\s=:~≈$€£*(\[{])|(?<![A-Za-z0-9.)\]}])(?=-)|(?<=-))-?\.[0-9]+(?!\.?[0-9])"
)
_JOINED_DIGITS = r"[0-9]+(?:(?:-[0-9]+)+|/[0-9]+/[0-9]+)"


@dataclass(frozen=True, slots=True)
class TaggedBlock:
    """The text of a completion between `<TAG>` and `</TAG>`."""

    content: str
    num_trailing_chars: int  # characters after the closing tag
    is_only_block: bool  # True if the text has no other opening or closing tag of this name


def _tags(text: str, tag: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"<(/?){re.escape(tag)}>", text, re.IGNORECASE | re.ASCII))


def last_tagged(text: str, tag: str) -> TaggedBlock | None:
    """The last `<tag>...</tag>` of a text, ignoring letter case, or None. Runs in linear time."""
    tags = _tags(text, tag)
    closing = next((match for match in reversed(tags) if match[1]), None)
    if closing is None:
        return None
    opening = next((match for match in reversed(tags) if not match[1] and match.end() <= closing.start()), None)
    if opening is None:
        return None
    return TaggedBlock(text[opening.end() : closing.start()], len(text) - closing.end(), len(tags) == 2)


def tagged_blocks(text: str, tag: str) -> list[str]:
    """The content of each `<tag>...</tag>` of a text, from an opening tag to the next closing one, ignoring case."""
    blocks: list[str] = []
    start: int | None = None
    for match in _tags(text, tag):
        if not match[1]:
            start = match.end() if start is None else start
        elif start is not None:
            blocks.append(text[start : match.start()])
            start = None
    return blocks


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` of a text, with balanced braces; None if there is no box or the last one
    is not closed."""
    openings = list(re.finditer(r"\\boxed *\{", text))
    if not openings:
        return None
    start = openings[-1].end()
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start : match.start()].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number of a text, such as `-1,234.5`, or None: without a currency sign after the minus sign, and `.5` as
    `0.5`.

    Digits inside a word (`m2`) do not count as a number, nor do those after the point that ends a sentence.
    """
    tail = _SIGN_AND_CURRENCY.sub("-", text[-_NUMBER_TAIL_CHARS:].replace("\N{MINUS SIGN}", "-"))
    numbers = _NUMBER.findall(tail)
    if not numbers:
        return None
    number: str = numbers[-1]
    return number.replace(".", "0.", 1) if number.lstrip("-").startswith(".") else number


def is_same_number(reference: str, answer: str) -> bool:
    r"""True if two numeric answers, plain or LaTeX, are equal in value: `1,234` and `\$1234.00`, `0.5` and
    `\frac{1}{2}`.

    Currency signs, per cent signs and trailing words are ignored. A few characters can make math-verify hang (a tower
    of powers, a factorial), and its timeout works only in the main thread. So it gets only short arithmetic without
    powers; any other answer counts as unequal. Dates, scores and telephone numbers are compared as text.
    """
    if _is_joined_digits(reference):
        return _plain_words(reference) == _plain_words(answer)
    return _is_equal(_parse_number(reference), _parse_number(answer))


def reference_answer(text: str) -> str:
    r"""The answer in a data set's solution: what follows the last `####`, else the content of the last `\boxed{}`, else
    all of it."""
    _, marker, tail = text.rpartition("####")
    if marker:
        return tail.strip()
    boxed = last_boxed(text)
    return text.strip() if boxed is None else boxed


def marked_answer(text: str) -> str | None:
    r"""What a completion marks as its answer: the last `\boxed{}`, else the last `<answer>` block, else what follows
    the last `####`."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    block = last_tagged(text, "answer")
    if block is not None:
        return block.content.strip()
    _, marker, tail = text.rpartition("####")
    return tail.strip() if marker else None


def is_same_latex(reference: str, text: str) -> bool:
    r"""True if math-verify finds the answer of a completion (see `marked_answer`; without a mark, its last formula) to
    equal a reference in LaTeX, or they are the same words. A date, score or telephone number must be the same text.

    It may take for ever, or all memory: to be called where the process can be killed.
    """
    marked = marked_answer(text)
    if marked is not None and _plain_words(reference) == _plain_words(marked):
        return True
    if _is_joined_digits(reference):
        return marked is None and re.findall(_JOINED_DIGITS, text)[-1:] == [_plain_words(reference)]
    found = _parse(text if marked is None else rf"\boxed{{{marked}}}", "first_match")
    return _is_equal(_parse(rf"\boxed{{{reference}}}", "first_match"), found)


def is_same_value(reference: str, answer: str) -> bool:
    r"""True if two answers are equal in value, as `0.5` and `\frac{1}{2}` or `x^2-1` and `(x-1)(x+1)`, or are the same
    words.

    Words may differ in letter case, blanks, `$` around them and `\text{}`. Short formulas alone: see `is_same_number`.
    """
    if _plain_words(reference) == _plain_words(answer):
        return True
    if max(len(reference), len(answer)) > MAX_ANSWER_CHARS or _is_joined_digits(reference):
        return False
    return is_same_number(reference, answer) or _is_same_formula(reference, answer)


@lru_cache(maxsize=4096)
def _is_same_formula(reference: str, answer: str) -> bool:
    parsed = _parse_formula(reference), _parse_formula(answer)
    return all(parsed) and _is_equal(*parsed)


def _is_equal(reference: list[Any], answer: list[Any]) -> bool:
    import math_verify

    return math_verify.verify(reference, answer, timeout_seconds=None)  # its timeout needs signals


def _is_joined_digits(reference: str) -> bool:
    """True for dates, scores and telephone numbers, such as `2020-01-05` and `3-2`: many have equal values."""
    return re.fullmatch(_JOINED_DIGITS, _plain_words(reference)) is not None


def _plain_words(answer: str) -> str:
    unwrapped = re.sub(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox) *\{([^{}]*)\}", r"\1", answer)
    return " ".join(unwrapped.strip().strip("$").rstrip(".").split()).casefold()


@lru_cache(maxsize=4096)
def _parse(latex: str, fallback_mode: str) -> list[Any]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout
    return math_verify.parse(latex, fallback_mode=fallback_mode, parsing_timeout=0)  # type: ignore[arg-type]


def _parse_number(answer: str) -> list[Any]:
    """SymPy forms of a numeric answer; an empty list if the answer is not numeric."""
    plain = _without_units(answer) if len(answer) <= MAX_ANSWER_CHARS else ""
    return _parse(rf"\boxed{{{plain}}}", "no_fallback") if _is_short_arithmetic(plain) else []


def _parse_formula(answer: str) -> list[Any]:
    """SymPy forms of a short formula; an empty list if it is none."""
    plain = answer.replace("\N{MINUS SIGN}", "-").strip().strip("$").strip()
    plain = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:! ]", " ", plain)
    plain = re.sub(r"^[A-Za-z] *=", "", plain).strip()
    is_short = len(plain) <= MAX_ANSWER_CHARS and _is_short_formula(plain)
    return _parse(rf"\boxed{{{plain}}}", "no_fallback") if is_short else []


def _without_units(answer: str) -> str:
    """`x = \\$1{,}234 \\text{ dollars}.` -> `1,234`."""
    plain = answer.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    plain = re.sub(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox) *\{([^{}]*)\}", r" \1", plain)  # unwrap
    plain = re.sub(r"\\[,;:! ]|~|\\q?quad\b", " ", plain)  # spaces of LaTeX
    plain = re.sub(r"\\?[$€£%]", "", plain)
    plain = re.sub(r"(?<=[0-9]) +(?=[0-9]{3}(?![0-9]))", "", plain)  # 1 234 -> 1234
    plain = re.sub(r"^\s*[A-Za-z]\w* *=", "", plain)
    plain = re.sub(r"(?<=[0-9}).]) *[A-Za-z][A-Za-z .]*$", "", plain.strip())
    return plain.strip().rstrip(".").strip()


def _is_short_arithmetic(plain: str) -> bool:
    """True for numbers combined with a few signs, brackets and fractions: no powers, no letters."""
    symbol = r"[+\-*/=(){}]|\\(?:[dt]?frac|times|cdot|div|approx|left|right)(?![A-Za-z])"
    is_arithmetic = re.fullmatch(rf"(?:[0-9., ]|{symbol})+", plain) is not None
    return is_arithmetic and "**" not in plain.replace(" ", "") and len(re.findall(symbol, plain)) <= MAX_SYMBOLS


def _is_short_formula(plain: str) -> bool:
    """True for arithmetic with single letters, roots, small powers, pairs and intervals: no words or towers."""
    symbol = r"[+\-*/()\[\]{}^]|\\(?:[dt]?frac|sqrt|pi|infty|cup|times|cdot|div)(?![A-Za-z])"
    is_formula = re.fullmatch(rf"(?:[0-9., ]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|{symbol})+", plain) is not None
    compact = plain.replace(" ", "")
    # 10^{-12} and x^9, but of brackets, whose powers are multiplied out, only (x+1)^4
    powers = re.findall(r"(?<=[0-9])\^(?:-?[0-9]|\{-?[0-9]{1,2}\})(?![0-9^])", compact)
    powers += re.findall(r"(?<=[A-Za-z])\^(?:-?[0-9A-Za-z]|\{-?[0-9A-Za-z]\})(?![0-9^])", compact)
    powers += re.findall(r"(?<=[)}\]])\^(?:[1-4]|\{-?[1-4]\})(?![0-9^])", compact)
    is_small = "**" not in compact and len(powers) == compact.count("^") and _nested_power(compact) <= MAX_NESTED_POWER
    is_small = is_small and re.search("[Ee][-+]?[0-9]{3}", compact) is None  # 1E9999999999 is a number, with a power
    return is_formula and is_small and len(re.findall(symbol, plain)) <= MAX_FORMULA_SYMBOLS


def _nested_power(compact: str) -> int:
    """The largest product of the powers of brackets that contain each other."""
    inner = [1]  # for each bracket that is open, the largest product within it
    for match in re.finditer(r"[(\[{]|[)\]}](?:\^\{?-?([1-4]))?", compact):
        if match[0] in "([{":
            inner.append(1)
            continue
        product = int(match[1] or 1) * inner.pop()
        inner = inner or [1]
        inner[-1] = max(inner[-1], product)
    return max(inner)
