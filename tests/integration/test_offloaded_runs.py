"""Whole runs with masters and optimizer state in the host's memory: as those without, killed and resumed;
test_processes.py has two processes.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from runs import SMALL, Kill, metrics_of, printed, run_in_child, weights_of

RUN = (*SMALL, "train.precision=bf16", "train.grad_clip=0.05")
OFFLOAD = "train.optimizer.offload=true"


@pytest.mark.slow
def test_a_killed_and_resumed_run_with_offload_ends_as_one_without(tmp_path: Path) -> None:
    """On a CPU both use the same kernel. Resumed with offload, and, from the same checkpoint, without."""
    cache, resident = f"cache_dir={tmp_path}/cache", tmp_path / "resident"
    assert run_in_child(resident, cache, *RUN) == 0, printed(resident)
    killed, other = tmp_path / "offloaded", tmp_path / "goes_on_resident"
    kill = Kill("offline_grpo.train.optimizer:OffloadedAdamW.step", 6)
    assert run_in_child(killed, cache, OFFLOAD, *RUN, kill=kill) == -signal.SIGKILL, printed(killed)
    shutil.copytree(killed, other)
    for run, more in ((killed, (OFFLOAD,)), (other, ())):
        assert run_in_child(tmp_path / "fresh", f"resume={run}", *RUN, *more) == 0, printed(tmp_path / "fresh")
        assert metrics_of(run) == metrics_of(resident)
        assert weights_of(run) == weights_of(resident)
