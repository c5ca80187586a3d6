"""What is printed to those who have installed the package."""

import runpy
import shutil
import sys
from pathlib import Path

import pytest

from offline_grpo import installed


@pytest.mark.parametrize(("found", "command"), [("other", "uv pip"), ("pip", "pip")])
def test_an_extra_is_installed_by_what_the_environment_has(
    found: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = shutil.copy(installed.__file__, tmp_path)
    (tmp_path / found).mkdir()
    (tmp_path / found / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    outside_a_clone = runpy.run_path(script)
    assert outside_a_clone["install_command"]("vllm") == f"{command} install 'offline-grpo[vllm]'"
