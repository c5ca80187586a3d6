"""`train.sharding=fsdp2`: several processes with a part of the model each, against one with the whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from group_work import LOSSES, follow
from runs import SMALL, Kill, assert_alike, in_group, printed, run_in_child, run_in_children
from transformers import AutoModelForCausalLM

SHARDED = "train.sharding=fsdp2"
RUN = (
    *(*SMALL, "train.iterations=2", "train.batch_size=3", "train.epochs=2", "data.problems_per_iteration=3"),
    "checkpoint.save_interval=1",
)
CASES: list[dict[str, Any]] = [
    {"model": "qwen2", "changes": {"tie_word_embeddings": True}, "filtered": True},
    {"model": "llama", "changes": {"tie_word_embeddings": False}, "loss": "gspo", "recompute": True, "tree": True},
    {"model": "llama", "changes": {"tie_word_embeddings": False}, "recompute": True, "tree": True, "filtered": True},
    {"model": "gemma3", "loss": "dapo"},
    {"model": "qwen3_moe", "loss": "dr_grpo"},
    {"model": "gpt2", "loss": "cispo"},
    {"model": "qwen3_5"},
    {"model": "qwen3", "lora": True},
    {"model": "qwen3", "loss": "sapo"},
    {"model": "smollm3", "loss": "dppo"},
]
"""All losses, on architectures that differ. Their 97 tokens and 33 or so rows of weights do not divide by four."""


@pytest.mark.slow
def test_every_loss_and_several_architectures_on_four_processes(tmp_path: Path) -> None:
    """No metric may differ by 1e-5 of itself, and no weight and no mean of the optimizer by as much. Updates of two are
    in the runs below.
    """
    assert {case.get("loss", "grpo") for case in CASES} == {*LOSSES}
    assert in_group(4, follow, str(tmp_path), CASES) == [0] * 4
    lines = (tmp_path / "0.txt").read_text().splitlines()
    assert len(lines) == len(CASES)
    for line in lines:
        metrics, weights, _ = line.split(maxsplit=2)
        assert max(float(metrics), float(weights)) < 1e-5, line


@pytest.mark.slow
def test_a_run_goes_on_with_any_number_of_processes(cache: str, tmp_path: Path) -> None:
    """Two that share and one alone, from the same checkpoint, and bit for bit with the same number."""
    alone, two = tmp_path / "alone", tmp_path / "two"
    assert run_in_child(alone, *RUN, cache) == 0, printed(alone)
    assert run_in_children(2, two, *RUN, cache, SHARDED) == [0, 0], printed(two)
    assert_alike(two, alone)
    saved = "checkpoints/iter_001/model.safetensors"
    whole, config = (AutoModelForCausalLM.from_pretrained(run / "checkpoints/iter_001") for run in (two, alone))
    for ours, theirs in zip(whole.parameters(), config.parameters(), strict=True):
        assert ours.allclose(theirs, atol=1e-5)
    for source, count, override in ((two, 1, "train.sharding=none"), (two, 2, SHARDED)):
        again = tmp_path / f"{source.name}_by_{count}"
        shutil.copytree(source, again)
        shutil.rmtree(again / "checkpoints/iter_001")
        run = (f"resume={again}", *RUN, cache, override)
        codes = (
            run_in_children(count, tmp_path / "start", *run) if count > 1 else [run_in_child(tmp_path / "start", *run)]
        )
        assert codes == [0] * count, printed(tmp_path / "start")
        assert_alike(again, source)
    assert (tmp_path / "two_by_2" / saved).read_bytes() == (two / saved).read_bytes()


@pytest.mark.slow
def test_parts_are_written_by_all_and_read_by_any_number(cache: str, tmp_path: Path) -> None:
    """Two write, and one goes on. So do three where the two were killed when the next checkpoint had everything but its
    manifest.
    """
    two = tmp_path / "two"
    run = (*RUN, cache, SHARDED, "checkpoint.format=sharded")
    assert run_in_children(2, two, *run) == [0, 0], printed(two)
    trainer = two / "checkpoints/iter_000/trainer"
    written = {"manifest.json", "state.json", "parts.pt", "part_00000.safetensors", "part_00001.safetensors"}
    assert {path.name for path in trainer.iterdir()} == written
    assert {f"trainer/{name}" for name in written - {"manifest.json"}} < json.loads(
        (trainer / "manifest.json").read_text()
    )["files"].keys()
    sizes = [(trainer / f"part_{rank:05d}.safetensors").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 1.1 * min(sizes)
    AutoModelForCausalLM.from_pretrained(two / "checkpoints/iter_001")
    again = tmp_path / "by_1"
    shutil.copytree(two, again)
    shutil.rmtree(again / "checkpoints/iter_001")
    whole = ("train.sharding=none", "checkpoint.format=full", f"resume={again}")
    assert run_in_child(tmp_path / "start", *run, *whole) == 0, printed(tmp_path / "start")
    assert_alike(again, two)
    killed = tmp_path / "killed"
    kill = Kill("offline_grpo.checkpoint.checkpointer:write_manifest", 2)
    assert -9 in run_in_children(2, killed, *run, kill=kill)
    [hidden] = killed.glob("checkpoints/.writing_*")
    assert len(list(hidden.rglob("part_*"))) == 2
    assert run_in_children(3, tmp_path / "start", *run, f"resume={killed}") == [0] * 3, printed(tmp_path / "start")
    assert_alike(killed, two)
