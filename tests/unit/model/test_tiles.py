"""MLPs in tiles, against MLPs at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import ZOO
from factories import make_scoring
from group_work import batch_of
from peft import LoraConfig, get_peft_model

from offline_grpo.errors import ConfigError
from offline_grpo.model.layers import blocks_of
from offline_grpo.model.layouts import Padded
from offline_grpo.model.proof import settle_compile, settle_layout
from offline_grpo.model.scoring import Scoring, prepare_for_gradients
from offline_grpo.model.tiles import Tiles, tile_mlps, tiles_of

TILE = 6
Found = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Logprobs, and gradients by name."""


def scoring_of(name: str, *, tiled: bool, recomputes: bool = False, lora: bool = False) -> Scoring:
    model: Any = ZOO[name].build()
    if lora:
        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scoring = make_scoring(model)
    if tiled:
        tile_mlps(blocks_of(scoring.causal_lm), TILE)
    prepare_for_gradients(model)
    return scoring


def gradients(scoring: Scoring) -> Found:
    logprobs = scoring(batch_of(1)).logprobs
    logprobs.square().sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in scoring.model.named_parameters() if p.grad is not None}


def assert_near(found: Found, expected: Found) -> None:
    """Up to rounding, which depends on the number of threads."""
    assert found[1].keys() == expected[1].keys()
    for ours, theirs in [(found[0], expected[0]), *((found[1][name], own) for name, own in expected[1].items())]:
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "gpt2", "qwen3", "smollm3"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_tiles_are_the_whole(name: str, recomputes: bool) -> None:
    expected, found = (gradients(scoring_of(name, tiled=tiled, recomputes=recomputes)) for tiled in (False, True))
    assert_near(found, expected)


def test_adapters_are_tiled_too() -> None:
    expected, found = (
        gradients(scoring_of("qwen3", tiled=tiled, recomputes=True, lora=True)) for tiled in (False, True)
    )
    assert_near(found, expected)


@pytest.mark.parametrize("recomputes", [False, True])
def test_nothing_as_wide_as_the_mlp_is_there_for_all_tokens(recomputes: bool) -> None:
    """What autograd keeps, and what the layers see."""
    scoring, kept, seen = scoring_of("llama", tiled=True, recomputes=recomputes), [], []
    blocks: Any = blocks_of(scoring.causal_lm)
    for block in blocks:
        block.mlp.down_proj.register_forward_hook(lambda _, args, __: seen.append(args[0].numel() // 48))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        scoring(batch_of(1)).logprobs.sum().backward()
    assert all(shape[-1] != 48 for shape in kept if len(shape) > 1 and shape[0] not in (48, 32))
    assert max(seen) == TILE
    scoring.logprobs(batch_of(1))
    assert max(seen) == TILE


def test_experts_and_blocks_without_an_mlp_stay_as_they_are() -> None:
    dense_first = ZOO["deepseek_v3"].build()
    tile_mlps(blocks_of(dense_first), TILE)
    assert len(tiles_of(dense_first)) == 1
    for name in ("qwen3_moe", "opt", "bloom"):
        with pytest.raises(ConfigError, match=r"model.mlp_tile_tokens=6: found no MLP in "):
            tile_mlps(blocks_of(ZOO[name].build()), TILE)


def test_short_rows_are_computed_at_once() -> None:
    calls: list[tuple[int, ...]] = []
    tiles = Tiles(lambda x: (calls.append(tuple(x.shape)), x)[1], 5)
    x = torch.randn(1, 5, 3)
    assert tiles(x) is x
    assert torch.equal(tiles(torch.cat([x, x, x[:, :1]], 1)), torch.cat([x, x, x[:, :1]], 1))
    assert calls == [(1, 5, 3), (4, 3), (4, 3), (3, 3)]


@pytest.mark.slow
@pytest.mark.usefixtures("without_code_generation")
def test_compiled_blocks_and_tiles_are_right() -> None:
    """Code is generated for the tiles alone: the blocks around them are traced, as in test_compiling.py."""
    scoring = scoring_of("llama", tiled=True, recomputes=True)
    settle_layout(scoring, Padded(), torch.device("cpu"))
    settle_compile(scoring, True, torch.device("cpu"))
    assert all(tiles.of_tile is not tiles.forward for tiles in tiles_of(scoring.causal_lm))
    expected, found = gradients(scoring_of("llama", tiled=False)), gradients(scoring)
    assert_near(found, expected)
