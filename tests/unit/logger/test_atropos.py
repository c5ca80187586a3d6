"""What a run cost, from its metrics, worked out by hand; and the names of the Atropos trainer."""

import re

import pytest

from offline_grpo.logger.atropos import NAMES, Benchmark, console_lines, mode_of, renamed

STEPS = [
    {"time/generate_s": 4.0, "time/sampling_s": 4.0, "time/train_s": 2.0, "time/sync_s": 0.5, "time/sync_push_s": 0.0}
    | {"time/iteration_s": 6.5, "time/start_s": 90.0, "time/start_sync_s": 1.0, "num_completion_tokens": 1000.0}
    | {"perf/gpu_memory_card_gb": 10.0},
    {"time/generate_s": 2.0, "time/sampling_s": 2.0, "time/train_s": 1.0, "time/sync_s": 10.0, "time/sync_push_s": 9.0}
    | {"time/iteration_s": 13.0, "num_completion_tokens": 500.0, "num_tokens_trained": 300.0}
    | {"perf/gpu_memory_card_gb": 20.0},
]
"""The first trained on nothing and pushed nothing."""


def test_sums_and_means() -> None:
    found = Benchmark([*STEPS])
    assert found.num_syncs == 1
    assert (found.step_s(), found.step_s("train"), found.sync_s()) == (9.75, 1.5, 10.5)
    assert (found.tokens_per_s("generate"), found.tokens_per_s("train")) == (250.0, 100.0)
    assert found.tokens_per_s("iteration") == pytest.approx(1500 / 19.5)
    assert found.gpu_gb == (20.0, 15.0)
    assert Benchmark([STEPS[1] | {"sync/frozen": 1.0}]).num_syncs == 0, "a frozen server gets nothing"
    assert mode_of({"weight_sync": {"_target_": "offline_grpo.weight_sync.shared_vllm.SharedVllm"}}) == "shared_vllm"


def test_the_block_that_scripts_look_for() -> None:
    lines = Benchmark([*STEPS]).summary("restart")
    assert lines[1] == "BENCHMARK SUMMARY (restart)"
    cells = dict(re.fullmatch(r" +([^:]+): *(.*)", line).groups() for line in lines[3:-1])  # type: ignore[union-attr]
    assert cells == {
        "Total training time": "19.50s (0.33 min)",
        "Total steps": "2",
        "TIMING BREAKDOWN": "",
        "Avg step time": "1.50s",
        "Total step time": "3.00s",
        "Avg sync time": "10.50s (x1 syncs)",
        "Total sync time": "10.50s",
        "Avg data fetch time": "3.00s",
        "Total data fetch time": "6.00s",
        "MEMORY": "",
        "Peak GPU memory": "20.00 GB",
        "Avg GPU memory": "15.00 GB",
    }


def test_metrics_and_lines_by_the_names_of_the_other_trainer() -> None:
    theirs, rest = renamed({"loss_total": 1.0, "lr": 2.0, "ratio_mean": 3.0, "reward_mean": 5.0})
    assert theirs == {"train/loss": 1.0, "train/lr": 2.0, "train/learning_rate": 2.0, "grpo/mean_ratio": 3.0}
    assert rest == {"reward_mean": 5.0}
    names = [name for each in NAMES.values() for name in each]
    assert len(names) == len(set(names))
    metrics = {"loss_total": -0.0123, "grad_norm": 0.5, "time/train_s": 1.234, "ratio_mean": 1.01, "clip_frac": 0.025}
    counts = {"num_advantages_positive": 12.0, "num_advantages_negative": 20.0, "pos_logp": -0.5}
    assert console_lines("3/100", metrics | counts) == [
        "Step 3/100",
        "  Loss: -0.012300, Grad norm: 0.5000, Step time: 1.23s",
        "  GRPO: ratio=1.010, clipped=2.5%",
        "  Advantages: +12 / -20",
        "  LogP: pos=-0.500",
    ]
