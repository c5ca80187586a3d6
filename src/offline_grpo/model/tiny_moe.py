"""A tiny mixture of experts: the tiny Llama with a router and experts in place of each feed-forward layer (Mixtral)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from offline_grpo.errors import require
from offline_grpo.model.tiny import TinyModel


@dataclass(frozen=True)
class TinyMoeModel(TinyModel):
    """The tiny model with experts of width `intermediate_size`."""

    num_experts: int
    num_experts_per_token: int

    name: ClassVar[str] = "tiny_moe"

    def __post_init__(self) -> None:
        super().__post_init__()
        per_token, fix = self.num_experts_per_token, f"must be at most model.tiny.num_experts={self.num_experts}"
        require(per_token <= self.num_experts, "model.tiny.num_experts_per_token", per_token, fix)

    def _model(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        shape: dict[str, Any] = self._text_config(tokenizer).to_dict()
        del shape["model_type"]
        shape |= {"num_local_experts": self.num_experts, "num_experts_per_tok": self.num_experts_per_token}
        return MixtralForCausalLM(MixtralConfig(**shape))
