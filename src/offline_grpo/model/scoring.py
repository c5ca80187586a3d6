"""A model's view of a flat batch: the logprob and the entropy of every completion token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from offline_grpo.interfaces import Layout, LossHead
from offline_grpo.model.adapters import LanguageModel, adapters_off, unwrapped
from offline_grpo.model.logits import LogitTransform, decoder_of, output_embeddings
from offline_grpo.types import TokenBatch, TokenStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Scoring(nn.Module):
    """Scores flat batches with a causal language model. The frozen reference is one, the policy has one.

    `forward` alone uses the decoder and the weights of the head, so that FSDP2 can wrap it.

    Args:
        model: a transformers model with a language-model head, or a peft model around one.
        layout: how the decoder runs over a batch.
        head: computes logprobs and entropies from hidden states.
        logits: what the model does to its logits.
    """

    def __init__(
        self,
        model: LanguageModel,
        layout: Layout,
        head: LossHead,
        *,
        logits: LogitTransform = LogitTransform(),  # noqa: B008 - immutable
    ) -> None:
        super().__init__()
        self.model = model
        self.layout = layout
        self.head = head
        self.logits = logits

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model, free of peft's wrapper; LoRA layers sit inside it."""
        return unwrapped(self.model)

    @property
    def output(self) -> nn.Linear:
        """The language-model head."""
        return output_embeddings(self.causal_lm)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, batch: TokenBatch, *, entropy_requires_grad: bool = False) -> TokenStats:
        """Logprobs and entropies [T] of the batch's completion tokens under the batch's temperature; 0 elsewhere.

        Args:
            entropy_requires_grad: if False the entropy is a metric, without gradient.
        """
        # Triton kernels run on the current GPU, and a reference may have another.
        with torch.accelerator.device_index(self.device.index):
            hidden = self.layout.hidden_states(decoder_of(self.causal_lm), batch)  # [T, H]
            output = self.output
            at = batch.completion_positions  # [N]
            logprobs, entropy = self.head(
                hidden[at - 1],  # the only shift by one: a token is predicted at the position before it
                output.weight,
                output.bias,
                batch.token_ids[at],
                batch.temperature[at] / self.logits.scale,
                softcap=self.logits.softcap,
                entropy_requires_grad=entropy_requires_grad,
            )
        zeros = logprobs.new_zeros(len(batch.token_ids))  # [T]
        return TokenStats(logprobs=zeros.index_copy(0, at, logprobs), entropy=zeros.index_copy(0, at, entropy))

    def attention(self, batch: TokenBatch) -> AbstractContextManager[None]:
        """The attention that `forward` uses; a backward pass through checkpointed activations must run inside."""
        return self.layout.attention(decoder_of(self.causal_lm), batch)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Logprobs [T] without gradient, dropout off."""
        with eval_mode(self.model):
            return self(batch).logprobs

    @torch.no_grad()
    def entropy(self, batch: TokenBatch) -> Tensor:
        """Entropies [T] without gradient, dropout off."""
        with eval_mode(self.model):
            return self(batch).entropy


@dataclass(frozen=True)
class BaseScoring:
    """An adapted policy with its LoRA adapters switched off: so it is its own reference."""

    adapted: Scoring

    @property
    def device(self) -> torch.device:
        return self.adapted.device

    def logprobs(self, batch: TokenBatch) -> Tensor:
        with adapters_off(self.adapted.model):
            return self.adapted.logprobs(batch)


def prepare_for_gradients(model: nn.Module, *, adapter_dropout: bool = True) -> None:
    """Switch on what training needs of train mode: activation checkpointing, and dropout on adapters.

    The rest stays in eval mode: the sampler has no dropout, so the scores compared with its logprobs must have none.
    """
    for name, module in model.named_modules():
        trains = getattr(module, "gradient_checkpointing", False) or (adapter_dropout and ".lora_dropout" in name)
        if module.training != trains:  # to set a module's attribute takes much longer than to read it
            module.training = trains


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off inside, the previous modes back afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
