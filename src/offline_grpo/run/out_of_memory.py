"""One line instead of a traceback where memory runs out: who asked for how much, what the memory plan predicted, and
what would fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from offline_grpo import progress
from offline_grpo.errors import OutOfMemory, reason_of
from offline_grpo.placement.device_plan import GIB, DevicePlan, advice, largest_parts
from offline_grpo.run import resume_record
from offline_grpo.run.run_dir import RunDir

_SAYS_SO = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""In a RuntimeError of CUDA, cuBLAS, or torch's allocator for the host."""

_WITHOUT_PLAN = (
    "train.tokens_per_microbatch or train.batch_size: lower it",
    "train.gradient_checkpointing: set it to true",
    "generation.batch_size, or a server's share of the GPU: lower it",
)


@contextmanager
def told_if_out_of_memory(devices: Sequence[DevicePlan], run_dir: RunDir) -> Iterator[None]:
    """Raise OutOfMemory for what torch raises where an allocation fails.

    Args:
        devices: the prediction, empty where none was made.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{_describe(error, devices)}; {resume_record.where(run_dir)}") from error


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in str(error) for words in _SAYS_SO)


def _describe(error: Exception, devices: Sequence[DevicePlan]) -> str:
    text = str(error)
    phase = progress.phase_of(error) or "the start"
    gpu = re.search(r"GPU (\d+)", text)
    asked = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
    free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", text)
    device = next((device for device in devices if gpu is not None and device.gpu == int(gpu[1])), None)
    line = f"{f'GPU {gpu[1]}' if gpu else 'the GPU' if 'CU' in text else 'this machine'} is out of memory in the phase {phase}: "
    line += f"it asked for {asked[1]}" if asked else reason_of(error)
    line += f", and {free[2]} of {free[1]} were free" if free else ""
    if device is None:
        return f"{line}; to need less, change one of: {'; '.join(_WITHOUT_PLAN)}"
    predicted = (
        f"the memory plan predicted {device.needed_bytes / GIB:.1f} GiB at the fullest ({largest_parts(device)})"
    )
    return f"{line}; {predicted}; to need less, change one of: {'; '.join(advice(device, phase.partition(',')[0]))}"
