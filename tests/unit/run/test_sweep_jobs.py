"""Whose folder is whose among the jobs of a sweep."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from offline_grpo.errors import ConfigError
from offline_grpo.run import sweep_jobs


def test_two_jobs_of_a_sweep_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would overwrite what the first has written, and the table would lack it."""

    def begin(number: int, subdir: str) -> None:
        found = SimpleNamespace(sweep=SimpleNamespace(dir=str(tmp_path), subdir=subdir), job=SimpleNamespace(num=number))
        monkeypatch.setattr(sweep_jobs.HydraConfig, "get", lambda: found)
        sweep_jobs.take_folder()

    begin(0, "lr/1e-4")
    begin(1, "lr/1e-3")
    begin(0, "lr/1e-4")  # a launcher that starts it again
    with pytest.raises(
        ConfigError, match=r"^hydra.sweep.subdir=lr/1e-3: job 1 of the sweep has that folder; let it have \$\{hydra.job.num\}"
    ):
        begin(2, "lr/1e-3")
