"""fp32 masters: the weights and gradients that the optimizer sees, whatever the format that the model computes in.

At the learning rates of RL an update is smaller than half a unit in the last place of most bf16 weights, so an
optimizer that steps on bf16 weights changes few of them (84% stay put at lr 1e-5). Here the update is added in fp32 and
then rounded into the model. Masters begin beside the weights, so that the first updates are seen too: see `dither`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from offline_grpo.model.offload import host_memory
from offline_grpo.seeding import derive_seed

CHUNK_ELEMENTS = 1 << 24
"""Compared at once: few launches on a GPU, and temporaries of at most 48 MiB for 16-bit weights."""

SMALL_ELEMENTS = 1 << 20
"""Of parameters up to this size, such as norms and LoRA adapters, gradients are added together: launching hundreds of
additions takes the host longer than a GPU takes to do them."""

ALIGNED = 128
"""Elements: tensors in the host's memory begin at a multiple, so that kernels read them as fast as those with memory of
their own."""


class HostTensors:
    """`flat` [N] fp32, zeros, and a view of it for each shape: `views`. Equal shapes give views at the same places.

    Raises torch.OutOfMemoryError if the host has too little memory that it may lock for the GPU `device`.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        # One row of numbers, and where each shape begins in it.
        ends = list(accumulate(-(-shape.numel() // ALIGNED) * ALIGNED for shape in shapes.values()))
        starts = [0, *ends][: len(ends)]
        self.flat = host_memory(ends[-1] if ends else 0, torch.float32, device).fill_(0)  # by all threads
        self.views: dict[str, Tensor] = {
            name: self.flat[start : start + shape.numel()].view(shape)
            for (name, shape), start in zip(shapes.items(), starts, strict=True)
        }


class MasterWeights:
    """Pairs each trained parameter of a model with an fp32 master. A parameter that is fp32 already is its own master.

    The gradient of every backward pass is added to the master's fp32 gradient: a large one as soon as it exists, which
    frees the 16-bit one, and the small ones by `accumulate` after the pass.

    The optimizer steps on `parameters`, which have the fp32 gradients. `values` are the masters by name: their data, or
    with `offload`, where it means nothing, views of `host`.

    Args:
        separate: give fp32 parameters a master too, because something else reads their memory while the optimizer
            steps.
        before_publish: called before the model's weights are written to.
        offload: keep the masters in the host's memory. The optimizer must be one that looks for them there.
        rounds_to: what the model itself rounds fp32 parameters to whenever it computes (FSDP2).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        separate: bool = False,
        before_publish: Callable[[], None] | None = None,
        offload: bool = False,
        rounds_to: torch.dtype | None = None,
    ) -> None:
        self._before_publish = before_publish
        self._rounds_to = rounds_to
        self._working: dict[str, nn.Parameter] = {name: p for name, p in named_parameters if p.requires_grad}
        self.host: HostTensors | None = None
        if offload:
            device = next((p.device for p in self._working.values()), torch.device("cpu"))
            self.host = HostTensors({name: p.shape for name, p in self._working.items()}, device)
        self._small: list[tuple[nn.Parameter, nn.Parameter]] = []  # whose gradients wait, and their masters
        self.parameters = {name: self._master_of(name, p, separate) for name, p in self._working.items()}
        self.values: dict[str, Tensor] = {name: p.detach() for name, p in self.parameters.items()}
        if self.host is not None:
            self.values = self.host.views

    def _master_of(self, name: str, parameter: nn.Parameter, separate: bool) -> nn.Parameter:
        # fp32 in the host's memory, in the parameter itself, or beside it.
        if self.host is not None:
            self.host.views[name].copy_(parameter.detach())
            # 4 bytes, and room for a gradient
            master = nn.Parameter(torch.zeros((), device=parameter.device).expand(parameter.shape))
        elif parameter.dtype == torch.float32 and not separate:
            return parameter
        else:
            master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))

        # Its gradient: a small one waits for the end of the backward pass, a large one is added while that goes on.
        if parameter.numel() <= SMALL_ELEMENTS:
            self._small.append((parameter, master))
            return master

        def accumulate(working: Tensor) -> None:
            assert working.grad is not None
            master.grad = working.grad.float() if master.grad is None else master.grad.add_(working.grad)  # one kernel
            working.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return master

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the small gradients that a backward pass has left to those of their masters."""
        left = [(working, master) for working, master in self._small if working.grad is not None]
        if not left:
            return

        # One row of all of them, in fp32: one addition in place of hundreds.
        flat = torch.cat([working.grad.flatten() for working, _ in left]).float()  # type: ignore[union-attr]
        for working, _ in left:
            working.grad = None
        masters = [master for _, master in left]
        bases = [None if master.grad is None else master.grad._base for master in masters]
        sums = bases[0] if all(base is bases[0] for base in bases) else None
        if sums is not None and sums.numel() == flat.numel():  # of the same parameters: in all passes but the first
            sums.add_(flat)
            return

        # The first pass since the gradients were cleared, or one of other parameters: each takes its view of the row.
        for master, part in zip(masters, flat.split([master.numel() for master in masters]), strict=True):
            added = part.view_as(master)
            master.grad = added if master.grad is None else master.grad.add_(added)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's weights, in place: all that share their memory see the update."""
        if self._before_publish is not None:
            self._before_publish()
        pairs = [(w, self.values[name]) for name, w in self._working.items() if w is not self.parameters[name]]
        if pairs:  # from the host, at the speed of its bus
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)), non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def differing(self) -> list[str]:
        """The parameters that do not hold the bits that `publish` wrote: another process has written there."""
        differ: list[tuple[str, Tensor]] = []
        for name, working in self._working.items():
            if self.parameters[name] is not working:
                # In chunks, for small temporaries; most parameters are one, because calls cost more than comparisons.
                small, pair = working.numel() <= CHUNK_ELEMENTS, (working, self.values[name])
                chunks = [pair] if small else zip(*(t.flatten().split(CHUNK_ELEMENTS) for t in pair), strict=True)
                for one, other in chunks:
                    rounded = other.to(one.device, non_blocking=True).to(one.dtype)
                    # Eight bytes are compared at a time where they can be: that is three times as fast on a GPU.
                    several = 8 // one.element_size()
                    is_whole = one.dim() > 0 and one.size(-1) % several == 0 and one.storage_offset() % several == 0
                    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
                    integer = torch.int64 if one.is_contiguous() and is_whole else integer
                    differ.append((name, one.view(integer).ne(rounded.view(integer)).any()))
        flags = torch.stack([flag for _, flag in differ]).tolist() if differ else []  # waits for the device once
        return list(dict.fromkeys(name for (name, _), flag in zip(differ, flags, strict=True) if flag))

    @torch.no_grad()
    def dither(self, seed: int) -> None:
        """Move each master by a random part of what rounding hides; the model's weights keep their bits.

        Weights that come as 16-bit numbers are half a step of their format away from the next one. At lr 1e-5 a weight
        of 0.05 would need ten updates in one direction before it changed, and until then a run learns nothing. From
        dithered masters as large a share of the weights changes as an update is of a step, so their mean moves as that
        of the masters does. At a power of two the step towards 0 is half as long, and so is the noise to that side. The
        noise is a hash of a weight's place: sharding does not change it.
        """
        for name, working in self._working.items():
            # Where this process's part of the tensor begins in all of it, flattened: the noise depends on that place.
            dtype = self._rounds_to or working.dtype
            if dtype == torch.float32:
                continue
            value, place, first = self.values[name], derive_seed(seed, name), 0
            if hasattr(value, "to_local"):
                from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

                sharded: Any = value
                _, offsets = compute_local_shape_and_global_offset(value.shape, sharded.device_mesh, sharded.placements)
                first = offsets[0] * value.shape[1:].numel()
            for chunk in part_of_process(value).flatten().split(CHUNK_ELEMENTS):
                # Uniform in [-0.5, 0.5), [len(chunk)] fp32: 24 bits of MurmurHash3's finaliser of each index, which the
                # seed permutes. The factors are 0xFF51AFD7ED558CCD and 0xC4CEB9FE1A85EC53, signed.
                master = chunk.to(working.device)
                bits = torch.arange(first, first + len(chunk), device=master.device) ^ place
                for factor in (-0x00AE502812AA7333, -0x3B314601E57A13AD):
                    bits = (bits ^ ((bits >> 33) & 0x7FFFFFFF)) * factor
                noise = ((bits ^ ((bits >> 33) & 0x7FFFFFFF)) & 0xFFFFFF).float() / 2**24 - 0.5

                # That share of the step to the next number of the format, on the side that the noise points to: where
                # the sum still rounds to what the model has, it is the master.
                rounded = master.to(dtype)
                size = rounded.abs()
                outwards = 2 * (rounded.signbit() == (noise < 0)).short() - 1  # away from 0, or -1: towards it
                neighbour = (size.view(torch.int16) + outwards).clamp(0).view(dtype)
                moved = master + (neighbour.float() - size.float()).abs() * noise
                keeps = moved.to(dtype).view(torch.int16) == rounded.view(torch.int16)  # the sign of a zero, too
                chunk.copy_(torch.where(keeps, moved, master))
                first += len(chunk)

    def state_dict(self) -> dict[str, Tensor]:
        """The masters that say more than the model's weights: what a checkpoint must hold beside the model."""
        formats = {name: self._rounds_to or working.dtype for name, working in self._working.items()}
        return {name: value for name, value in self.values.items() if formats[name] != torch.float32}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict()` and publish it."""
        for name, value in state.items():
            self.values[name].copy_(value)
        self.publish()


def part_of_process(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: all, or its part of a sharded one."""
    to_local = getattr(tensor, "to_local", None)  # a DTensor's; its class takes a second to import
    return tensor if to_local is None else to_local()
