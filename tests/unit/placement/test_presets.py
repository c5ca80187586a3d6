"""Every preset of a model fits the card that its file names, and `check` knows what fits smaller ones: by the memory
plan, from published shapes, without a download.
"""

from __future__ import annotations

import copy
import re
from math import ceil
from typing import Any

import pytest
from factories import CONF, compose_config
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3Config,
    SmolLM3Config,
)

from offline_grpo import check
from offline_grpo.config.compose import typed
from offline_grpo.config.parts import make_plan
from offline_grpo.start.memory import GIB, MemoryRequest, predict

USABLE_GIB = {24: 23.5, 48: 47.4, 80: 79.1, 141: 139.8}
"""GB of cards that are sold: GiB that a process sees of an RTX 4090, an L40S, an H100 and an H200."""


def widths(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "head_dim": head_dim}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"tie_word_embeddings": True, "max_position_embeddings": 32768, **sizes, **heads_of, **more}


QWEN, LLAMA = {"vocab_size": 151936}, {"vocab_size": 128256}
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
LINEAR = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
SHAPES: dict[str, PretrainedConfig] = {
    "qwen2_5_0_5b": Qwen2Config(**widths(896, 4864, 24, 14, 2, 64, **QWEN)),
    "qwen2_5_1_5b": Qwen2Config(**widths(1536, 8960, 28, 12, 2, 128, **QWEN)),
    "qwen3_0_6b": Qwen3Config(**widths(1024, 3072, 28, 16, 8, 128, **QWEN)),
    "qwen3_1_7b": Qwen3Config(**widths(2048, 6144, 28, 16, 8, 128, **QWEN)),
    "qwen3_4b": Qwen3Config(**widths(2560, 9728, 36, 32, 8, 128, **QWEN)),
    "qwen3_8b": Qwen3Config(**widths(4096, 12288, 36, 32, 8, 128, **QWEN | {"tie_word_embeddings": False})),
    "qwen3_5": Qwen3_5Config(
        text_config=widths(1024, 3584, 24, 8, 2, 256, vocab_size=248320, **LINEAR),
        vision_config={"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "out_hidden_size": 1024},
    ),
    "llama3_2_1b": LlamaConfig(**widths(2048, 8192, 16, 32, 8, 64, **LLAMA)),
    "llama3_2_3b": LlamaConfig(**widths(3072, 8192, 28, 24, 8, 128, **LLAMA)),
    "gemma3_1b": Gemma3TextConfig(**widths(1152, 6912, 26, 4, 1, 256, vocab_size=262144)),
    "gemma3_4b": Gemma3Config(
        text_config=widths(2560, 10240, 34, 8, 4, 256, vocab_size=262208), vision_config={**SIGLIP, "image_size": 896}
    ),
    "mistral": MistralConfig(**widths(4096, 14336, 32, 32, 8, 128, vocab_size=32768, tie_word_embeddings=False)),
    "smollm3": SmolLM3Config(**widths(2048, 11008, 36, 16, 4, 128, **LLAMA)),
}


def planned_gib(preset: str, change: str) -> int:
    """Of the whole run on one card, which samples in process; rounded up."""
    words = ("experiment=gsm8k", "task=arithmetic", f"model={preset}", "model.train_id=none", "model.compile=true")
    plan = make_plan(typed(compose_config(*words, *change.split())))
    request = MemoryRequest(plan, copy.deepcopy(SHAPES[preset]), None, (60, 300), [0], (), [141 * GIB])
    return ceil(predict(request, 1.0)[0].needed_bytes / GIB)


def test_every_preset_is_here() -> None:
    names = {path.stem for path in (CONF / "model").glob("*.yaml")}
    assert names - {"hf", "tiny", "smollm2_135m"} == SHAPES.keys() == check.PRESETS.keys()


@pytest.mark.parametrize("preset", SHAPES)
def test_a_preset_fits_the_card_that_it_names_and_no_smaller_one(preset: str) -> None:
    [named] = re.findall(r"lanned for one GPU of (\d+) GB", (CONF / "model" / f"{preset}.yaml").read_text())
    gib = planned_gib(preset, "")
    assert next(card for card, usable in USABLE_GIB.items() if gib <= usable) == int(named)
    assert gib == check.PRESETS[preset][0]


@pytest.mark.slow
@pytest.mark.parametrize("preset", SHAPES)
def test_check_knows_what_each_change_saves(preset: str) -> None:
    assert tuple(planned_gib(preset, change) for change in check.CHANGES) == check.PRESETS[preset]


def test_what_fits_each_card() -> None:
    fits = {card: check.fitting(usable) for card, usable in USABLE_GIB.items()}
    for presets in fits.values():
        assert {name for names in presets.values() for name in names} == SHAPES.keys(), "each fits somehow"
    as_they_are = {card: set(presets.get("", ())) for card, presets in fits.items()}
    assert as_they_are[24] < as_they_are[48] < as_they_are[80] == as_they_are[141] == SHAPES.keys()
    assert "qwen3_8b" in fits[24]["model/lora=default model.quantization=nf4 train.lr=1e-5"]
    assert "qwen3_4b" in fits[48]["train.optimizer.offload=true"]
