"""Saves a policy as transformers, peft and inference servers load it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from offline_grpo.model.adapters import ADAPTER, has_adapters
from offline_grpo.model.policy import Policy

ADAPTER_FILE = "adapter_model.safetensors"  # as peft and vLLM call it
OF_ADAPTER = re.compile(rf"(\.lora_\w+)\.{ADAPTER}\b")
"""In peft's names of parameters; files do without the adapter's own."""
MAX_FILE = "50GB"
"""transformers' own. A file is written from memory at once."""


def save_policy(policy: Policy, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write the model, or its adapter alone, and the tokenizer.

    Args:
        weights: the whole of each parameter, by its name in the checkpoint. See `Sharding.full_weights`.

    Raises:
        OSError, RuntimeError, safetensors.SafetensorError: the folder cannot be written; a full disk comes as any of
        them.
    """
    if policy.is_sharded:
        from offline_grpo.model.shards import on_disk  # which takes a second

        folder.mkdir(parents=True, exist_ok=True)
        full = on_disk(weights, folder)
    else:
        full = dict(weights)
    if has_adapters(policy.model):
        full = {f"base_model.model.{name}": tensor for name, tensor in full.items()}
        policy.model.save_pretrained(
            str(folder), state_dict=full, save_embedding_layers=False
        )  # "auto" asks the hub for the base's config
    else:
        buffers = {
            name: value for name, value in policy.causal_lm.state_dict().items() if name not in full
        }  # and tied parameters
        if policy.is_sharded:
            tied = dict(policy.causal_lm.named_parameters(remove_duplicate=False))
            buffers = {name: value for name, value in buffers.items() if name not in tied}
        policy.model.save_pretrained(str(folder), state_dict=buffers | full, max_shard_size=MAX_FILE)
        if policy.is_sharded:  # the parameters are fp32, and the file is not
            policy.causal_lm.config.dtype = policy.dtype
            policy.causal_lm.config.save_pretrained(str(folder))
    policy.tokenizer.save_pretrained(str(folder))


def save_adapter(policy: Policy, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write what servers load of an adapter, in less than half of the time that peft takes to look through the model
    for it.

    Args, raises: see `save_policy`.
    """
    folder.mkdir(parents=True)
    tensors = {
        "base_model.model." + OF_ADAPTER.sub(r"\1", name): tensor.contiguous()
        for name, tensor in weights
        if ".lora_" in name
    }
    save_file(tensors, folder / ADAPTER_FILE)
    policy.model.peft_config[ADAPTER].save_pretrained(str(folder))  # type: ignore[index]
