"""Every preset of a model fits the card that its file names, and `check` knows what fits smaller ones: by the memory
plan, from published shapes, without a download.
"""

from __future__ import annotations

import re
from math import ceil
from typing import Any

import pytest
from factories import CONF, compose_config
from transformers import AutoConfig

from offline_grpo import check
from offline_grpo.config.compose import typed
from offline_grpo.config.parts import make_plan
from offline_grpo.start.memory import GIB, MemoryRequest, predict

USABLE_GIB = {24: 23.5, 48: 47.4, 80: 79.1, 141: 139.8}
"""GB of cards that are sold: GiB that a process sees of an RTX 4090, an L40S, an H100 and an H200."""
TOWERS = {"gemma3": (1152, 4304, 27), "qwen3_5": (768, 3072, 12)}
SHAPES = {
    "qwen2_5_0_5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, 64),
    "qwen2_5_1_5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128),
    "qwen3_0_6b": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128),
    "qwen3_1_7b": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128),
    "qwen3_4b": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128),
    "qwen3_8b": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128),
    "qwen3_5": ("qwen3_5", 248320, 1024, 3584, 24, 8, 2, 256),
    "llama3_2_1b": ("llama", 128256, 2048, 8192, 16, 32, 8, 64),
    "llama3_2_3b": ("llama", 128256, 3072, 8192, 28, 24, 8, 128),
    "gemma3_1b": ("gemma3_text", 262144, 1152, 6912, 26, 4, 1, 256),
    "gemma3_4b": ("gemma3", 262208, 2560, 10240, 34, 8, 4, 256),
    "mistral": ("mistral", 32768, 4096, 14336, 32, 32, 8, 128),
    "smollm3": ("smollm3", 128256, 2048, 11008, 36, 16, 4, 128),
}
"""Architecture, vocabulary, widths of the model and its MLP, blocks, heads, heads of keys, and their width."""
KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
KEYS += ("num_attention_heads", "num_key_value_heads", "head_dim")


def config_of(preset: str) -> Any:
    architecture, *numbers = SHAPES[preset]
    text: dict[str, Any] = dict(zip(KEYS, numbers, strict=True)) | {
        "tie_word_embeddings": preset not in ("qwen3_8b", "mistral")
    }
    if architecture not in TOWERS:
        return AutoConfig.for_model(architecture, max_position_embeddings=32768, **text)
    wide, mlp, blocks = TOWERS[architecture]
    tower = {"hidden_size": wide, "intermediate_size": mlp, "num_hidden_layers": blocks, "depth": blocks}
    linear = {"linear_num_value_heads": 16} if architecture == "qwen3_5" else {}
    return AutoConfig.for_model(architecture, text_config=text | linear, vision_config=tower)


def planned_gib(preset: str, change: str) -> int:
    """Of the whole run on one card, which samples in process; rounded up."""
    words = ("experiment=gsm8k", "task=arithmetic", f"model={preset}", "model.train_id=none", "model.compile=true")
    plan = make_plan(typed(compose_config(*words, *change.split())))
    request = MemoryRequest(plan, config_of(preset), None, (60, 300), [0], (), [141 * GIB])
    return ceil(predict(request, 1.0)[0].needed_bytes / GIB)


@pytest.mark.parametrize("preset", SHAPES)
def test_a_preset_fits_the_card_that_it_names_and_no_smaller_one(preset: str) -> None:
    [named] = re.findall(r"lanned for one GPU of (\d+) GB", (CONF / "model" / f"{preset}.yaml").read_text())
    gib = planned_gib(preset, "")
    assert next(card for card, usable in USABLE_GIB.items() if gib <= usable) == int(named)
    assert gib == check.PRESETS[preset][0]


@pytest.mark.slow
@pytest.mark.parametrize("preset", SHAPES)
def test_check_knows_what_each_change_saves(preset: str) -> None:
    unchanged, *changes = check.CHANGES  # the first one is in the test above
    assert unchanged == ""
    assert [planned_gib(preset, change) for change in changes] == [*check.PRESETS[preset][1:]]


def test_what_fits_each_card() -> None:
    built = {"tiny", "tiny_moe", "tiny_vl"}
    names = {path.stem for path in (CONF / "model").glob("*.yaml")} - {"hf", "smollm2_135m"} - built
    fits = {card: check.fitting(usable) for card, usable in USABLE_GIB.items()}
    assert [{name for names in each.values() for name in names} for each in fits.values()] == [names] * len(fits)
    as_they_are = {card: set(each.get("", ())) for card, each in fits.items()}
    assert as_they_are[24] < as_they_are[48] < as_they_are[80] == as_they_are[141] == names == SHAPES.keys()
    assert "qwen3_8b" in fits[24]["model/lora=default model.quantization=nf4 train.lr=1e-5"]
    assert "qwen3_4b" in fits[48]["train.optimizer.offload=true"]
