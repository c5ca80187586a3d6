"""Rank and world size, before torch is imported; starts the processes that `accelerate launch` did not."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import psutil

typed = sys.argv[1:]
"""The command-line arguments as typed."""


def is_main() -> bool:
    """Whether this is rank 0, from the launcher's environment variables."""
    return os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """The world size, from the launcher's environment variables."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start_missing_processes() -> None:
    """Replace this process with N torchrun processes, if `accelerate launch` was asked for N processes and started only
    this one: accelerate 1.15 does so, without a warning, unless it finds several accelerators or an MPI launcher.
    """
    if "LOCAL_RANK" in os.environ or "RANK" in os.environ:
        return
    parent = psutil.Process().parent()
    num_processes = asked_for(parent.cmdline()) if parent is not None else 1
    if num_processes == 1:
        return
    import torch  # takes seconds; most calls return before this line

    if torch.cuda.is_available():
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    os.execv(sys.executable, [*torchrun, *sys.argv])


def asked_for(command: Sequence[str]) -> int:
    """The `--num_processes` of an `accelerate launch` command line; 1 for any other command.

    Example: `["python", "/bin/accelerate", "launch", "--num_processes", "2", "run_grpo.py"]` -> 2.
    """
    if not any(os.path.basename(word).startswith("accelerate") for word in command[:3]):
        return 1
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", type=int, default=1)
    return parser.parse_known_args(command)[0].num_processes
