"""The plan of a run: its settings, and those of its parts that need no model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offline_grpo.config.engine_spec import EngineSpec, num_shards
from offline_grpo.config.problems import TaskData
from offline_grpo.interfaces import Advantage, Layout, Loss, LossHead, OptimizerFactory
from offline_grpo.settings import RunConfig
from offline_grpo.types import SamplingParams

if TYPE_CHECKING:
    from offline_grpo.placement.devices import Devices
    from offline_grpo.weight_sync.strategy import WeightSync


@dataclass
class Plan:
    """A run's checked ingredients: plain settings and those components that need no model."""

    config: RunConfig
    data: TaskData  # the start isolates its task, and leaves out problems whose prompts are too long
    sampling: SamplingParams
    eval_sampling: SamplingParams
    engine: EngineSpec
    eval_engine: EngineSpec | None
    loss: Loss
    advantage: Advantage
    optimizer: OptimizerFactory
    layout: Layout | None  # None: chosen for the device (`model.layout=auto`)
    head: LossHead
    weight_sync: WeightSync
    eval_weight_sync: WeightSync

    @property
    def server_args(self) -> Mapping[str, Any]:
        """The arguments of the server that the run starts; empty if it starts none."""
        return {} if self.engine.launcher is None else self.engine.launcher.args

    @property
    def lora_rank(self) -> int | None:
        lora = self.config.model.lora
        return None if lora is None else lora.r

    @property
    def is_corrected(self) -> bool:
        """Whether training allows for a server whose format makes other probabilities than the trainer's."""
        corrects = self.loss.ratio_reference == "rollout" or getattr(self.loss, "importance_correction", None) != "none"
        return corrects or self.config.model.quantization is not None  # the server computes with the same 4 bits

    def devices(self, num_processes: int) -> Devices:
        from offline_grpo.placement.devices import Devices

        needs = self.weight_sync.requires
        return Devices(
            trainer=self.config.model.device,
            reference=self.config.model.ref_device,
            num_processes=num_processes,
            num_servers=self.engine.num_managed if self.config.placement.address is None else 0,
            gpus_per_server=num_shards(self.server_args),
            engine_devices=self.config.placement.engine_devices,
            strategy=self.weight_sync.name,
            rule=needs.placement,
            needs_gpu=needs.gpu,
        )
