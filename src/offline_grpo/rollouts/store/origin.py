"""What a file of a store says about itself, and what it is called."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

FOLDER = "rollouts"
FORMAT = 1
"""Increased when files of an older version can no longer be read."""
KEY = "offline_grpo"
"""Of the JSON in a file's metadata."""
_LAYERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SHAPE = ("model_type", "vocab_size", *_LAYERS)


@dataclass(frozen=True)
class Origin:
    """Where rollouts come from.

    Args:
        model: what the run trained.
        architecture: hash of its kind and sizes, which every version of its weights has.
        tokenizer: hash of what each token id means.
        config: of the run, resolved, without secrets.
        version: how many updates the trainer's weights carried when this was recorded. The rows say the same of
            those that drew a token.
        weights: fingerprint of those weights, of the trained ones where others are frozen.
    """

    model: str
    architecture: str
    tokenizer: str
    config: dict[str, Any]
    version: int = 0
    weights: str = ""
    format: int = FORMAT

    def to_metadata(self) -> dict[str, str]:
        """For a file."""
        return {KEY: json.dumps(vars(self), sort_keys=True)}


def file_name(phase: str, iteration: int) -> str:
    """`iter_004.parquet`, `eval_iter_004.parquet`, `eval_init.parquet`."""
    return f"{'eval_' if phase == 'eval' else ''}{'init' if iteration == -1 else f'iter_{iteration:03d}'}.parquet"


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what each token id means. The same whatever the chat template and the special roles."""
    return json_hash(sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])))


def architecture_hash(config: PreTrainedConfig) -> str:
    """SHA-256 of a language model's kind and sizes."""
    text = config.get_text_config()
    return json_hash({name: getattr(text, name, None) for name in _SHAPE})


def json_hash(value: Any) -> str:
    """SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
