"""Runs that run out of memory, that do not clip, and whose groups have no signal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories import compose_config
from runs import SMALL, metrics_of

from offline_grpo.config.compose import as_plain, typed
from offline_grpo.errors import OutOfMemory
from offline_grpo.loss.grpo import GRPO
from offline_grpo.run import train
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.types import Score


def test_a_run_out_of_memory_is_one_line(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def more_than_there_is(*_: object) -> None:
        torch.empty(2**52)

    monkeypatch.setattr(GRPO, "__call__", more_than_there_is)
    with pytest.raises(OutOfMemory) as caught:
        train(compose_config(cache, "experiment=smoke"), tmp_path / "run")
    line = str(caught.value)
    assert line.startswith("out of memory in the phase train, iteration 1: ")
    assert "18014398509481984 bytes" in line
    assert "\n" not in line
    assert (tmp_path / "run" / "run.log").read_text().endswith(f"{line}\n")


def test_a_run_without_clipping_saves_and_goes_on(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity is no number of JSON."""
    monkeypatch.chdir(tmp_path)
    train(compose_config(cache, *SMALL, "train.iterations=1", "train.grad_clip=inf"), tmp_path / "run")
    train(compose_config(cache, *SMALL, "train.iterations=1", "train.grad_clip=inf", "resume=run"), tmp_path / "again")
    assert as_plain(compose_config("train.grad_clip=inf"))["train"]["grad_clip"] == "inf"
    assert typed(compose_config("train.grad_clip='inf'")).train.grad_clip == float("inf")
    assert "finished" in (tmp_path / "run" / "run.log").read_text()


def test_where_no_group_ever_has_signal_all_updates_are_made_all_the_same(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Arithmetic, "score", lambda *_: Score(0.0, False, {}))
    words = ("train.iterations=2", "data.resample_zero_signal=true", "train.drop_zero_signal_groups=true")
    overrides = [*SMALL, *words, "eval.enabled=false", cache]
    train(compose_config(*overrides), tmp_path / "run")
    for metrics in metrics_of(tmp_path / "run").values():
        assert metrics["num_groups_zero_signal"] == metrics["num_groups"] == 4
        assert metrics["num_groups_replaced"] == 12
        assert metrics["num_updates"] == 2
        assert metrics["loss_pg"] == 0
