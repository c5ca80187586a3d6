"""What is printed to those who have installed the package."""

import runpy
import shutil
from pathlib import Path

import pytest

from offline_grpo import installed


@pytest.mark.parametrize(("found", "command"), [(None, "uv pip"), (object(), "pip")])
def test_an_extra_is_installed_by_what_the_environment_has(
    found: object, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", {"pip": found}.get)
    outside_a_clone = runpy.run_path(str(shutil.copy(installed.__file__, tmp_path)))
    assert outside_a_clone["install_command"]("vllm") == f"{command} install 'offline-grpo[vllm]'"
