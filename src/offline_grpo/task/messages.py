"""The messages of problems that a task writes itself."""

from __future__ import annotations

from offline_grpo.errors import require
from offline_grpo.types import Message, Problem


def check_system_prompt(system_prompt: str | None) -> None:
    """Raise ConfigError for one that says nothing."""
    fix = "is blank; set it to null to send no system message"
    require(system_prompt is None or bool(system_prompt.strip()), "task.system_prompt", repr(system_prompt), fix)


def prompt_key(problem: Problem) -> tuple[tuple[str, str], ...]:
    """Equal for problems that ask the same."""
    return tuple((message["role"], message["content"]) for message in problem.messages)


def asked(prompt: str, system_prompt: str | None) -> tuple[Message, ...]:
    """The user's message, after the system message if there is one."""
    system: tuple[Message, ...] = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
    return (*system, {"role": "user", "content": prompt})
