"""torch.compile of the blocks: logprobs and gradients of every kind of architecture stay what they are, and changing
lengths compile nothing anew. What traces the blocks is real; the code generator, which takes half a minute an
architecture, is left out here and runs in tests/gpu."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from architectures import ZOO
from factories import generate, make_qwen2
from torch import nn
from torch._dynamo.utils import counters

from offline_grpo.errors import ConfigError
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model import proof
from offline_grpo.model.adapters import with_lora
from offline_grpo.model.layers import not_compiled
from offline_grpo.model.layouts import Padded
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.proof import settle_compile
from offline_grpo.model.scoring import Scoring, measure_logit_transform, prepare_for_gradients
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.settings import LoraConfig
from offline_grpo.types import SamplingParams

pytestmark = pytest.mark.usefixtures("without_code_generation")

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def scoring_of(name: str, *, checkpointing: bool = False) -> Scoring:
    model = ZOO[name].build()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Scoring(model, Padded(), TiledHead(tile_width=None), logits=measure_logit_transform(model))


def add_lora(scoring: Scoring) -> None:
    """As a run does it, with layers that share the product with their input."""
    scoring.model = with_lora(scoring.causal_lm, LoraConfig(4, 8, 0.0, ["all-linear"], None), adapter=None)
    proof.settle_layout(scoring, scoring.layout, CPU)


def is_compiled(scoring: Scoring) -> bool:
    return any(module._compiled_call_impl is not None for module in scoring.model.modules())


@pytest.mark.parametrize(
    ("name", "checkpointing", "lora"),
    [("gemma2", False, False), ("qwen3", True, False), pytest.param("qwen3", True, True, marks=pytest.mark.slow)],
)
def test_one_graph_serves_all_blocks_and_all_lengths(name: str, checkpointing: bool, lora: bool) -> None:
    scoring = scoring_of(name, checkpointing=checkpointing)
    if lora:
        add_lora(scoring)
    settle_compile(scoring, True, CPU)
    assert is_compiled(scoring)
    warm = counters["stats"]["unique_graphs"]
    kinds = len(set(getattr(scoring.causal_lm.config, "layer_types", None) or ["full"]))
    assert 0 < warm <= 3 * kinds, "with gradients, checkpointed or not, and without, for each kind of block"
    for groups in (((20, (8, 3)),), ((7, (30, 2, 5)), (4, (9, 9))), ((9, (5, 5, 5, 5, 6)),)):
        batch = proof.batch_for(scoring, CPU, groups)
        prepare_for_gradients(scoring.model)
        scoring(batch).logprobs.sum().backward()
        compiled = scoring.logprobs(batch)
        with not_compiled(scoring.model):
            torch.testing.assert_close(compiled, scoring.logprobs(batch), rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == warm


def test_sampling_between_updates_compiles_nothing_anew() -> None:
    """It replaces transformers' attention meanwhile, which compiled blocks look at again."""
    scoring = scoring_of("qwen3")
    settle_compile(scoring, True, CPU)
    warm = counters["stats"]["unique_graphs"]
    client = TransformersClient(scoring.causal_lm, build_char_tokenizer(128), batch_size=8)
    generate(client, [[5, 6, 7]], SamplingParams(max_new_tokens=4), group_size=2, seeds=[1])
    scoring.logprobs(proof.batch_for(scoring, CPU))
    assert counters["stats"]["unique_graphs"] == warm > 0


@pytest.mark.slow  # of five models
def test_all_models_of_a_sweep_are_compiled() -> None:
    """Its jobs are one process, and each shape has graphs of its own; past a limit the compiler would leave the rest as
    it is, silently.
    """
    for num_models in range(1, 6):
        scoring = Scoring(
            make_qwen2(vocab_size=97, intermediate_size=16 * num_models), Padded(), TiledHead(tile_width=None)
        )
        settle_compile(scoring, True, CPU)
        assert counters["stats"]["unique_graphs"] == 2 * num_models, "with gradients and without"


@pytest.mark.parametrize("when", ["always", "without gradients"])
def test_a_model_that_computes_something_else_then_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    def wrong(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        scale = 1.0 if when != "always" and torch.is_grad_enabled() else 1.5
        return lambda *args: [out * scale if out.is_floating_point() else out for out in graph(*args)]

    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=wrong))
    monkeypatch.setattr(proof, "is_compiled", lambda *_: True)
    scoring = scoring_of("llama")
    with caplog.at_level(logging.WARNING):
        settle_compile(scoring, "auto", CPU)
    assert not is_compiled(scoring)
    assert "model.compile=auto: not compiled, because LlamaForCausalLM does not work then: logprobs" in caplog.text
    with pytest.raises(ConfigError, match=r"^model.compile=true: "):
        settle_compile(scoring, True, CPU)
