"""TRL's GRPOTrainer as the other arm of a benchmark: its settings, and a timer that runs our arm between TRL's updates."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import Timings
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback

WARMUP_BLOCKS = 2


class PeakMemory:
    """Peak increase of this process's resident memory since `start`, in bytes (Linux). Each `stop` appends a value to `rises_bytes`.

    Each start first returns freed memory that the C library holds to the system, and resets the kernel's high-water mark.
    """

    def __init__(self) -> None:
        self.rises_bytes: list[int] = []
        self._held_bytes = 0

    def start(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS, see proc(5)
        self._held_bytes = _status_bytes("VmRSS")

    def stop(self) -> None:
        self.rises_bytes.append(_status_bytes("VmHWM") - self._held_bytes)


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class Interleave(TrainerCallback):
    """Times TRL's training in blocks of updates, inside `trainer.train()`, and runs our arm between them: TRL ours ours TRL TRL ours ...

    TRL's time runs from the end of one update to the end of the next, so it includes all work of its loop.

    Args:
        ours: runs one block of our arm.
        updates_per_block: number of TRL updates per block.
    """

    def __init__(self, ours: Callable[[], object], *, updates_per_block: int) -> None:
        self._ours = ours
        self._updates_per_block = updates_per_block
        self._seconds: dict[str, list[float]] = {"trl": [], "ours": []}
        self._memory = {"trl": PeakMemory(), "ours": PeakMemory()}
        self._started_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start("trl")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._updates_per_block:
            return
        self._stop("trl")
        if len(self._seconds["trl"]) % 2:
            for _ in range(2):
                self._start("ours")
                self._ours()
                self._stop("ours")
        self._start("trl")

    def _start(self, arm: str) -> None:
        self._memory[arm].start()
        self._started_s = time.perf_counter()

    def _stop(self, arm: str) -> None:
        self._seconds[arm].append(time.perf_counter() - self._started_s)
        self._memory[arm].stop()

    @property
    def timings(self) -> Timings:
        """The times of all blocks after the warm-up; block i of both arms ran close together in time."""
        return Timings({arm: seconds[WARMUP_BLOCKS:] for arm, seconds in self._seconds.items()})

    def peak_extra_bytes(self, arm: str) -> int:
        """The largest increase of resident memory during one block after the warm-up."""
        return max(self._memory[arm].rises_bytes[WARMUP_BLOCKS:])


class MethodTimes:
    """Wall-clock seconds of each call to the given methods of an object. The methods may call each other."""

    def __init__(self, target: Any, names: Sequence[str]) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        for name in names:
            setattr(target, name, self._timed(name, getattr(target, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[name].append(time.perf_counter() - started)

        return call


def make_trainer(
    model: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    reward: Callable[..., list[float | None]],
    callbacks: Sequence[TrainerCallback],
    *,
    rollout_func: Callable[..., Any] | None = None,
    **settings: Any,
) -> Any:
    """A GRPOTrainer that only trains, on the CPU in float32: no evaluation, no checkpoints, no output; metrics stay in memory.

    Args:
        rows: rows of the dataset, visited in this order, each with a "prompt".
        settings: GRPOConfig settings that override those chosen here.
    """
    _silence()
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    chosen: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "steps",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "dataloader_pin_memory": False,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
    }
    config = GRPOConfig(**chosen | settings)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        rollout_func=rollout_func,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _silence() -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore", module="trl|transformers|torch|accelerate")
    for name in ("trl", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
