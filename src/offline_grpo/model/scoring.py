"""A model's view of a flat batch: the logprob and the entropy of every completion token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offline_grpo.interfaces import Layout, LossHead
from offline_grpo.model.adapters import LanguageModel, has_adapters, unwrapped
from offline_grpo.types import TokenBatch, TokenStats


class Scoring(nn.Module):
    """Scores flat batches with a causal language model. The frozen reference is one, the policy has one.

    `forward` is the only place that uses the decoder and the weights of the language-model head, so that whatever wraps a module's forward
    (FSDP2, torch.compile) can wrap this one.

    Args:
        model: a transformers model with a language-model head, or a peft model around one.
        layout: how the decoder runs over a batch.
        head: computes logprobs and entropies from hidden states.
        without_adapter: score with LoRA adapters switched off, so that an adapted policy is its own reference.
    """

    def __init__(self, model: LanguageModel, layout: Layout, head: LossHead, *, without_adapter: bool = False) -> None:
        super().__init__()
        self.model = model
        self.layout = layout
        self.head = head
        self.without_adapter = without_adapter

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model, free of peft's wrapper; LoRA layers sit inside it."""
        return unwrapped(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def forward(self, batch: TokenBatch, *, entropy_requires_grad: bool = False) -> TokenStats:
        """Logprobs and entropies [T] of the batch's completion tokens under the batch's temperature; 0 elsewhere.

        Args:
            entropy_requires_grad: if False the entropy is a metric, without gradient.
        """
        hidden = self.layout.hidden_states(self.causal_lm.get_decoder(), batch)  # [T, H]
        output = output_embeddings(self.causal_lm)
        at = batch.completion_mask.nonzero().squeeze(-1)  # [N]
        logprobs, entropy = self.head(
            hidden[at - 1],  # the only shift by one: a token is predicted at the position before it
            output.weight,
            output.bias,
            batch.token_ids[at],
            batch.temperature[at],
            entropy_requires_grad=entropy_requires_grad,
        )
        zeros = logprobs.new_zeros(len(batch.token_ids))  # [T]
        return TokenStats(logprobs=zeros.index_copy(0, at, logprobs), entropy=zeros.index_copy(0, at, entropy))

    def attention(self) -> AbstractContextManager[None]:
        """The attention that `forward` uses; a backward pass through checkpointed activations must run inside."""
        return self.layout.attention(self.causal_lm.get_decoder())

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Logprobs [T] without gradient, dropout off."""
        adapter: AbstractContextManager[Any] = nullcontext()
        if self.without_adapter:
            assert has_adapters(self.model)
            adapter = self.model.disable_adapter()
        with eval_mode(self.model), adapter:
            return self(batch).logprobs


def output_embeddings(model: PreTrainedModel) -> nn.Linear:
    """The language-model head."""
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), f"{type(model).__name__} has no linear language-model head"
    return head


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off inside, the previous mode back afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
