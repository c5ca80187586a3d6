"""fp32 masters: the weights and gradients that the optimizer sees, whatever the format that the model computes in.

At the learning rates of RL an update is smaller than half a unit in the last place of most bf16 weights, so an
optimizer that steps on bf16 weights changes few of them (84% stay put at lr 1e-5). Here the update is added in fp32 and
then rounded into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from offline_grpo.model.host_memory import HostTensors

CHUNK_ELEMENTS = 1 << 24
"""What is compared at once: few launches on a GPU, and temporaries of at most 48 MiB for 16-bit weights."""

SMALL_ELEMENTS = 1 << 20
"""Of parameters up to this size, such as norms and LoRA adapters, gradients are added together: the host takes longer
to launch one addition than a GPU takes to do it, and there are hundreds."""


class MasterWeights:
    """Pairs each trained parameter of a model with an fp32 master. A parameter that is fp32 already is its own master.

    The gradient of every backward pass is added to the master's fp32 gradient, so accumulation over microbatches loses
    nothing: a large one as soon as it exists, which frees the 16-bit one, and the small ones by `accumulate` after
        the pass.

    Args:
        separate: give fp32 parameters a master too, because something else reads their memory while the optimizer
            steps.
        before_publish: called before the model's weights are written to.
        offload: keep the masters in the host's memory. The optimizer must be one that looks for them there.
        rounds_to: what the model itself rounds fp32 parameters to whenever it computes (FSDP2); None where it
            computes in their own format.

    Attributes:
        parameters: what the optimizer steps on, and what has the fp32 gradients. With `offload` their values mean
            nothing.
        values: the masters by name: the data of `parameters`, or with `offload` views of `host`.
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
        self._small: list[
            tuple[nn.Parameter, nn.Parameter]
        ] = []  # parameters of the model whose gradients wait, and their masters
        self.parameters: dict[str, nn.Parameter] = {
            name: self._master_of(name, p, separate) for name, p in self._working.items()
        }
        self.values: dict[str, Tensor] = (
            self.host.views if self.host is not None else {name: p.detach() for name, p in self.parameters.items()}
        )

    def _master_of(self, name: str, parameter: nn.Parameter, separate: bool) -> nn.Parameter:
        if self.host is not None:
            self.host.views[name].copy_(parameter.detach())
            master = nn.Parameter(
                torch.zeros((), device=parameter.device).expand(parameter.shape)
            )  # 4 bytes, and room for a gradient
        elif parameter.dtype == torch.float32 and not separate:
            return parameter
        else:
            master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
        if parameter.numel() <= SMALL_ELEMENTS:
            self._small.append((parameter, master))
            return master

        def accumulate(working: Tensor) -> None:
            assert working.grad is not None
            master.grad = (
                working.grad.float() if master.grad is None else master.grad.add_(working.grad)
            )  # added in fp32, by one kernel
            working.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return master

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the small gradients that a backward pass has left to those of their masters. To be called after each
        pass.
        """
        left = [(working, master) for working, master in self._small if working.grad is not None]
        if not left:
            return
        flat = torch.cat([working.grad.flatten() for working, _ in left]).float()  # type: ignore[union-attr]
        for working, _ in left:
            working.grad = None
        masters = [master for _, master in left]
        sums = _base_of(masters)
        if (
            sums is not None and sums.numel() == flat.numel()
        ):  # those of the same parameters, as in all passes but the first
            sums.add_(flat)
            return
        for master, part in zip(masters, flat.split([master.numel() for master in masters]), strict=True):
            added = part.view_as(master)
            master.grad = added if master.grad is None else master.grad.add_(added)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's weights, in place: whoever shares their memory sees the update."""
        if self._before_publish is not None:
            self._before_publish()
        pairs = [
            (working, self.values[name])
            for name, working in self._working.items()
            if working is not self.parameters[name]
        ]
        if pairs:  # from the host, at the speed of its bus
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)), non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def differing(self) -> list[str]:
        """The parameters that do not hold what `publish` wrote: somebody else, who shares their memory, has written to
        them.
        """
        names, differ = [], []
        for name, working in self._working.items():
            if self.parameters[name] is not working:
                for ours, theirs in _chunks(working, self.values[name]):
                    names.append(name)
                    differ.append(_any_bit_differs(ours, theirs))
        flags = torch.stack(differ).tolist() if differ else []  # waits for the device once
        return list(dict.fromkeys(name for name, flag in zip(names, flags, strict=True) if flag))

    def state_dict(self) -> dict[str, Tensor]:
        """The masters that say more than the model's weights: what a checkpoint must hold beside the model."""
        return {
            name: value
            for name, value in self.values.items()
            if (self._rounds_to or self._working[name].dtype) != torch.float32
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict()` and publish it."""
        for name, value in state.items():
            self.values[name].copy_(value)
        self.publish()


def _base_of(masters: Sequence[nn.Parameter]) -> Tensor | None:
    """What the gradients of all of these are views of, if that is one tensor."""
    bases = [None if master.grad is None else master.grad._base for master in masters]
    return bases[0] if all(base is bases[0] for base in bases) else None


def _chunks(working: Tensor, master: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What the model has, and what `publish` would write there, a part at a time."""
    if (
        working.numel() <= CHUNK_ELEMENTS
    ):  # most are, and every further call takes longer than the GPU takes for the comparison
        yield working, _like(working, master)
        return
    for ours, theirs in zip(
        working.flatten().split(CHUNK_ELEMENTS), master.flatten().split(CHUNK_ELEMENTS), strict=True
    ):
        yield ours, _like(ours, theirs)


def _like(working: Tensor, master: Tensor) -> Tensor:
    return master.to(working.device, non_blocking=True).to(working.dtype)


def _any_bit_differs(ours: Tensor, theirs: Tensor) -> Tensor:
    """[] bool. Eight bytes are compared at a time where they can be: that is three times as fast on a GPU."""
    several = 8 // ours.element_size()
    is_wide = (
        ours.is_contiguous()
        and ours.dim() > 0
        and ours.size(-1) % several == 0
        and ours.storage_offset() % several == 0
    )
    integer = torch.int64 if is_wide else {2: torch.int16, 4: torch.int32}[ours.element_size()]
    return ours.view(integer).ne(theirs.view(integer)).any()
