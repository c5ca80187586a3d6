"""Decoding steps as CUDA graphs draw what they draw one kernel at a time, for every architecture of the zoo."""

from __future__ import annotations

import pytest
import torch
from architectures import VOCAB, ZOO
from factories import generate

from offline_grpo.generation import decoding_graph
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import SamplingParams

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PROMPTS = [[5, 6, 7], [9], list(range(2, 22)), [3, 3, 4, 8]]
NOT_SAMPLED = {name for name in ZOO if "mamba" in name}  # sampled by a server alone


@pytest.mark.parametrize("name", [name for name in ZOO if name not in NOT_SAMPLED])
def test_graphs_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO[name].build().to(CUDA).eval()
    model.generation_config.eos_token_id = list(range(40, 45))
    recorded = []
    record = decoding_graph._StepGraph._record
    tokenizer = build_char_tokenizer(128)

    def drawn():
        client = TransformersClient(model, tokenizer, batch_size=64)
        return generate(client, PROMPTS, SamplingParams(max_new_tokens=24), group_size=8, seeds=[1, 100, 200, 300])

    monkeypatch.setattr(
        decoding_graph._StepGraph, "_record", lambda self, inputs: (recorded.append(1), record(self, inputs))
    )
    replayed = drawn()
    print(f"{name}: {len(recorded)} graphs{', refused' if model in decoding_graph._not_recorded else ''}")
    monkeypatch.setattr(decoding_graph._StepGraph, "_record", lambda self, inputs: None)
    stepped = drawn()
    for one, other in zip(replayed, stepped, strict=True):
        for graphed, plain in zip(one, other, strict=True):
            assert graphed.token_ids == plain.token_ids
            assert graphed.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    assert max(max(c.token_ids) for group in replayed for c in group) < VOCAB
    assert name != "qwen2" or (recorded and model not in decoding_graph._not_recorded)
