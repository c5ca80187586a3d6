"""Runs of the whole application in child processes that can be killed, forked from a server that has imported everything already."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factories import compose_config

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["offline_grpo.run.app", "children"])

SMALL = (
    "model.tiny.warm_start_steps=60",
    "model.tiny.hidden_size=32",
    "task.format_weight=0.5",
    "num_threads=1",
    "train.iterations=4",
    "train.updates_per_iteration=2",
    "train.drop_zero_signal_groups=false",
    "data.problems_per_iteration=4",
    "data.rollouts_per_problem=4",
    "eval.num_ids=4",
    "eval.interval=2",
    "eval.replicates=2",
    "eval.ks=[1,2]",
    "eval.bootstrap_samples=10",
    "checkpoint.save_interval=2",
)
"""Four iterations of everything in a few seconds; the model has learnt to write integers sometimes, so that rewards differ."""


@dataclass(frozen=True)
class Kill:
    """SIGKILL, or another signal, to itself at the `count`-th call of `module:Class.method`, before it or after it."""

    where: str
    count: int
    when: str = "before"
    number: int = signal.SIGKILL


def run_in_child(output_dir: Path, *overrides: str, kill: Kill | None = None, timeout_s: float = 120, fresh: bool = False) -> int:
    """`app.run` with these overrides in a process of its own; what it printed goes to `output_dir`.txt. Returns its exit code.

    Args:
        fresh: start the process anew and not from the server, whose imports make CUDA unusable in a fork.
    """
    process = (multiprocessing.get_context("spawn") if fresh else CONTEXT).Process(
        target=_child, args=(str(output_dir), list(overrides), kill)
    )
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"the run took longer than {timeout_s} s:\n{printed(output_dir)}")
    assert process.exitcode is not None
    return process.exitcode


def printed(output_dir: Path) -> str:
    """What the child for this folder printed, the newest last."""
    return Path(f"{output_dir}.txt").read_text()


def _child(output_dir: str, overrides: list[str], kill: Kill | None) -> None:
    from offline_grpo.run import app, cli

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whoever started the tests
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Path(output_dir).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{output_dir}.txt", "a", buffering=1) as output:
        sys.stdout = sys.stderr = output
        if kill is not None:
            _arm(kill)
        try:
            app.run(compose_config(*overrides), Path(output_dir))
        except cli.EXPECTED as error:
            cli.leave(error)
        except Exception:
            traceback.print_exc()
            sys.exit(99)


def _arm(kill: Kill) -> None:
    module, _, path = kill.where.partition(":")
    owner_name, _, method_name = path.partition(".")
    owner = getattr(importlib.import_module(module), owner_name)
    original = getattr(owner, method_name)
    calls = 0

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.count and kill.when == "before":
            os.kill(os.getpid(), kill.number)
        result = original(*args, **kwargs)
        if calls == kill.count and kill.when == "after":
            os.kill(os.getpid(), kill.number)
        return result

    setattr(owner, method_name, method)


def metrics_of(run_dir: Path) -> dict[str, dict[str, float]]:
    """File name -> metrics, without what depends on the clock."""
    return {
        path.name: {key: value for key, value in json.loads(path.read_text()).items() if not key.startswith(("time/", "perf/"))}
        for path in sorted((run_dir / "metrics").glob("*.json"))
    }


def weights_of(run_dir: Path) -> dict[str, bytes]:
    """Checkpoint -> the bytes of its model file."""
    return {path.parent.name: path.read_bytes() for path in sorted(run_dir.glob("checkpoints/iter_*/*.safetensors"))}
