"""A server that computes in FP8: weights arrive requantised, and the proof allows for the format alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    GPU,
    PROMPTS,
    SERVER_PYTHON,
    Where,
    deploy,
    distance,
    load,
    make_client,
    make_server,
    preloaded_python,
    running,
    sample,
    save_model,
    train,
)
from factories import strategy

from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.weight_sync import proof

CPU_BF16 = Where(torch.device("cpu"), torch.bfloat16, 0.0)
SMALLER = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""On a CPU a token takes a large part of a second in FP8."""
FEW: dict[str, Any] = {"tokens": 3, "prompts": PROMPTS[:2]}
NUM_PLAIN = 2 * 2 + 2
"""Two norms of each block, the last norm, and the embeddings, which are the head too."""


@pytest.mark.parametrize(
    ("option", "quantization", "where"),
    [
        pytest.param("reload", "fp8_per_channel", CPU_BF16, marks=pytest.mark.slow, id="cpu"),  # vLLM 0.32 and later
        pytest.param("reload", "fp8", GPU, marks=pytest.mark.gpu, id="gpu-reload"),
        pytest.param("ipc", "fp8", GPU, marks=pytest.mark.gpu, id="gpu-ipc"),
    ],
)
def test_weights_arrive_requantised(
    option: str, quantization: str, where: Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where is CPU_BF16:
        monkeypatch.setattr(proof, "PROBE_PROMPTS", 2)
    model, sync = save_model(tmp_path / "model", dtype=where.dtype, **SMALLER), strategy(option)
    python: dict[str, Any] = (
        {"python": preloaded_python(tmp_path)} if where is CPU_BF16 and SERVER_PYTHON is None else {}
    )
    args, env = {**sync.server_args, "quantization": quantization}, dict(sync.requires.env)
    with running(make_server(where, tmp_path, args=args, env=env, **python), model) as server:
        client, policy = make_client(server), load(model, where)
        deployment = deploy(sync, client)
        deployment.connect(policy)
        policy.make_masters()
        for version in range(2):
            old = sample(client, **FEW) if version else []
            train(policy, seed=version, scale=0.05 if version else 0.0)
            found = deployment.push(policy, version=version).alignment
            assert found["sync/num_tensors_proven"] == NUM_PLAIN
            assert 1e-3 < found["sync/probe_diff_abs_mean"] < 0.6, "it is quantised"
            served = distance(policy, sample(client, **FEW), FEW["prompts"])
            assert served < 0.6
            if version:
                assert distance(policy, old, FEW["prompts"]) > 3 * served
        for name in policy.masters.parameters:
            if name.endswith("proj.weight"):  # what no bits prove
                train(policy, seed=9, scale=0.05, only=name)
        with pytest.raises(
            EngineError, match=r"\[MISMATCH\].*of 6 tensors equal bit for bit; the server computes in fp8"
        ):
            deployment._strategy.verify(deployment.engines, deployment._snapshot(policy), 1)
        with pytest.raises(ConfigError, match=r"^train.loss.importance_correction=none: http://.* has fp8"):
            make_client(client, is_corrected=False).check_logprobs()
