"""Composites on a real server: their text is pushed by every strategy that a CPU has, and proven tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from composites import load_composite, save_composite
from engines import (
    CPU,
    LORA_ARGS,
    deploy,
    distance,
    found,
    make_client,
    make_server,
    preloaded_python,
    running,
    sample,
    train,
)
from factories import strategy

pytestmark = pytest.mark.slow  # a start of a server each

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""That vLLM's kernels on CPUs take. Those for Qwen3.5 take bf16 alone."""
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
QWEN_TOWER = {"out_hidden_size": 64}
SERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ({**SIZES, **MROPE}, QWEN_TOWER),
    "gemma3": ({**SIZES, "query_pre_attn_scalar": 32}, {}),
}


@pytest.mark.parametrize("name", SERVED)
def test_every_strategy_serves_what_was_trained(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, tower = SERVED[name]
    folder = save_composite(name, tmp_path / "model", text=text, tower=tower)
    args = {**LORA_ARGS, "max_model_len": 256, "language_model_only": True}
    with running(make_server(CPU, tmp_path, args=args, python=preloaded_python(tmp_path)), folder) as server:
        for seed, option in enumerate(("lora_hotswap", "shared_vllm", "reload")):
            client = make_client(found(server))
            sync = strategy(option, "weight_sync.tolerance_nats=1e-5")
            is_lora = option == "lora_hotswap"
            adapters = ["all-linear"] if is_lora else None
            policy = load_composite(folder, lora=adapters, shares_weights=sync.requires.shares_weights)
            deployment = deploy(sync, client)
            with caplog.at_level("INFO"):
                deployment.connect(policy)
                policy.make_masters()
                before = sample(client)
                train(policy, seed=seed)
                deployment.push(policy, version=1)
            assert distance(policy, before) > 1e-3
            assert distance(policy, sample(client)) < 1e-5
            deployment.close()
            num = len(policy.trained_parameters())
            expected = f"{num} of {num} tensors equal bit for bit"
            assert ("base model" if is_lora else expected) in caplog.text, option
            caplog.clear()
