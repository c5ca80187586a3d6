"""The package where there is no checkout, and where Python is too old."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import sysconfig
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


def test_the_configuration_of_a_checkout_is_its_own() -> None:
    assert compose.folder() == ROOT / "conf"


@pytest.mark.slow
def test_a_wheel_trains_outside_a_checkout(tmp_path: Path) -> None:
    checkout, work, python = tmp_path / "checkout", tmp_path / "work", tmp_path / "venv" / "bin" / "python"
    work.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in tracked.splitlines():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "conf" / "local").mkdir()
    (checkout / "conf" / "local" / "default.yaml").write_text("# @package _global_\nseed: 7\n")
    subprocess.run(["uv", "build", "-q", "--wheel", "-o", str(tmp_path), str(checkout)], check=True)
    shutil.rmtree(checkout)

    subprocess.run(["uv", "venv", "-q", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    [wheel] = tmp_path.glob("*.whl")
    subprocess.run(["uv", "pip", "install", "-q", "--no-deps", "--python", str(python), str(wheel)], check=True)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )  # its own .pth files, such as that of this checkout, do not count

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=work, capture_output=True, text=True, check=False)

    command = str(python.parent / "offline-grpo")
    assert run(str(python), "-c", "import offline_grpo; print(offline_grpo.__path__[0])").stdout.strip() == str(
        site / "offline_grpo"
    )
    assert "\nseed: 0\n" in run(str(python), "-m", "offline_grpo", "--cfg", "job", "train.lr=0.5").stdout.join("\n\n")
    refused = run(command, "train.lr=-1")
    assert (refused.returncode, refused.stderr) == (2, "error: train.lr=-1.0: must be above 0 and finite\n")
    assert list(work.iterdir()) == []

    named = run(f"{command}-evaluate", "task=arithmetic")
    assert (named.returncode, named.stderr.startswith("error: MODEL: 0 are named")) == (2, True), named.stderr
