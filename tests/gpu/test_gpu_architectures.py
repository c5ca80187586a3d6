"""Every architecture of the zoo in bf16 on a GPU: the layout of `auto` scores as one sequence at a time does."""

from __future__ import annotations

import pytest
import torch
from architectures import ZOO, long_batch
from factories import make_scoring

from offline_grpo.model.layouts import LAYOUTS
from offline_grpo.model.proof import settle_layout
from offline_grpo.model.scoring import measure_logit_transform

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
NO_BF16 = {"mamba", "mamba2"}  # their own forward mixes formats


@pytest.mark.parametrize("name", [name for name in ZOO if name not in NO_BF16])
def test_auto_is_right(name: str) -> None:
    scoring = make_scoring(ZOO[name].build().to(CUDA, torch.bfloat16))
    scoring.logits = measure_logit_transform(scoring.causal_lm)
    settle_layout(scoring, None, CUDA)
    chosen = type(scoring.layout)
    batch = long_batch()
    found = scoring.logprobs(batch.to(CUDA))
    alone = torch.cat([scoring.logprobs(batch.select([i]).to(CUDA)) for i in range(batch.num_sequences)])
    mask = batch.completion_mask.to(CUDA)
    error = (found - alone)[mask].square().mean().sqrt() / alone[mask].std()
    print(f"{name}: {chosen.__name__}, relative error {error:.1e}")
    assert error < 0.02
    if "varlen" in ZOO[name].wrong:
        assert chosen is LAYOUTS["padded"]
