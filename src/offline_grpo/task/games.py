"""Environments that come with the package and need no network, by the contract of TRL's `environment_factory`."""

from __future__ import annotations

from typing import Any

from offline_grpo.task.answers import last_plain_number
from offline_grpo.task.countdown import evaluate

MOST_GUESSES = 6
"""Five are enough for 31 numbers, for whom always halves what is left."""


class Calculator:
    """A question, and a calculator, whose last result is to be the answer."""

    def reset(self, answer: int, **row: Any) -> None:
        self.answer, self.result = answer, None

    def calculate(self, expression: str) -> str:
        """Calculate.

        Args:
            expression: Such as 3*(14+5).
        """
        found = evaluate(str(expression))
        if found is None:
            raise ValueError("not calculated: write whole numbers with + - * / and brackets, such as 3*(14+5)")
        self.result = found[0]
        return str(self.result)

    def get_reward(self) -> float:
        return float(self.result == self.answer)


class HigherLower:
    """A number from 1 to 31, which is to be guessed. TRL, which knows no `respond`, cannot play it."""

    def reset(self, number: int, **row: Any) -> str:
        self.number, self.left, self.is_found = number, MOST_GUESSES, False
        return "I think of a number from 1 to 31. Guess it. Say a number and nothing else."

    def respond(self, text: str) -> str | None:
        guess = float(last_plain_number(text) or "nan")
        self.left, self.is_found = self.left - 1, guess == self.number
        if self.is_found or not self.left:
            return None
        return "Higher." if guess < self.number else "Lower." if guess > self.number else "Say a number."

    def get_reward(self) -> float:
        return float(self.is_found)
