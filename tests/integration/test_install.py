"""The package where Python is too old, and what a wheel of it has. `.ci/run` installs one and trains with it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from offline_grpo.config import compose

ROOT = Path(__file__).parents[2]


def test_an_old_python_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(
        SystemExit, match=r"^error: offline-grpo needs Python 3.11, 3.12 or 3.13, and this is .*`uv run run_grpo.py`"
    ):
        runpy.run_path(str(ROOT / "run_grpo.py"), run_name="__main__")


def test_the_configuration_of_a_checkout_is_its_own_and_local_settings_are_in_no_wheel() -> None:
    assert compose.folder() == ROOT / "conf"
    subprocess.run(["git", "check-ignore", "-q", "conf/local/default.yaml"], cwd=ROOT, check=True)  # as hatch does


def test_the_commands_are_there() -> None:
    found = {entry.name: entry for entry in entry_points(group="console_scripts") if "offline_grpo" in entry.value}
    assert found.keys() == {"offline-grpo", "offline-grpo-evaluate"}
    assert all(callable(entry.load()) for entry in found.values())
