"""The numbers that a source gives for each token, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import Advantage, Task
from offline_grpo.types import RolloutGroup, TokenBatch


class PerToken(Advantage):
    """`RolloutGroup.advantages`, which replace those of every other kind too; here a group without them is an error."""

    def check(self, config: Any, task: Task, recorded: Sequence[RolloutGroup]) -> None:
        fix = "this source gives no numbers of its own; use group_std, or a source that sets RolloutGroup.advantages"
        require(not config.source.samples, "train/advantage", "per_token", fix)
        self(recorded)

    def __call__(
        self, groups: Sequence[RolloutGroup], batch: TokenBatch | None = None
    ) -> list[Sequence[Sequence[float]]]:
        if any(group.advantages is None for group in groups):
            raise ConfigError("train/advantage=per_token: a group came without advantages of its own; use group_std")
        return [group.advantages for group in groups if group.advantages is not None]
