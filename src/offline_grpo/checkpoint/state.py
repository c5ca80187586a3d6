"""`trainer/state.json`: iteration, counters, schedule and configuration of the run that wrote a checkpoint. Imports no
torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offline_grpo.errors import CheckpointError, reason_of
from offline_grpo.train.milestones import Watch
from offline_grpo.train.schedule import LrSchedule, UpdateCounters

FORMAT = 5
"""Format version of checkpoints; increased when those of an older version can no longer be read."""
FILE = "trainer/state.json"


@dataclass(frozen=True)
class TrainerState:
    """The content of the file.

    Args:
        source: what `Source.state_dict` returned.
        config: the resolved configuration of the run.
    """

    iteration: int
    counters: UpdateCounters
    lr_schedule: LrSchedule
    source: dict[str, Any]
    milestones: dict[str, Watch]
    config: dict[str, Any]
    format: int = FORMAT

    def to_json(self) -> str:
        """The content of the file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False)


def read_state(checkpoint: Path, *, key: str = "resume") -> TrainerState:
    """`trainer/state.json` of a checkpoint.

    Args:
        key: what named the checkpoint, for messages.

    Raises:
        CheckpointError: the file is missing, damaged, or of another format.
    """
    try:
        record = json.loads((checkpoint / FILE).read_text())
        found = record["format"]
        if found == FORMAT:
            record["counters"] = UpdateCounters(**record["counters"])
            record["lr_schedule"] = LrSchedule(**record["lr_schedule"])
            record["milestones"] = {name: Watch(**watch) for name, watch in record["milestones"].items()}
            return TrainerState(**record)
    except OSError as error:
        reason = error.strerror or reason_of(error)
        raise CheckpointError(
            f"{key}={checkpoint}: no readable {FILE} ({reason}), so this is not a checkpoint of a run"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{key}={checkpoint}: its {FILE} is damaged ({reason_of(error)})") from error
    raise CheckpointError(f"{key}={checkpoint}: written in format {found}, this version reads format {FORMAT}")
