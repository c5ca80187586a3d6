"""Metrics in TensorBoard: `tensorboard --logdir outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offline_grpo.interfaces import RunListener
from offline_grpo.logger import completed_iterations, tagged
from offline_grpo.logger.samples import Advantages, chosen, record
from offline_grpo.redaction import flat, redacted
from offline_grpo.types import Metrics, RolloutGroup

HPARAM_METRICS = ("eval/pass@1", "eval/reward_mean_all", "train/reward_mean", "train/success_rate")
"""What the table of hyperparameters shows of each run, at its end."""


@dataclass
class TensorBoardLogger(RunListener):
    """Writes event files to `tensorboard/` under `output_dir`; the x axis of `train/...` and `eval/...` is completed
    iterations.

    Args:
        flush_s: longest time that values are buffered in memory before they are written, in seconds.
        samples: how many completions of each evaluation are written as text.
    """

    output_dir: Path
    flush_s: int
    samples: int

    def __post_init__(self) -> None:
        self._writer: Any = None
        self._end: Any = None
        self._has_begun = False

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        from torch.utils.tensorboard.summary import hparams  # slow to import (seconds), and most runs do not need it
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(self.output_dir / "tensorboard"), flush_secs=self.flush_s)
        public = redacted(config)
        self._writer.add_text("config", f"```json\n{json.dumps(public, indent=2, default=str)}\n```")
        # Not `add_hparams`: that would make a run of its own for each call.
        kinds = (bool, int, float, str)  # that its table takes
        values = {key: value for key, value in flat(public).items() if value is not None}
        settings = {key: value if isinstance(value, kinds) else str(value) for key, value in values.items()}
        experiment, begin, self._end = hparams(settings, dict.fromkeys(HPARAM_METRICS, 0.0))
        for summary in (experiment, begin):
            self._writer.file_writer.add_summary(summary)

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        self._begin(name, iteration)
        step = completed_iterations(name, iteration)
        for key, value in tagged(name, metrics).items():
            self._writer.add_scalar(key, value, global_step=step)

    def rollouts(
        self, name: str, groups: Sequence[RolloutGroup], *, advantages: Advantages | None, iteration: int
    ) -> None:
        """The samples of an evaluation, as text."""
        self._begin(name, iteration)
        if name == "eval" and self.samples:
            records = [record(*sample) for sample in chosen(groups, advantages, self.samples)]
            text = "\n\n".join(json.dumps(line, indent=1) for line in records)
            step = completed_iterations(name, iteration)
            self._writer.add_text("eval/samples", f"```json\n{text}\n```", global_step=step)

    def _begin(self, name: str, iteration: int) -> None:
        """Tell TensorBoard from which step on it forgets an earlier start of this run: the next evaluation."""
        if self._has_begun:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

        self._has_begun = True
        begins_anew = Event(session_log=SessionLog(status=SessionLog.START))
        step = completed_iterations("eval", iteration) + (name == "eval")
        self._writer.file_writer.add_event(begins_anew, step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.file_writer.add_summary(self._end)
            writer.close()
