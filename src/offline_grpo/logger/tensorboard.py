"""Metrics in TensorBoard: `tensorboard --logdir outputs`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo.interfaces import RunListener
from offline_grpo.logger import completed_iterations, tagged
from offline_grpo.logger.samples import Advantages, Decode, chosen
from offline_grpo.redaction import redacted
from offline_grpo.settings import flat
from offline_grpo.types import Metrics, RolloutGroup

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

HPARAM_METRICS = ("eval/pass@1", "eval/reward_mean_all", "train/reward_mean", "train/success_rate")
"""What the table of hyperparameters shows of each run, at its end."""


@dataclass
class TensorBoardLogger(RunListener):
    """Writes event files to `tensorboard/` under `output_dir`; the x axis of `train/...` and `eval/...` is completed
    iterations.
    """

    output_dir: Path
    flush_s: int
    samples: int

    def __post_init__(self) -> None:
        self._writer: Any = None
        self._config: Mapping[str, Any] = {}
        self._end: Any = None
        self._decode: Decode | None = None

    def loaded(self, decode: Decode) -> None:
        self._decode = decode

    def start(self, config: Mapping[str, Any], num_iterations: int) -> None:
        self._config = redacted(config)

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        writer, step = self._open(name, iteration), completed_iterations(name, iteration)
        for key, value in tagged(name, metrics).items():
            writer.add_scalar(key, value, global_step=step)

    def rollouts(
        self, name: str, groups: Sequence[RolloutGroup], *, advantages: Advantages | None, iteration: int
    ) -> None:
        """The samples of an evaluation, as text."""
        writer = self._open(name, iteration)
        if name == "eval" and self.samples:
            records = chosen(groups, advantages, self.samples, self._decode)
            text = "\n\n".join(json.dumps(each, indent=1) for each in records)
            step = completed_iterations(name, iteration)
            writer.add_text("eval/samples", f"```json\n{text}\n```", global_step=step)

    def _open(self, name: str, iteration: int) -> SummaryWriter:
        """The writer. From the next evaluation on, TensorBoard forgets an earlier start of this run."""
        if self._writer is None:
            from torch.utils.tensorboard.summary import hparams  # slow to import (seconds), most runs do not need it
            from torch.utils.tensorboard.writer import SummaryWriter

            # A resumed run writes again from its first iteration on.
            first = completed_iterations("eval", iteration) + (name == "eval")
            folder = str(self.output_dir / "tensorboard")
            self._writer = SummaryWriter(folder, purge_step=first, flush_secs=self.flush_s)
            self._writer.add_text("config", f"```json\n{json.dumps(self._config, indent=2, default=str)}\n```")
            # The table of hyperparameters. Not `add_hparams`: that would make a run of its own for each call.
            kinds = (bool, int, float, str)  # that its table takes
            values = {key: value for key, value in flat(self._config).items() if value is not None}
            settings = {key: value if isinstance(value, kinds) else str(value) for key, value in values.items()}
            experiment, begin, self._end = hparams(settings, dict.fromkeys(HPARAM_METRICS, 0.0))
            for summary in (experiment, begin):
                self._writer.file_writer.add_summary(summary)
        return self._writer

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.file_writer.add_summary(self._end)
            writer.close()
