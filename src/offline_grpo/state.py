"""What a run is made of: one object that the steps of `run.train` fill, from top to bottom. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo.checkpoint.files import TrainerState
from offline_grpo.config.parts import Plan
from offline_grpo.history.folder import RunDir
from offline_grpo.history.resume import ResumePoint
from offline_grpo.history.signals import StopSignal
from offline_grpo.interfaces import RunListener, Source
from offline_grpo.settings import RunConfig
from offline_grpo.train.schedule import Milestones

if TYPE_CHECKING:  # which import torch, or transformers
    from offline_grpo.checkpoint.checkpointer import Checkpointer
    from offline_grpo.engine.server_engine import ServerEngine
    from offline_grpo.eval.evaluator import PassAtKEvaluator
    from offline_grpo.model.pictures import Vision
    from offline_grpo.model.policy import Policy
    from offline_grpo.model.text import TokenizerCodec
    from offline_grpo.placement.devices import Devices
    from offline_grpo.placement.ranks import Ranks
    from offline_grpo.train.sharding import Sharding
    from offline_grpo.train.update import Updater
    from offline_grpo.weight_sync.deployment import Deployment


@dataclass
class Run:
    """A run. Its steps fill it from top to bottom; what a step needs, it finds here."""

    # From the first moment on.
    stop: StopSignal
    stack: ExitStack  # ends what the run has started, the last first
    # Before torch is imported.
    config: RunConfig = field(init=False)
    plain: Mapping[str, Any] = field(init=False)  # the configuration as nested dicts
    plan: Plan = field(init=False)  # the parts that need no model
    folder: RunDir = field(init=False)
    resume: ResumePoint | None = field(init=False)  # the checkpoint to go on from
    ranks: Ranks = field(init=False)  # this process among the others
    listeners: list[RunListener] = field(default_factory=list, init=False)
    # Before transformers is imported.
    devices: Devices = field(init=False)
    model_id: str = field(init=False)  # a folder or Hub id
    servers: list[ServerEngine] = field(default_factory=list, init=False)  # that training samples from
    # Before a weight is read.
    vision: Vision | None = field(init=False)  # encodes pictures; None where no problem has one
    prompt_tokens: tuple[int, int] = field(init=False)  # of the shortest and the longest prompt
    recompute: float = field(init=False)  # share of the blocks whose activations the backward pass recomputes
    offloads_activations: bool = field(init=False)  # whether their inputs wait in the host's memory
    # Once servers have taken their memory.
    policy: Policy = field(init=False)
    sharding: Sharding = field(init=False)
    codec: TokenizerCodec = field(init=False)
    training: Deployment = field(init=False)  # the engines that training samples from
    evaluation: Deployment = field(init=False)  # those that evaluations ask; perhaps the same
    evaluator: PassAtKEvaluator | None = field(default=None, init=False)
    updater: Updater = field(init=False)
    source: Source = field(init=False)
    milestones: Milestones = field(init=False)
    checkpointer: Checkpointer | None = field(default=None, init=False)
    restored: TrainerState | None = field(default=None, init=False)  # what the checkpoint said

    @property
    def checkpoint(self) -> Path | None:
        return None if self.resume is None else self.resume.checkpoint
