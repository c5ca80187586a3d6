"""The oldest way: save a checkpoint, stop the server, start it again from there. Slow, and works with anything."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from offline_grpo.generation.sglang_client import SglangClient
from offline_grpo.generation.vllm_client import VllmClient
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.saving import save_weights
from offline_grpo.weight_sync.server_sync import Moved, ServerSync


@dataclass(kw_only=True)
class Restart(ServerSync):
    """Only for a server of our own. The weights being served are in the run folder's `served/` until the next push."""

    needs_own_server = True
    serves = (VllmClient, SglangClient)

    _folder: Path | None = field(default=None, init=False)

    def deliver(self, policy: Policy, version: int) -> Moved:
        """A push of what the server was started with only tells it the version."""
        started = time.perf_counter()
        num_bytes = 0
        if self._served is not None and self._served != version:
            num_bytes = self._save(policy, version)
            self.client.close()
            self.server.restart(self.start_model(policy), options=self.start_options(policy))
        self.control.set_version(version)
        return Moved(num_tensors=0, num_bytes=num_bytes, paused_seconds=time.perf_counter() - started if num_bytes else 0.0)

    def recover(self, policy: Policy, *, version: int) -> None:
        """See `ServerSync.recover`; starts from the newest weights at once."""
        self._save(policy, version)
        self._served = None
        super().recover(policy, version=version)

    def start_model(self, policy: Policy) -> str:
        """The newest saved weights, or what the policy was loaded from."""
        return super().start_model(policy) if self._folder is None else str(self._folder)

    def recovery_model(self, policy: Policy) -> str:
        """The newest saved weights."""
        return self.start_model(policy)

    def close(self) -> None:
        """See `ServerSync.close`. Deletes the served weights: checkpoints are elsewhere."""
        super().close()
        if self._folder is not None:
            shutil.rmtree(self._folder.parent, ignore_errors=True)

    def _save(self, policy: Policy, version: int) -> int:
        old, self._folder = self._folder, self.server.log_dir / "served" / f"version_{version}"
        num_bytes = save_weights(policy, self._folder, with_tokenizer=True)
        if old is not None and old != self._folder:
            shutil.rmtree(old, ignore_errors=True)
        return num_bytes
