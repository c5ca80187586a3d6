"""Extracts the answer from a completion and compares it with the reference. No function here raises or hangs, whatever the text."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_ANSWER_CHARS = 80
MAX_SYMBOLS = 8
"""Answers that are longer, or have more signs, brackets and fractions, count as wrong: parsing time grows exponentially with these."""

_NUMBER_TAIL_CHARS = 1000


@dataclass(frozen=True, slots=True)
class TaggedBlock:
    """The text of a completion between `<TAG>` and `</TAG>`."""

    content: str
    num_trailing_chars: int  # characters after the closing tag
    is_only_block: bool  # True if the text has no other opening or closing tag of this name


def last_tagged(text: str, tag: str) -> TaggedBlock | None:
    """The last `<tag>...</tag>` of a text, ignoring letter case, or None. Runs in linear time."""
    tags = list(re.finditer(rf"<(/?){re.escape(tag)}>", text, re.IGNORECASE | re.ASCII))
    closing = next((match for match in reversed(tags) if match[1]), None)
    if closing is None:
        return None
    opening = next((match for match in reversed(tags) if not match[1] and match.end() <= closing.start()), None)
    if opening is None:
        return None
    return TaggedBlock(text[opening.end() : closing.start()], len(text) - closing.end(), len(tags) == 2)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` of a text, with balanced braces; None if there is no box or the last one is not closed."""
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
    """The last number of a text, such as `-1,234.5`, or None. Digits inside a word (`m2`) do not count as a number."""
    number = r"(?<![A-Za-z0-9.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
    numbers = re.findall(number, text[-_NUMBER_TAIL_CHARS:])
    return numbers[-1] if numbers else None


def is_same_number(reference: str, answer: str) -> bool:
    r"""True if two numeric answers, plain or LaTeX, are equal in value: `1,234` and `\$1234.00`, `0.5` and `\frac{1}{2}`.

    Currency signs, per cent signs and trailing words are treated as units and ignored. math-verify does the comparison. A few characters
    can make it hang (a tower of powers, a factorial, nested parentheses), and its own timeout works only in the main thread. So it gets
    only short arithmetic without powers; any other answer counts as unequal.
    """
    import math_verify

    # None switches off the signal-based timeout.
    return math_verify.verify(_parse_number(reference), _parse_number(answer), timeout_seconds=None)


@lru_cache(maxsize=4096)
def _parse_number(answer: str) -> list[Any]:
    """SymPy forms of a numeric answer; an empty list if the answer is not numeric."""
    plain = _without_units(answer) if len(answer) <= MAX_ANSWER_CHARS else ""
    if not _is_short_arithmetic(plain):
        return []
    import math_verify

    # math-verify warns about the missing timeout; `_is_short_arithmetic` makes it unnecessary.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify.parse(rf"\boxed{{{plain}}}", fallback_mode="no_fallback", parsing_timeout=0)


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
