"""Files that appear whole or not at all, and folders that do not outlive their process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offline_grpo.disk import OwnFolder, sweep, write_whole


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train_iter_000.json"
    write_whole(path, "old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def run_and_kill(code: str, folder: Path) -> None:
    """Python code in a process that ends by SIGKILL."""
    prelude = "import os, pathlib, sys\nfrom offline_grpo.disk import *\nfolder = pathlib.Path(sys.argv[1])\n"
    end = "\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", prelude + code + end, str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "checkpoints" / "iter_000").mkdir(parents=True)
    kept = tmp_path / "checkpoints" / "iter_000" / "model.safetensors"
    kept.write_bytes(b"x")
    hidden = tmp_path / "checkpoints" / ".writing_iter_001"
    (hidden / "trainer").mkdir(parents=True)
    # of a run that goes on, below `hydra.run.dir=.`
    of_another = tmp_path / "outputs" / "run" / "checkpoints" / ".writing_iter_002"
    of_another.mkdir(parents=True)
    dies = "os.fsync = lambda _: os.kill(os.getpid(), 9)\n"
    run_and_kill(f"{dies}write_whole(folder / 'metrics' / 'a.json', 'half')", tmp_path)
    assert len(list((tmp_path / "metrics").iterdir())) == 1
    sweep(tmp_path)
    assert [path for path in sorted(tmp_path.rglob("*")) if path.is_file()] == [kept]
    assert not hidden.exists()
    assert of_another.exists()


def test_folders_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    (tmp_path / ".tiny-of-another-kind").write_text("a file")
    run_and_kill("mine = OwnFolder(folder, '.tiny-')\n(mine.path / 'model').mkdir()", tmp_path)
    [left] = [path for path in tmp_path.iterdir() if path.is_dir()]
    with OwnFolder(tmp_path, ".tiny-") as first, OwnFolder(tmp_path, ".tiny-") as second:
        assert not left.exists()
        assert first != second
        assert first.is_dir()
        assert first.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.iterdir()] == [".tiny-of-another-kind"]
