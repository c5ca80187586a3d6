"""Optimizers refuse what they cannot do before a model is loaded."""

import sys

import pytest

from offline_grpo.errors import ConfigError
from offline_grpo.train.optimizer import AdamW8bit

SETTINGS = {"lr": 1e-3, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "paged": False}


def test_8_bit_adamw_without_bitsandbytes_says_what_to_do(monkeypatch):
    """It must never fall back to another optimizer in silence."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
    with pytest.raises(
        ConfigError, match=r"^train/optimizer=adamw_8bit: bitsandbytes cannot be used here .*train/optimizer=adamw$"
    ):
        AdamW8bit(**SETTINGS)
