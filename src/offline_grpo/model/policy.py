"""The model being trained: its scoring, its tokenizer, and the fp32 masters that the optimizer steps on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offline_grpo.model.adapters import ADAPTER, LanguageModel, has_adapters
from offline_grpo.model.device import make_current
from offline_grpo.model.layers import output_embeddings
from offline_grpo.model.masters import MasterWeights, part_of_process
from offline_grpo.model.quantization import num_weights
from offline_grpo.model.scoring import Scoring

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Policy:
    """The trained model: loaded, connected to the engine (see `WeightSync.connect`), given masters, trained."""

    def __init__(
        self, scoring: Scoring, tokenizer: PreTrainedTokenizerBase, *, compute_device: torch.device | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.scoring = scoring
        self.compute_device = compute_device or scoring.device  # another than it is on only until `become_shared`
        self.dtype = self.causal_lm.dtype  # that it computes and is saved in
        self.is_sharded = False  # whether its parameters are this process's parts of them (see train/fsdp2.py)
        self.logprobs = scoring.logprobs  # from a batch to logprobs [T] without gradient, dropout off
        self.masters: MasterWeights  # that the optimizer steps on; there once `make_masters` was called
        self._before_publish: Callable[[], None] | None = None

    @property
    def model(self) -> LanguageModel:
        return self.scoring.model

    @property
    def causal_lm(self) -> PreTrainedModel:
        return self.scoring.causal_lm

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
        """Make the masters from the memory that the weights are in now. Called once, after every `WeightSync.connect`.
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

    def become_shared(self, *, before_publish: Callable[[], None]) -> None:
        """Note that the parameters now lie in memory on `compute_device` that others read too, and move the model's
        buffers there; before there are masters. That GPU becomes torch's current one. `before_publish` is called before
        that memory is written.
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

    def trained_here(self) -> list[Tensor]:
        """Those of this process: all of each, or its part."""
        return [part_of_process(p) for p in self.trained_parameters().values()]

    @property
    def num_weights(self) -> int:
        """How many numbers the model has, adapters included."""
        return sum(map(num_weights, self.model.parameters()))

    @property
    def num_trainable(self) -> int:
        """How many numbers training changes."""
        return sum(parameter.numel() for parameter in self.trained_parameters().values())
