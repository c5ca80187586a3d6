"""The function between the product with the output embeddings and the logits: identity, a factor, a soft-cap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from offline_grpo.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL, HUGE = 2.0**-20, 2.0**20  # powers of two: dividing by them rounds nothing
RELATIVE_TOLERANCE = 1e-4  # of float32 arithmetic; a bf16 constant would be off by 4e-3


class LogitTransform(NamedTuple):
    """The model's logits are `scale * c(z)` for z = hidden @ weight.T + bias, with c(z) = softcap * tanh(z / softcap),
    or z for None.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, z: Tensor) -> Tensor:
        return self.scale * (z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap))


def output_embeddings(model: PreTrainedModel) -> nn.Linear:
    """The language-model head."""
    head = model.get_output_embeddings()
    fault = f"{type(model).__name__} has no linear head; choose another model"
    require(isinstance(head, nn.Linear), "model.train_id", model.name_or_path, fault)
    return head  # type: ignore[return-value]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The model below the head, also where `get_decoder` finds both together (Llama 4) or the head (ModernBERT)."""
    decoder: Any = model.get_decoder()
    whole: Any = decoder if hasattr(decoder, "lm_head") else model
    return whole.model if decoder in (whole, model.get_output_embeddings()) else decoder


@torch.no_grad()
def measure_logit_transform(model: PreTrainedModel, *, key: str = "model.train_id") -> LogitTransform:
    """Find the transform by putting chosen numbers in place of hidden states and of the head's output.

    It is measured and not read from config.json because a name does not say enough: `logits_scaling` divides in Granite
    and multiplies in HyperCLOVA. Chosen numbers show a soft-cap that the model's own logits are too small to reach.

    Args:
        key: the setting that named the model, for messages.

    Raises:
        ConfigError: the model does something else to its logits.
    """
    hidden_size, vocab_size = output_embeddings(model).weight.shape[::-1]
    device = model.device
    z = torch.zeros(vocab_size, device=device)  # [V]
    magnitudes = torch.logspace(-2, 3, vocab_size // 2, device=device)
    z[0 : 2 * len(magnitudes) : 2], z[1 : 2 * len(magnitudes) : 2] = magnitudes, -magnitudes
    z[0], z[1] = SMALL, HUGE
    head_input, logits = _run_with(model, torch.ones(hidden_size, device=device), z)
    small, huge = logits[:2].tolist()
    after = small / SMALL
    cap = huge / after if abs(huge) < 0.5 * abs(after) * HUGE else None
    found = LogitTransform(after, cap)
    before = float(head_input.double().mean())
    is_known = (
        torch.allclose(logits, found(z), rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE * abs(after) * SMALL)
        and torch.allclose(head_input, torch.full_like(head_input, before))
        and (before == 1 or output_embeddings(model).bias is None)
    )
    fault = "changes its hidden states or logits beside the head by more than a factor or a tanh soft-cap"
    is_known &= after > 0 and before > 0
    require(is_known, key, model.name_or_path, f"{type(model).__name__} {fault}; choose another model")
    return LogitTransform(after * before, None if cap is None else cap / before)


def _run_with(model: PreTrainedModel, hidden: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The head's input if the decoder returns `hidden` [H], and the logits [V] made of the head's output `z` [V]."""
    seen: list[Tensor] = []

    def decoder_returns(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = hidden.expand_as(output.last_hidden_state)
        return output

    def head_returns(x: Tensor) -> Tensor:
        seen.append(x[0, -1])
        return z.expand(*x.shape[:-1], len(z))

    hook = decoder_of(model).register_forward_hook(decoder_returns)
    head: Any = output_embeddings(model)
    head.forward = head_returns
    try:
        logits = model(input_ids=torch.tensor([[1]], device=model.device), use_cache=False).logits[0, -1]
    finally:
        hook.remove()
        del head.forward
    return seen[0].float(), logits.float()
