"""`train.sequence_parallel`: processes that share each sequence, against one process with the whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from architectures import ZOO
from group_work import LOSSES, follow, share_all
from runs import SMALL, alone_and_together, assert_alike, in_group, printed, run_in_child, run_in_children, weights_of

SKEWED = (1, 43, 2, 1, 17, 1, 5)
"""Tokens of completions after prompts of three. In a slice of a quarter there may be none that is scored."""
TWO: list[dict[str, Any]] = [
    *({"model": "llama", "loss": loss, "lengths": SKEWED} for loss in sorted(LOSSES)),
    {"model": "qwen2", "whole": True, "lengths": SKEWED},
    {"model": "mistral_window", "whole": True},
    {"model": "qwen3", "lora": True, "whole": True},
    {"model": "gpt2", "whole": True},
]
FOUR: list[dict[str, Any]] = [
    {"model": "qwen2", "share": 4, "loss": "gspo", "lengths": SKEWED},  # two heads of keys
    {"model": "qwen2", "share": 4, "loss": "gspo", "lengths": SKEWED, "whole": True},
    {"model": "qwen2", "loss": "gspo"},
    {"model": "smollm3", "share": 4, "recompute": True, "filtered": True},
    {"model": "llama", "share": 4, "recompute": True, "filtered": True, "whole": True, "lengths": SKEWED},
    {"model": "gemma3", "recompute": True, "loss": "dapo"},  # a window
    {"model": "qwen3_moe", "share": 4},
    {"model": "qwen3", "lora": True},
]
SHAREABLE = {
    *("llama", "mistral_window", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "phimoe", "gemma", "gemma3"),
    *("gemma3_capped", "gemma4", "phi", "phi3", "olmo2", "olmo3", "granite", "cohere", "cohere2", "glm4", "smollm3"),
    *("minicpm3", "starcoder2", "deepseek_v3", "gpt2", "gpt_neox", "opt"),
}
"""On four processes; those without `share` are two groups of two."""


def apart(folder: Path, count: int, cases: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """How far metrics, and weights and means of the optimizer are from those of one process after four updates."""
    assert in_group(count, follow, str(folder), [{"share": 2, **case} for case in cases]) == [0] * count
    lines = [line.split(maxsplit=2) for line in (folder / "0.txt").read_text().splitlines()]
    assert len(lines) == len(cases)
    return [(float(metrics), float(weights), case) for metrics, weights, case in lines]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "cases"), [(2, TWO), (4, FOUR)])
def test_several_processes_share_each_sequence(count: int, cases: list[dict[str, Any]], tmp_path: Path) -> None:
    for metrics, weights, case in apart(tmp_path, count, cases):
        assert max(metrics, weights) < 1e-6, (metrics, weights, case)


RUN = (*SMALL, "train.iterations=2", "train.batch_size=3", "train.epochs=2", "checkpoint.save_interval=1")
SHARED = "train.sequence_parallel=2"


VARIED = ("task._target_=runs.Variety", "train.optimizer.eps=1e-5")
"""Rewards that differ; and steps that rounding does not decide, see `runs.five`."""
RUNS = (
    "gspo maxrl train.sharding=fsdp2 train.gradient_checkpointing=true",
    "dapo passk train.top_entropy_frac=0.5",
    "sapo rloo train.loss.kl_placement=reward generation.top_k=3",
    "cispo reinforce_baseline train.sharding=fsdp2",
    "dppo_tv batch_std train.activation_offload=true train.gradient_checkpointing=true",
    "dr_grpo group_mean train.tokens_per_microbatch=60 train.batch_size=null",
)
"""Loss, advantage, and what else."""


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS)
def test_a_run_is_that_of_one_process(words: str, cache: str, tmp_path: Path) -> None:
    loss, advantage, *others = words.split()
    run = (*RUN, *VARIED, cache, f"train/loss={loss}", f"train/advantage={advantage}")
    alone_and_together(tmp_path, *run, *others, together=(SHARED,))


@pytest.mark.slow
def test_two_groups_of_two_train_and_a_resumed_run_is_the_same_bit_for_bit(cache: str, tmp_path: Path) -> None:
    """And one process goes on from what they have saved."""
    alone, four = tmp_path / "alone", tmp_path / "four"
    assert run_in_child(alone, *RUN, cache) == 0, printed(alone)
    assert run_in_children(4, four, *RUN, cache, SHARED) == [0] * 4, printed(four)
    assert_alike(four, alone)
    for count, override in ((4, SHARED), (1, "train.sequence_parallel=1")):
        again = tmp_path / f"by_{count}"
        shutil.copytree(four, again)
        shutil.rmtree(again / "checkpoints/iter_001")
        run = (f"resume={again}", *RUN, cache, override)
        codes = run_in_children(count, tmp_path / "start", *run)
        assert codes == [0] * count, printed(tmp_path / "start")
        assert_alike(again, four)
    assert weights_of(tmp_path / "by_4") == weights_of(four)


@pytest.mark.slow
def test_models_that_cannot_be_shared_are_refused_on_all_processes(tmp_path: Path) -> None:
    """Those with recurrences, convolutions and chunks by their configuration, others because they compute something
    else.
    """
    assert in_group(2, share_all, str(tmp_path), [*ZOO]) == [0, 0]
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]
    assert said[0] == said[1]
    lines = dict(line.split(": ", 1) for line in said[0].splitlines())
    assert {name for name, line in lines.items() if line == "shared"} == SHAREABLE
    refused = {name: line for name, line in lines.items() if name not in SHAREABLE}
    assert all(line.startswith("train.sequence_parallel=2: ") and line.endswith("; use 1") for line in refused.values())
    by_kind = {
        "lfm2": "conv",
        "qwen3_5": "linear_attention",
        "llama4": "chunked_attention",
        "mamba": "linear_attention",
    }
    assert all(lines[name].endswith(f"has layers of {kind}; use 1") for name, kind in by_kind.items())


def test_numbers_that_do_not_divide_are_refused(cache: str, tmp_path: Path) -> None:
    assert run_in_child(tmp_path / "one", *RUN, cache, SHARED) == 2
    assert "train.sequence_parallel=2: must divide the number of training processes, 1 " in printed(tmp_path / "one")
    codes = run_in_children(3, tmp_path / "three", *RUN, cache, "train.sequence_parallel=3")
    assert {2} <= {*codes} <= {2, 99}  # a slower one may first see that the others are gone
    assert "train.sequence_parallel=3: shares out 4 heads of attention" in printed(tmp_path / "three")
