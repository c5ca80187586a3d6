"""Saves a policy as transformers, peft and inference servers load it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from offline_grpo.model.adapters import has_adapters
from offline_grpo.model.policy import Policy


def save_policy(policy: Policy, weights: Iterable[tuple[str, Tensor]], folder: Path, *, with_tokenizer: bool = True) -> None:
    """Write the model, or its adapter alone, and the tokenizer.

    Args:
        weights: the whole of each parameter, by its name in the checkpoint. See `Sharding.full_weights`.

    Raises:
        OSError, RuntimeError, safetensors.SafetensorError: the folder cannot be written; a full disk comes as any of them.
    """
    full = dict(weights)
    if has_adapters(policy.model):
        full = {f"base_model.model.{name}": tensor for name, tensor in full.items()}
        policy.model.save_pretrained(str(folder), state_dict=full, save_embedding_layers=False)  # "auto" asks the hub for the base's config
    else:
        buffers = {name: value for name, value in policy.causal_lm.state_dict().items() if name not in full}  # and tied parameters
        policy.model.save_pretrained(str(folder), state_dict=buffers | full)
    if with_tokenizer:
        policy.tokenizer.save_pretrained(str(folder))
