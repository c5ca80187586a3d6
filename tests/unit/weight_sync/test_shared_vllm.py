"""Shared weights when the server is replaced by another; the contract tests do it with real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import full_weights, make_client
from factories import make_policy, make_qwen2, strategy
from scripted_server import Reply, ScriptedServer
from torch import Tensor

from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.weight_sync.snapshot import Snapshot


def test_training_survives_a_recovery_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new server has the weights from before training. In fp32 a checkpoint is made of what the policy points at."""
    sync = strategy("shared_vllm")
    policy = make_policy(make_qwen2(), build_char_tokenizer(64))
    untrained = {name: p.detach().clone() for name, p in policy.causal_lm.named_parameters()}

    def memory_of_a_server(*_: Any, **__: Any) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in untrained.items()}

    monkeypatch.setattr(sync, "_open_views", memory_of_a_server)
    with ScriptedServer(lambda _: Reply({"results": [None]})) as web:
        engine = make_client(web.base_url)
        snapshot = Snapshot(policy, full_weights, engine)
        sync.attach(engine, snapshot)
        with torch.no_grad():
            for master in policy.make_masters().parameters.values():
                master.add_(1.0)
        policy.masters.publish()
        old = {name: p.data_ptr() for name, p in policy.causal_lm.named_parameters()}
        monkeypatch.setattr(engine, "post", lambda *_, **__: pytest.fail("interrupted here, as by Ctrl-C"))
        sync.reattach(engine, snapshot)
    for name, parameter in policy.causal_lm.named_parameters():
        assert parameter.data_ptr() != old[name]
        assert torch.equal(parameter, untrained[name] + 1.0)
