"""Whole runs that start their server again with what they trained: composites, and mixtures of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import SERVED, ZOO, save_served
from engines import preloaded_python
from factories import compose_config
from runs import draw_nothing, five, metrics_of, own_server

from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.report import plots
from offline_grpo.run import train

pytestmark = pytest.mark.slow  # starts of servers

SIZES = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64}


def saved(name: str, folder: Path) -> Path:
    """A tiny model that vLLM's kernels on CPUs take."""
    if name in SERVED:
        return save_served(name, folder)
    ZOO[name].build(**SIZES).save_pretrained(folder)
    build_char_tokenizer(512).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "option"), [("qwen2_5_vl", "lora_restart"), ("gpt_oss", "restart")])
def test_a_restarted_server_has_what_was_trained(
    name: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "save_report", draw_nothing)
    folder = saved(name, tmp_path / "model")
    words = [*five(folder), *own_server(preloaded_python(tmp_path)), f"weight_sync={option}"]
    words += ["weight_sync.tolerance_nats=1e-5", "train.iterations=1", "eval.enabled=false"]
    words += ["generation.max_new_tokens=8", "train.entropy_coef=0.1"]  # some random models write one text alone
    words += ["model/lora=default", "model.lora.use_rslora=true"] if option == "lora_restart" else []
    train(compose_config(*words, f"cache_dir={tmp_path}/cache"), tmp_path / "run")
    found = metrics_of(tmp_path / "run")["train_iter_000.json"]
    assert found["sync/version"] == found["num_updates"] == 2
    assert found["grad_norm"] > 0
    assert found["alignment/diff_abs_mean"] < 1e-5
    assert found["sync/probe_diff_abs_mean"] < 1e-5
