"""The model being trained: a transformers module, the fp32 masters behind it, and its view of a batch of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offline_grpo.errors import ConfigError
from offline_grpo.model.adapters import LanguageModel, has_adapters, unwrapped
from offline_grpo.model.forward import hidden_states, packed_attention
from offline_grpo.model.logprobs import head_stats
from offline_grpo.model.masters import MasterWeights
from offline_grpo.model.text import decode, encode
from offline_grpo.types import Message, TokenBatch, TokenStats

HEAD_TOLERANCE_NATS = 0.05


class Scorer:
    """A causal language model that scores flat batches. The frozen reference is one; the policy is one with masters.

    Args:
        model: a transformers model with a language-model head, or a peft model around one.
        packing: "padded", "tree" or "varlen" (see forward.py).
        without_adapter: score with LoRA adapters switched off, so that an adapted policy serves as its own reference.
    """

    def __init__(self, model: LanguageModel, packing: str, *, without_adapter: bool = False) -> None:
        self.model = model
        self.packing = packing
        self._without_adapter = without_adapter

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model, free of peft's wrapper; LoRA layers sit inside it."""
        return unwrapped(self.model)

    @property
    def _head(self) -> nn.Linear:
        head = self.causal_lm.get_output_embeddings()
        assert isinstance(head, nn.Linear), f"{type(self.causal_lm).__name__} has no linear language-model head"
        return head

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.causal_lm.dtype

    def attention(self) -> AbstractContextManager[None]:
        """The attention that `score` uses; a backward pass through checkpointed activations must run inside."""
        return packed_attention(self.causal_lm.get_decoder()) if self.packing == "varlen" else nullcontext()

    def score(self, batch: TokenBatch, *, entropy_requires_grad: bool = False) -> TokenStats:
        """Logprobs and entropy [T] of the batch's completion tokens, under the batch's temperature."""
        hidden = hidden_states(self.causal_lm.get_decoder(), batch, self.packing)  # [T, H]
        head = self._head
        at = batch.completion_mask.nonzero().squeeze(-1)  # [N]
        logprobs, entropy = head_stats(
            hidden[at - 1],  # the only shift by one: a token is predicted at the position before it
            head.weight,
            head.bias,
            batch.token_ids[at],
            batch.temperature[at],
            entropy_requires_grad=entropy_requires_grad,
        )
        zeros = logprobs.new_zeros(len(batch.token_ids))  # [T]
        return TokenStats(logprobs=zeros.index_copy(0, at, logprobs), entropy=zeros.index_copy(0, at, entropy))

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Logprobs [T] without gradient, dropout off."""
        adapter: AbstractContextManager[Any] = nullcontext()
        if self._without_adapter:
            assert has_adapters(self.model)
            adapter = self.model.disable_adapter()
        with eval_mode(self.model), adapter:
            return self.score(batch).logprobs

    @torch.no_grad()
    def check_head(self) -> None:
        """Refuse models that do more to the logits than multiply hidden states by the output embeddings (soft-capping, scaling).

        Raises:
            ConfigError: the logits of the model and ours differ.
        """
        ids = torch.arange(8, device=self.device)[None]  # [1, 8]
        with eval_mode(self.model):
            expected = self.causal_lm(input_ids=ids, use_cache=False).logits.float()
            head = self._head
            hidden = self.causal_lm.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            ours = nn.functional.linear(hidden, head.weight, head.bias).float()
        worst = (expected.log_softmax(-1) - ours.log_softmax(-1)).abs().max().item()
        if worst > HEAD_TOLERANCE_NATS:
            raise ConfigError(
                f"model.train_id={self.causal_lm.name_or_path}: {type(self.causal_lm).__name__} changes its logits after the head "
                f"(by up to {worst:.3g} nats), which the fused loss head does not do; choose a model without logit soft-capping or scaling"
            )


class Policy(Scorer):
    """The trained model with its tokenizer and fp32 masters.

    Args:
        home: where it computes; other than the model's device only until `become_shared`.
    """

    def __init__(self, model: LanguageModel, tokenizer: PreTrainedTokenizerBase, packing: str, *, home: torch.device | None = None) -> None:
        super().__init__(model, packing)
        self.tokenizer = tokenizer
        self.home = home or self.device
        self._before_publish: Callable[[], None] | None = None

    @property
    def lora_rank(self) -> int | None:
        """The highest rank of the LoRA adapters that are trained; None where the model's own weights are."""
        if not has_adapters(self.model):
            return None
        return max(config.r for config in self.model.peft_config.values() if hasattr(config, "r"))  # type: ignore[union-attr]

    @cached_property
    def masters(self) -> MasterWeights:
        """Made when first asked for, from the memory that the weights are in by then."""
        is_shared = self._before_publish is not None
        return MasterWeights(self.model.named_parameters(), separate=is_shared, before_publish=self._before_publish)

    def become_shared(self, *, before_publish: Callable[[], None]) -> None:
        """The parameters have moved to memory of `home` that others read too; let the rest of the model follow them.

        Args:
            before_publish: called before that memory is written to.
        """
        assert "masters" not in self.__dict__, "masters would be left behind in the old memory"
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.home)
        self._before_publish = before_publish

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes, in the model's own format, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def save_model(self, folder: Path) -> None:
        """Write the model, or its adapter alone, as transformers and servers load it."""
        if has_adapters(self.model):
            self.model.save_pretrained(str(folder), save_embedding_layers=False)  # "auto" asks the hub for the base model's config
        else:
            self.model.save_pretrained(str(folder))

    def as_reference(self) -> Scorer:
        """The base model under the adapters: a reference that costs no memory. Only for peft models."""
        return Scorer(self.model, self.packing, without_adapter=True)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Prompt token ids of a conversation, see `encode`."""
        return encode(self.tokenizer, messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens: what a task may see."""
        return decode(self.tokenizer, token_ids)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off inside, the previous mode back afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
