"""One iteration of the first process under torch's profiler: `train.profile`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offline_grpo.interfaces import RunListener
from offline_grpo.types import Metrics

messages = logging.getLogger(__name__)

NUM_SHOWN = 10


@dataclass
class Profiler(RunListener):
    """Writes `profile/iter_000.json.gz`, a trace for https://ui.perfetto.dev, and logs the costliest kernels; on a CPU,
    operators. What a server does is not in it.

    Args:
        iteration: counted from 0.
    """

    output_dir: Path
    iteration: int
    _profile: Any = field(default=None, init=False)

    def phase(self, name: str, iteration: int) -> None:
        if name == "generate" and iteration == self.iteration and self._profile is None:
            import torch
            from torch.profiler import ProfilerActivity, profile

            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profile.start()

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        if name == "train" and iteration == self.iteration and self._profile is not None:
            path = self.output_dir / "profile" / f"iter_{iteration:03d}.json.gz"
            path.parent.mkdir(exist_ok=True)
            self._profile.stop()
            self._profile.export_chrome_trace(str(path))
            # What took longest: kernels, or operators where there is no GPU.
            events = [event for event in self._profile.key_averages() if not event.key.startswith("ProfilerStep")]
            kernels = [event for event in events if event.device_type.name != "CPU"]
            field = "self_device_time_total" if kernels else "self_cpu_time_total"
            for e in sorted(kernels or events, key=lambda event: -getattr(event, field))[:NUM_SHOWN]:
                messages.info(f"{getattr(e, field) / 1e3:10.1f} ms {e.count:7,} calls  {e.key[:100]}")
            messages.info("train.profile=%d: open %s at https://ui.perfetto.dev", iteration + 1, path)
            self._profile = None

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
