"""How this copy of the project is started, and how it gets an extra: a clone by uv, a package by its own commands."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

PIP = "pip" if PathFinder.find_spec("pip") else "uv pip"
"""What installs packages into this environment: uv makes environments without pip. `importlib.util.find_spec` would ask
setuptools, which gives up its own distutils when it is asked for pip.
"""
IS_CLONE = (Path(__file__).parents[2] / "uv.lock").is_file()


def run_command(extra: str | None = None) -> str:
    """What starts a run, in an environment with this extra."""
    if not IS_CLONE:
        return "offline-grpo"
    return f"uv run --extra {extra} run_grpo.py" if extra else "uv run run_grpo.py"


def module_command(module: str) -> str:
    return f"{'uv run' if IS_CLONE else 'python'} -m offline_grpo.{module}"


def install_command(extra: str | None = None) -> str:
    """What installs all packages that are needed, and those of an extra."""
    if not IS_CLONE:
        return f"{PIP} install 'offline-grpo[{extra}]'" if extra else f"{PIP} install offline-grpo"
    return f"uv sync --extra {extra}" if extra else "uv sync"
