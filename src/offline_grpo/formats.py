"""Texts and numbers as records have them."""

from __future__ import annotations


def utf8(text: str) -> str:
    """The text with an escape for each half of a surrogate pair, which UTF-8 has no bytes for; JSON has the same
    escapes.
    """
    return text.encode(errors="backslashreplace").decode()


def significant(value: float, digits: int) -> float:
    """A number for people: 0.23, where the sum of 0.2 and 0.03 is 0.22999999999999998."""
    return float(f"{value:.{digits}g}")
