"""Extracts the answer from a completion and compares it with the reference. No function here raises or hangs, whatever
the text.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_ANSWER_CHARS = 80
MAX_SYMBOLS = 14
"""Formulas that are longer, or have more signs, brackets and commands, are compared as words alone: parsing time grows
exponentially with these.
"""

MAX_POWER = 8
"""The same for powers of brackets, all multiplied: `((x+1)^2)^2` has 4."""

_NUMBER_TAIL_CHARS = 1000
_SIGN_AND_CURRENCY = re.compile(r"-\\?[$€£](?=[0-9.])")
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
    r"|(?:^|(?<=[\s=:~≈$€£*(\[{])|(?<![A-Za-z0-9.)\]}])(?=-)|(?<=-))-?\.[0-9]+(?!\.?[0-9])"
)
_JOINED_DIGITS = r"[0-9]+(?:(?:-[0-9]+)+|/[0-9]+/[0-9]+|(?::[0-9]+)+|_\{?[0-9]+\}?)"
_DECIMAL = r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|-?\.[0-9]+"
_FORMULA = r"(?:(?<!\\)\$+((?:[^$\\]|\\.)+)\$|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\])"
_SIGNS = {"\N{MINUS SIGN}": "-", "°": r"^\circ ", "π": r"\pi ", "∞": r"\infty ", "\N{UNION}": r"\cup ", "±": r"\pm "}


@dataclass(frozen=True, slots=True)
class TaggedBlock:
    """The text of a completion between `<TAG>` and `</TAG>`."""

    content: str
    num_trailing_chars: int  # characters after the closing tag
    is_only_block: bool  # True if the text has no other opening or closing tag of this name


def last_tagged(text: str, tag: str) -> TaggedBlock | None:
    """The last `<tag>...</tag>` of a text, ignoring letter case, or None. Runs in linear time."""
    # The last closing tag, and the last opening one before it.
    tags = list(re.finditer(rf"<(/?){re.escape(tag)}>", text, re.IGNORECASE | re.ASCII))
    closing = next((match for match in reversed(tags) if match[1]), None)
    end = -1 if closing is None else closing.start()
    opening = next((match for match in reversed(tags) if not match[1] and match.end() <= end), None)
    if closing is None or opening is None:
        return None
    return TaggedBlock(text[opening.end() : end], len(text) - closing.end(), len(tags) == 2)


def tagged_blocks(text: str, tag: str) -> list[str]:
    """The content of each `<tag>...</tag>` of a text, from an opening tag to the next closing one, ignoring case."""
    blocks: list[str] = []
    start: int | None = None
    for match in re.finditer(rf"<(/?){re.escape(tag)}>", text, re.IGNORECASE | re.ASCII):
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


def last_plain_number(text: str) -> str | None:
    """`last_number` without commas, such as `-1234.5`."""
    number = last_number(text)
    return None if number is None else number.replace(",", "")


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


def is_answer(reference: str, text: str, *, any_latex: bool = False) -> bool:
    """Whether a completion has the reference as its answer: what it marks or states, or all of it; where none of these
    is a formula, its last number, or date. `any_latex`: see `is_same_value`.
    """
    marked = marked_answer(text)
    if marked is not None:
        return is_same_value(reference, marked, any_latex=any_latex)
    # What it states: the formula or the sentence that follows the last `answer is` or `answer:`, otherwise the last
    # formula; nothing where a number comes after that.
    asked = re.match(r"(?is).*\banswer\**(?: is|:)[:*\s]*(.*)", text)
    rest = text if asked is None else asked[1]
    follows = re.match(_FORMULA, rest, re.DOTALL) if asked else None
    if formula := follows or re.match(rf".*{_FORMULA}", rest, re.DOTALL):
        stated, end = formula[formula.lastindex or 0], formula.end()
    else:
        stated = re.split(r"\.?\s*(?:\n|\Z)|\.\s", rest, maxsplit=1)[0] if asked else ""
        end = len(stated)
    found = [text.strip(), *([stated] if stated and (follows or last_number(rest[end:]) is None) else [])]
    # A sentence is no LaTeX: its words would be products of letters.
    for each in found:
        has_words = re.search(r"(?<![\\A-Za-z{])[A-Za-z]{3}", each) is not None
        if is_same_value(reference, each, any_latex=any_latex and not has_words):
            return True
    # A formula that is another one is wrong, whatever number it ends with.
    if any(_short_formula(each) and not _is_text(each) for each in found) or "\\" in "".join(found[1:]):
        return False
    ends = [last_number(text), *re.findall(_JOINED_DIGITS, text)[-1:]]
    return any(end is not None and is_same_value(reference, end) for end in ends)


def is_same_value(reference: str, answer: str, *, any_latex: bool = False) -> bool:
    r"""True if two answers are equal in value, as `0.5` and `\frac{1}{2}` or `x^2-1` and `(x-1)(x+1)`, or are the same
    words.

    Words may differ in letter case, blanks, `$` around them and `\text{}`; numbers in currency and per cent signs and
    units. Dates, scores, telephone numbers and words are compared as text. A few characters can make math-verify hang,
    such as a tower of powers, and its timeout works only in the main thread: so it gets short formulas alone.

    Args:
        any_latex: it gets LaTeX of any kind and length too. That may take for ever, or all memory: to be used where the
            process can be killed.
    """
    if _words(reference) == _words(answer):
        return True
    if _is_text(reference):
        return False
    plain = _short_formula(reference), _short_formula(answer)
    attempts: list[tuple[str, str, str]] = []
    if all(re.fullmatch(_DECIMAL, each) for each in plain) and not all("." in each for each in plain):
        if Fraction(plain[0].replace(",", "")) == Fraction(plain[1].replace(",", "")):
            return True
    elif all(plain):
        attempts.append((*plain, "no_fallback"))
    if any_latex:
        attempts.append((reference, answer, "first_match"))
    for *both, fallback_mode in attempts:
        import math_verify  # which takes a second

        one, other = (_parse(rf"\boxed{{{each}}}", fallback_mode) for each in both)
        if math_verify.verify(one, other, timeout_seconds=None):  # its timeout needs signals
            return True
    return False


def _is_text(answer: str) -> bool:
    """True for what many others are equal to in value: words (`east` is a product of letters), dates and scores, such
    as `2020-01-05` and `3-2`, times, ratios and numbers in another base.
    """
    text = rf"(?:{_JOINED_DIGITS})(?: ?[ap]\.?m)?|[^\W\d_]{{3,}}(?: [^\W\d_]+)*"
    return re.fullmatch(text, _plain(answer)) is not None


def _plain(answer: str) -> str:
    """LaTeX without what changes its looks alone."""
    plain = answer.translate(str.maketrans(_SIGNS))
    plain = re.sub(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox) *\{([^{}]*)\}", r" \1", plain)  # unwrap
    plain = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", "", plain).replace("{,}", ",")
    plain = re.sub(r"\\([dt])frac", r"\\frac", re.sub(r"(?<!\\)\\[,;: ]|~|\\q?quad\b", " ", plain))
    plain = re.sub(r"^(?:\*\*|\$+|\\[(\[])|(?:\*\*|(?<!\\)\$+|\\[)\]])$", "", " ".join(plain.split()).rstrip("."))
    return plain.strip().rstrip(".")


def _words(answer: str) -> str:
    """Equal for answers in the same words. Blanks count between digits alone."""
    plain = re.sub(r"(?<![0-9]) | (?![0-9])", "", re.sub(r"([_^])\{(\w)\}", r"\1\2", _plain(answer)))
    return re.sub(r"^\((\w)\)$", r"\1", plain).casefold()


@lru_cache(maxsize=4096)
def _parse(latex: str, fallback_mode: str) -> list[Any]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing timeout
    return math_verify.parse(latex, fallback_mode=fallback_mode, parsing_timeout=0)  # type: ignore[arg-type]


def _short_formula(answer: str) -> str:
    """A short formula without `x =`, units, currency and per cent signs: `x = \\$1{,}234 \\text{ dollars}.` -> `1,234`.
    Empty if the answer is none: it may have single letters, roots, small powers, pairs, intervals, sets and matrices,
    and no words or towers.
    """
    if len(answer) > 4 * MAX_ANSWER_CHARS:
        return ""
    # Without signs of currency and the like, blanks between digits, `x =`, and units.
    plain = re.sub(r"\\?[$€£%]|\^? *\{? *\\(?:circ|degree) *\}?", "", _plain(answer))
    plain = re.sub(r"(?<=[0-9]) +(?=[0-9]{3}(?![0-9]))", "", plain)  # 1 234 -> 1234
    plain = re.sub(r"^(?:[A-Za-z]\w*)? *(?:=|\\in(?![A-Za-z]))", "", plain.strip())
    units = r"(?<=[0-9}).]) *(?:[A-Za-z]{2}[A-Za-z .]*| [A-Za-z])(?:\^\{?[0-9]\}?)?$"
    plain = re.sub(units, "", plain).strip().rstrip(".").strip()
    # What is left must be of the signs, commands and single letters that math-verify is quick with.
    symbol = r"[+\-*/()\[\]{}^=&]|\\[{}\\]|\\(?:begin|end)\{[bp]matrix\}"
    symbol += r"|\\(?:frac|sqrt|pi|infty|cup|pm|times|cdot|div|approx|leq?|geq?)(?![A-Za-z])"
    is_formula = re.fullmatch(rf"(?:[0-9., ]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|{symbol})+", plain) is not None
    is_formula = is_formula and re.search(r"[0-9] [0-9]", plain) is None
    compact = plain.replace(" ", "")
    # 10^{-12} and x^9, but of brackets, whose powers are multiplied out, only (x+1)^4
    powers = re.findall(r"(?<=[0-9])\^(?:-?[0-9]|\{-?[0-9]{1,2}\})(?![0-9^])", compact)
    powers += re.findall(r"(?<=[A-Za-z])\^(?:-?[0-9A-Za-z]|\{-?[0-9A-Za-z]\})(?![0-9^])", compact)
    powers += re.findall(r"(?<=[)}\]])\^(?:[1-4]|\{-?[1-4]\})(?![0-9^])", compact)
    product = math.prod(map(int, re.findall(r"[)\]}]\^\{?-?([1-4])", compact)))
    is_small = "**" not in compact and len(powers) == compact.count("^") and product <= MAX_POWER
    is_small = is_small and re.search("[Ee][-+]?[0-9]{3}", compact) is None  # 1E9999999999 is a number, with a power
    is_short = len(plain) <= MAX_ANSWER_CHARS and len(re.findall(symbol, plain)) <= MAX_SYMBOLS
    return plain if is_formula and is_small and is_short else ""
