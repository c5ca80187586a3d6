"""A checkpoint whose files are damaged: a run resumes from the one before it, and ends with the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from factories import compose_config
from runs import metrics_of, weights_of

from offline_grpo.checkpoint.files import verified_state
from offline_grpo.errors import CheckpointError
from offline_grpo.report import plots
from offline_grpo.run import train

TINY = (
    *("num_threads=1", "train.iterations=3", "data.problems_per_iteration=2", "data.rollouts_per_problem=2"),
    *("data.num_train_seeds=20", "eval.enabled=false", "checkpoint.save_interval=1", "generation.max_new_tokens=4"),
    *("model.tiny.warm_start_steps=5", "model.tiny.hidden_size=32", "task.format_weight=0.5"),
    "train.drop_zero_signal_groups=false",
)


def flip(path: Path) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_run_resumes_from_the_newest_sound_checkpoint_to_the_same_end(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(plots, "save_report", lambda history: None)
    overrides = (*TINY, f"cache_dir={tmp_path}/cache")
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    train(compose_config(*overrides), whole)
    shutil.copytree(whole, damaged)
    newest = damaged / "checkpoints" / "iter_002"
    flip(newest / "trainer" / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"iter_002: is damaged: trainer/optimizer.pt has changed"):
        train(compose_config(*overrides, f"resume={newest}"), tmp_path / "fresh")
    capsys.readouterr()
    train(compose_config(*overrides, f"resume={damaged}"), tmp_path / "fresh")
    assert "iter_002: is damaged: trainer/optimizer.pt has changed since it was written" in capsys.readouterr().out
    assert weights_of(damaged) == weights_of(whole)
    assert metrics_of(damaged) == metrics_of(whole)
    assert verified_state(newest).iteration == 2
    flip(newest / "model.safetensors")
    for key in ("model.train_id", "model.ref_id"):
        with pytest.raises(CheckpointError, match=rf"^{key}=.*iter_002: is damaged: model.safetensors has changed"):
            train(compose_config(*overrides, "train.kl_coef=0.1", f"{key}={newest}"), tmp_path / "fresh")
