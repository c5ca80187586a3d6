"""Optimizers, each a small factory: settings now, parameters once the model is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offline_grpo.errors import ConfigError, reason_of, require
from offline_grpo.interfaces import OptimizerFactory


def is_offloaded(factory: OptimizerFactory) -> bool:
    """Whether masters and state are in the host's memory; not of optimizers that know of no such thing."""
    return getattr(factory, "offload", False)


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay, vectors (norms, biases) without."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True, kw_only=True)
class _Optimizer:
    """Raises ConfigError for a setting out of its range: torch would, but once the model is loaded."""

    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_good = {"lr": value > 0, "beta1": 0 <= value < 1, "beta2": 0 <= value < 1}.get(name, value >= 0)
            fix = "lr is above 0, a beta in [0, 1), anything else 0 or more"
            require(is_good, f"train.optimizer.{name}", value, fix)


@dataclass(frozen=True, kw_only=True)
class AdamW(_Optimizer):
    """torch.optim.AdamW (Loshchilov & Hutter, arXiv 1711.05101). State: two running means per weight, and a step count
    per tensor. With `offload`, masters and state are in the host's memory, see offload.py.
    """

    beta1: float
    beta2: float
    eps: float
    offload: bool

    def create(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer over fp32 `parameters`."""
        groups = decay_groups(parameters, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)


@dataclass(frozen=True, kw_only=True)
class AdamW8bit(_Optimizer):
    """bitsandbytes' AdamW with block-wise 8-bit state (Dettmers et al., arXiv 2110.02861): two bytes per weight, two
    scales per block. With `paged`, its memory is managed: the driver moves it to the host where the GPU is full.
    """

    beta1: float
    beta2: float
    eps: float
    paged: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            importlib.import_module("bitsandbytes")
        except (ImportError, OSError, RuntimeError) as error:
            fix = "install it with `uv sync` on a machine with a CUDA GPU, or use train/optimizer=adamw"
            fault = f"bitsandbytes cannot be used here ({reason_of(error)}); {fix}"
            raise ConfigError(f"train/optimizer=adamw_8bit: {fault}") from error

    def create(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer over fp32 `parameters`.

        Raises:
            ConfigError: bitsandbytes has no 8-bit optimizer for the parameters' device.
        """
        from bitsandbytes.optim.adamw import AdamW8bit as BitsAndBytesAdamW8bit

        groups = decay_groups(parameters, self.weight_decay)
        device = groups[0]["params"][0].device
        fix = f"bitsandbytes' 8-bit state needs a CUDA device and the model is on {device}; use train/optimizer=adamw"
        require(device.type == "cuda", "train/optimizer", "adamw_8bit", fix)
        settings: Any = {"lr": self.lr, "betas": (self.beta1, self.beta2), "eps": self.eps}
        return BitsAndBytesAdamW8bit(groups, **settings, is_paged=self.paged)


@dataclass(frozen=True, kw_only=True)
class Adafactor(_Optimizer):
    """transformers' Adafactor (Shazeer & Stern, arXiv 1804.04235). State: squared gradients of rows and of columns for
    a matrix, of every weight for a vector."""

    scale_parameter: bool
    relative_step: bool

    def create(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer over fp32 `parameters`; with `relative_step` it sets its own learning rate."""
        from transformers.optimization import Adafactor as TransformersAdafactor

        return TransformersAdafactor(
            decay_groups(parameters, self.weight_decay),
            lr=None if self.relative_step else self.lr,  # type: ignore[arg-type]
            scale_parameter=self.scale_parameter,
            relative_step=self.relative_step,
            warmup_init=False,
        )
