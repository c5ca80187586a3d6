"""The model being trained: its scoring, its tokenizer, and the fp32 masters that the optimizer steps on; and how it is
saved, as transformers, peft and inference servers load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from offline_grpo.model.adapters import ADAPTER, has_adapters, name_in_file
from offline_grpo.model.device import make_current
from offline_grpo.model.layers import is_composite, output_embeddings, processor_files
from offline_grpo.model.masters import MasterWeights
from offline_grpo.model.quantization import num_weights
from offline_grpo.model.scoring import Scoring

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ADAPTER_FILE = "adapter_model.safetensors"  # as peft and vLLM call it
MAX_FILE = "50GB"
"""transformers' own. A file is written from memory at once."""


class Policy:
    """The trained model: loaded, connected to the engine (see `WeightSync.attach`), given masters, trained."""

    def __init__(
        self, scoring: Scoring, tokenizer: PreTrainedTokenizerBase, *, compute_device: torch.device | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.scoring, self.model, self.causal_lm = scoring, scoring.model, scoring.causal_lm
        self.compute_device = compute_device or scoring.device  # another than it is on only until `become_shared`
        self.dtype = self.causal_lm.dtype  # that it computes and is saved in
        self.is_sharded = False  # whether its parameters are this process's parts of them (see train/fsdp2.py)
        self.logprobs = scoring.logprobs_alone  # from a batch to logprobs [T] without gradient, dropout off
        self.masters: MasterWeights  # that the optimizer steps on; there once `make_masters` was called
        self._before_publish: Callable[[], None] | None = None

    @property
    def device(self) -> torch.device:
        return self.scoring.device

    @property
    def vocab_size(self) -> int:
        """How many token ids it can read and score; a tokenizer may have fewer, where the model's are padded."""
        tables = (self.causal_lm.get_input_embeddings().weight, output_embeddings(self.causal_lm).weight)  # [V, H] each
        return min(table.shape[0] for table in tables)  # type: ignore[union-attr]

    @property
    def lora_rank(self) -> int | None:
        """The highest rank of the LoRA adapters that are trained; None where the model's own weights are."""
        if not has_adapters(self.model):
            return None
        config: Any = self.model.peft_config[ADAPTER]
        return max([config.r, *config.rank_pattern.values()])  # experts of two parts in one tensor have twice the rank

    def make_masters(self, *, offload: bool = False) -> MasterWeights:
        """Make the masters from the memory that the weights are in now. Called once, after every `WeightSync.attach`.
        `offload`: see `MasterWeights`.
        """
        self.masters = MasterWeights(
            self.model.named_parameters(),
            separate=self._before_publish is not None,
            before_publish=self._before_publish,
            offload=offload,
            rounds_to=self.dtype if self.is_sharded and not has_adapters(self.model) else None,
        )
        return self.masters

    def become_shared(self, *, before_publish: Callable[[], None] | None = None) -> None:
        """Note that the parameters now lie in memory on `compute_device` that others read too, and move the model's
        buffers there; before there are masters. That GPU becomes torch's current one. `before_publish` is called before
        that memory is written; None where it never is.
        """
        make_current(self.compute_device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.compute_device)
        self._before_publish = before_publish

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes, in the model's own format, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def num_weights(self) -> int:
        """How many numbers the model has, adapters included."""
        return sum(map(num_weights, self.model.parameters()))

    @property
    def num_trainable(self) -> int:
        """How many numbers training changes."""
        return sum(parameter.numel() for parameter in self.trained_parameters().values())


def save_policy(policy: Policy, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write the model, or its adapter alone, and the tokenizer. Where that cannot be done, such as on a full disk, it
    raises OSError, RuntimeError or safetensors.SafetensorError.

    Args:
        weights: the whole of each parameter, by its name in the checkpoint. See `Sharding.full_weights`.
    """
    model = policy.causal_lm
    if has_adapters(policy.model):
        save_adapter(policy, weights, folder)
    elif not policy.is_sharded:  # `weights`, and what is no parameter, or is one under a second name
        full = dict(weights)
        others = {name: value for name, value in model.state_dict().items() if name not in full}
        save_model(model, folder, state_dict=others | full, max_shard_size=MAX_FILE)
    else:  # whole tensors one after the other; all of them in memory at once would be too much
        folder.mkdir(parents=True, exist_ok=True)
        full = on_disk(weights, folder)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = {name: value for name, value in model.state_dict().items() if name not in parameters}
        save_model(model, folder, state_dict=buffers | full, max_shard_size=MAX_FILE)
        model.config.dtype = policy.dtype  # the parameters are fp32, and the file is not
        model.config.save_pretrained(str(folder))
    policy.tokenizer.save_pretrained(str(folder))


def save_adapter(policy: Policy, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write what peft and servers load of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name_in_file(name): tensor.contiguous() for name, tensor in weights if ".lora_" in name}
    save_file(tensors, folder / ADAPTER_FILE)
    config: Any = policy.model.peft_config[ADAPTER]  # type: ignore[index]
    for field, value in vars(config).items():
        if isinstance(value, set):  # whose order differs from process to process
            setattr(config, field, sorted(value))
    config.save_pretrained(str(folder))


def save_model(model: PreTrainedModel, folder: Path, **how: Any) -> None:
    """`model.save_pretrained`, with the model's own generation config: transformers loads one that is greedy and has a
    temperature, and refuses to save it. A composite's processor files, and tensors that transformers leaves out, are
    those that it was loaded with.
    """
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    if kept := getattr(model, "kept_tensors", None):
        how["state_dict"] = how.get("state_dict", model.state_dict()) | kept
    # transformers might refuse the generation config, so it sees an empty one; the model's own is written as it is.
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(str(folder), **how)
    finally:
        model.generation_config = own
    if model.can_generate():
        own.to_json_file(folder / GENERATION_CONFIG_NAME)
    if is_composite(model.config):
        for name, content in processor_files(model.name_or_path).items():
            (folder / name).write_bytes(content)


def on_disk(named: Iterable[tuple[str, Tensor]], folder: Path) -> dict[str, Tensor]:
    """Tensors whose memory is a file that has no name any more: the system keeps in memory what there is room for."""
    found: dict[str, Tensor] = {}
    path = folder / ".gathered"
    for name, tensor in named:
        if tensor.numel() == 0:
            found[name] = tensor.cpu()
            continue
        path.write_bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        stored = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        found[name] = stored.view(tensor.shape)
        path.unlink()
    return found


def buckets(named: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """In order, as many tensors at a time as fit into `max_bytes`; a larger one goes alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
