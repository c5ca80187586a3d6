"""TRL's GRPOTrainer as the other arm of a benchmark: its settings, a timer that runs our arm between its updates, and
trials of one arm.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import tempfile
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Timings, wait_for_device
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback

WARMUP_BLOCKS = 2


class Trial(TrainerCallback):
    """Two updates of one arm, alone on the machine and on the same batch: what the first computed, and time and peak
    memory of the second.

    Attributes:
        settings: of the arm, what is tried.
        loss, gradient_norm: of the first update; whoever runs it sets them.
        gradient: of the first update, clipped, on the CPU.
        peak_bytes: on a GPU the most that was in tensors, else the increase of this process's resident memory (Linux).
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.loss, self.gradient_norm, self.gradient = math.nan, math.nan, torch.empty(0)
        self.seconds, self.peak_bytes = math.nan, 0
        self._num_updates, self._started_s, self._held_bytes = 0, 0.0, 0

    def keep_gradient(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        """Call before the first update."""
        kept = list(parameters)

        def keep(*_: Any) -> None:
            if self._num_updates == 0:
                self.gradient = torch.cat([p.grad.flatten().cpu() for p in kept if p.grad is not None])

        optimizer.register_step_pre_hook(keep)

    def differences_from(self, other: Trial) -> dict[str, float]:
        """Of loss, gradient norm and gradient of the first update, relative to those of `other`."""

        def norm(values: Tensor) -> float:
            return float(torch.linalg.vector_norm(values, dtype=torch.float64))  # there may be a billion

        return {
            "loss": abs(self.loss / other.loss - 1),
            "gradient_norm": abs(self.gradient_norm / other.gradient_norm - 1),
            "gradient": norm(self.gradient.float() - other.gradient.float()) / norm(other.gradient),
        }

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Call after each update; TRL's trainer does."""
        wait_for_device()
        self._num_updates += 1
        on_gpu = torch.cuda.is_initialized()
        if self._num_updates == 2:
            self.seconds = time.perf_counter() - self._started_s
            self.peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else _status_bytes("VmHWM") - self._held_bytes
            return
        give_memory_back()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS, see proc(5)
            self._held_bytes = _status_bytes("VmRSS")
        self._started_s = time.perf_counter()


def fastest(try_one: Callable[..., Trial], candidates: Sequence[dict[str, Any]]) -> tuple[Trial, list[dict[str, Any]]]:
    """The trial of the candidate that is fastest, and a report of all. Those for which the GPU's memory does not
    suffice are passed over.

    Raises:
        RuntimeError: it suffices for none.
    """
    trials: list[Trial] = []
    report: list[dict[str, Any]] = []
    for settings in candidates:
        try:
            trials.append(try_one(**settings))
            report.append(settings | {"seconds": trials[-1].seconds, "peak_bytes": trials[-1].peak_bytes})
        except torch.OutOfMemoryError:
            report.append(settings | {"out_of_memory": True})
        print(report[-1], flush=True)
        give_memory_back()
    if not trials:
        raise RuntimeError(f"out of memory with each of {candidates}")
    return min(trials, key=lambda trial: trial.seconds), report


def give_memory_back() -> None:
    """Free what is in cycles of references, and return memory that the C library holds to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


class Interleave(TrainerCallback):
    """Times TRL's training in blocks of updates, inside `trainer.train()`, and runs our arm between them: TRL ours ours
    TRL TRL ours ...

    TRL's time runs from the end of one update to the end of the next, so it includes all work of its loop.

    Args:
        ours: runs one block of our arm.
        updates_per_block: number of TRL updates per block.
    """

    def __init__(self, ours: Callable[[], object], *, updates_per_block: int) -> None:
        self._ours = ours
        self._updates_per_block = updates_per_block
        self._seconds: dict[str, list[float]] = {"trl": [], "ours": []}
        self._started_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._updates_per_block:
            return
        self._stop("trl")
        if len(self._seconds["trl"]) % 2:
            for _ in range(2):
                self._start()
                self._ours()
                self._stop("ours")
        self._start()

    def _start(self) -> None:
        give_memory_back()
        wait_for_device()
        self._started_s = time.perf_counter()

    def _stop(self, arm: str) -> None:
        wait_for_device()
        self._seconds[arm].append(time.perf_counter() - self._started_s)

    @property
    def timings(self) -> Timings:
        """The times of all blocks after the warm-up; block i of both arms ran close together in time."""
        return Timings({arm: seconds[WARMUP_BLOCKS:] for arm, seconds in self._seconds.items()})


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
    """A GRPOTrainer that only trains, by default on the CPU in float32: no evaluation, no checkpoints, no output;
    metrics stay in memory.

    Args:
        rows: rows of the dataset, visited in this order, each with a "prompt".
        settings: GRPOConfig settings that override those chosen here.
    """
    _silence()
    _do_without_hashes()
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


def _do_without_hashes() -> None:
    """`datasets` names what it caches by hashes of pickled objects, and some versions of dill cannot pickle all.
    Nothing is cached here.
    """
    from datasets import fingerprint

    fingerprint.Hasher.hash = classmethod(lambda cls, value: uuid.uuid4().hex[:16])  # type: ignore[method-assign]


def _silence() -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore", module="trl|transformers|torch|accelerate")
    for name in ("trl", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
