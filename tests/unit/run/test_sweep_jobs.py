"""Whose folder is whose among the jobs of a sweep, and how long that is remembered."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from offline_grpo.errors import ConfigError
from offline_grpo.run import sweep_jobs


def test_two_jobs_of_a_sweep_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would overwrite what the first has written, and the table would lack it."""

    def begin(number: int, subdir: str) -> None:
        found = SimpleNamespace(
            sweep=SimpleNamespace(dir=str(tmp_path), subdir=subdir), job=SimpleNamespace(num=number)
        )
        monkeypatch.setattr(sweep_jobs.HydraConfig, "get", lambda: found)
        sweep_jobs.take_folder()

    begin(0, "lr/1e-4")
    begin(1, "lr/1e-3")
    begin(0, "lr/1e-4")  # a launcher that starts it again
    with pytest.raises(
        ConfigError,
        match=r"^hydra.sweep.subdir=lr/1e-3: job 1 of the sweep has that folder; let it have \$\{hydra.job.num\}",
    ):
        begin(2, "lr/1e-3")


START = """
import os, sys
from types import SimpleNamespace
from omegaconf import OmegaConf
from offline_grpo.run import sweep_jobs

hydra = {"sweep": {"dir": "sweep", "subdir": "0"}, "job": {"num": 0}, "launcher": {"_target_": "hydra.Basic"}, "overrides": {"task": []}}
config = OmegaConf.create({"hydra": hydra})
sweep_jobs.HydraConfig.get = lambda: config.hydra
sweep_jobs.SweepJobs().on_multirun_start(config)
print(*sorted(path.name for path in sweep_jobs.Path("sweep").iterdir()))
sweep_jobs.take_folder()
sweep_jobs.record_failure(1)
"""


def marks_of_a_sweep(folder: Path, end: str) -> tuple[str, list[str]]:
    """What a sweep with a failed job finds in its folder, and what it leaves there when it ends so."""
    done = subprocess.run([sys.executable, "-c", START + end], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    return done.stdout.strip(), sorted(path.name for path in (folder / "sweep").iterdir())


def test_nothing_is_remembered_of_a_sweep_that_has_ended(tmp_path: Path) -> None:
    """However it ends: a failure of an earlier start is none of the next one's."""
    (tmp_path / "sweep").mkdir()
    killed = "os._exit(130)"
    assert marks_of_a_sweep(tmp_path, killed) == ("", [sweep_jobs.FAILED, sweep_jobs.TAKEN])
    assert marks_of_a_sweep(tmp_path, "sys.exit(130)") == ("", [])  # as one that is interrupted
    assert marks_of_a_sweep(tmp_path, "if os.fork(): os.wait()\nsys.exit(130)") == ("", [])


def test_a_forked_process_that_ends_leaves_the_marks(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    end = "if not os.fork(): sys.exit()\nos.wait(); os._exit(130)"
    assert marks_of_a_sweep(tmp_path, end) == ("", [sweep_jobs.FAILED, sweep_jobs.TAKEN])
