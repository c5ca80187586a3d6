"""Optimizers, each a small factory: settings now, parameters once the model is loaded.

With `offload`, AdamW's masters and state lie in the host's memory; gradients and arithmetic stay on the GPU. Bytes
per weight, of training in bf16:

                            weights   gradients   masters   two running means      8.03e9 weights, GiB: GPU   host
    resident                   2          4           4             8                                   135      0
    offloaded, on the GPU      2          4           -             -                                    45
    offloaded, on the host     -          -           4             8                                           90

A step moves 12 bytes per weight to the GPU and 12 back, both ways at once, 96 GB each for 8B: about 2 s at 50 GB/s. On
the CPU it would take as long. The GPU does it by the kernel of the resident optimizer: the results are the same bits.

    parameters   |---- chunk 0 ----|---- chunk 1 ----|---- chunk 2 ----| ...     one row of numbers, across tensors
    up stream    0 1 2 . 3 . 4 .
    GPU            0 1 2 . 3 . 4                     a slot is filled again once it is copied back
    down stream      0 1 2 . 3 . 4
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from offline_grpo.errors import ConfigError, reason_of, require
from offline_grpo.installed import install_command
from offline_grpo.interfaces import OptimizerFactory
from offline_grpo.model.masters import HostTensors, MasterWeights


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
    per tensor. With `offload`, masters and state are in the host's memory, see `OffloadedAdamW`.
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
            fix = f"install it with `{install_command()}` on a machine with a CUDA GPU, or use train/optimizer=adamw"
            fault = f"bitsandbytes cannot be used here ({reason_of(error)}); {fix}"
            raise ConfigError(f"train/optimizer=adamw_8bit: {fault}") from error

    def create(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimizer over fp32 `parameters`. Raises ConfigError where bitsandbytes has none for their device."""
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


MEANS = ("exp_avg", "exp_avg_sq")
CHUNK_ELEMENTS, NUM_SLOTS = 1 << 25, 3
"""Of masters and their means: on the GPU, during a step, 1.1 GiB in all."""


@dataclass(frozen=True)
class _Piece:
    """`part` of a parameter, flattened, and where it lies in its chunk."""

    parameter: nn.Parameter
    group: int
    part: slice
    place: slice


class OffloadedAdamW(torch.optim.AdamW):
    """`like`, a fused `torch.optim.AdamW` over the parameters of `masters`, with masters and state in the host's
    memory.

    Parameter groups, settings and `state_dict()` are the same: a checkpoint of either continues with the other.
    """

    def __init__(self, like: torch.optim.Optimizer, masters: MasterWeights) -> None:
        # Masters and both means are rows of equal length in the host's memory; a parameter has one place in all three.
        super().__init__(like.param_groups)
        assert masters.host is not None
        shapes = {name: p.shape for name, p in masters.parameters.items()}
        self._device = next(iter(masters.parameters.values())).device
        means = [HostTensors(shapes, self._device) for _ in MEANS]
        for name, parameter in masters.parameters.items():
            state = {key: held.views[name] for key, held in zip(MEANS, means, strict=True)}
            self.state[parameter] = {"step": torch.tensor(0.0), **state}
        flats = (masters.host.flat, *(held.flat for held in means))

        # Chunks of these rows, and of which parts of which parameters each consists.
        group_of = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
        rows = zip(*(flat.split(CHUNK_ELEMENTS) for flat in flats), strict=True)
        self._chunks: list[tuple[Sequence[Tensor], list[_Piece]]] = [(chunk, []) for chunk in rows]
        for name, parameter in masters.parameters.items():
            start = masters.host.views[name].storage_offset()
            stop = start + parameter.numel()
            for number in range(start // CHUNK_ELEMENTS, -(-stop // CHUNK_ELEMENTS)):
                begin = number * CHUNK_ELEMENTS
                first, last = max(start, begin), min(stop, begin + CHUNK_ELEMENTS)
                part, place = slice(first - start, last - start), slice(first - begin, last - begin)
                self._chunks[number][1].append(_Piece(parameter, group_of[parameter], part, place))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """See `torch.optim.AdamW`. Parameters without a gradient stay as they are, and so does their state."""
        assert closure is None
        for parameter, state in self.state.items():
            if parameter.grad is not None:
                state["step"] += 1
        if self._device.type != "cuda":
            for in_host, pieces in self._chunks:
                self._update(pieces, in_host)
            return

        # Slots on the GPU, and a stream for each direction of the bus: chunks travel while others are computed. The
        # memory of the slots may still be read, and that of the masters too, by `publish`.
        now = torch.cuda.current_stream(self._device)
        up, down = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        first, _ = self._chunks[0]  # of the size that all have but the last
        slots = torch.empty(NUM_SLOTS, len(first), len(first[0]), device=self._device)
        up.wait_stream(now)
        down.wait_stream(now)
        copied_back = [torch.cuda.Event() for _ in range(NUM_SLOTS)]

        # Each chunk goes up, is computed, and goes down; the streams wait for each other, and the host for none.
        for number, (in_host, pieces) in enumerate(self._chunks):
            slot = number % NUM_SLOTS
            on_gpu = [row[: len(in_host[0])] for row in slots[slot]]
            with torch.cuda.stream(up):
                up.wait_event(copied_back[slot])  # returns at once, if it was never recorded
                for source, target in zip(in_host, on_gpu, strict=True):
                    target.copy_(source, non_blocking=True)
            now.wait_stream(up)
            self._update(pieces, on_gpu)
            down.wait_stream(now)
            with torch.cuda.stream(down):
                for source, target in zip(on_gpu, in_host, strict=True):
                    target.copy_(source, non_blocking=True)
            copied_back[slot].record(down)
        down.synchronize()  # the CPU may read the masters next

    def _update(self, pieces: Sequence[_Piece], chunk: Sequence[Tensor]) -> None:
        """One step on the rows of a chunk: masters and the two means."""
        # Groups differ in their settings, and a step takes one set of them.
        of_group: dict[int, list[_Piece]] = defaultdict(list)
        for piece in pieces:
            if piece.parameter.grad is not None:
                of_group[piece.group].append(piece)
        for number, mine in of_group.items():
            group = self.param_groups[number]
            masters, means, squares = ([row[piece.place] for piece in mine] for row in chunk)
            adamw(
                masters,
                [piece.parameter.grad.reshape(-1)[piece.part] for piece in mine],  # type: ignore[union-attr]
                means,
                squares,
                [],
                [torch.full((), float(self.state[p.parameter]["step"]) - 1, device=self._device) for p in mine],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """See `torch.optim.Optimizer`, which would move the state to the GPU."""
        own = self.state
        super().load_state_dict({**state_dict, "state": {}})  # the groups, and whether they fit
        self.state = own
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            saved = state_dict["state"].get(number, {})
            for name, value in own[parameter].items():
                value.copy_(saved[name]) if name in saved else value.zero_()
