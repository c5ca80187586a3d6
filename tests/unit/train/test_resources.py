import pytest
import torch

from offline_grpo.train.resources import card_bytes, gpu_memory, time_metrics


def test_throughput_is_over_its_own_phase_and_an_evaluation_does_not_lower_it() -> None:
    metrics = {"num_completion_tokens": 600.0, "num_tokens_trained": 400.0}
    plain = time_metrics({"generate": 2.0, "train": 1.0}, metrics)
    assert plain == {
        "time/generate_s": 2.0,
        "time/train_s": 1.0,
        "time/iteration_s": 3.0,
        "time/sampling_s": 2.0,
        "perf/tokens_per_s": 200.0,
        "perf/generate_tokens_per_s": 300.0,
        "perf/train_tokens_per_s": 400.0,
    }
    evaluated = time_metrics({"generate": 2.0, "train": 1.0, "eval": 9.0}, metrics)
    for name in ("generate", "train"):
        assert evaluated[f"perf/{name}_tokens_per_s"] == plain[f"perf/{name}_tokens_per_s"]
    assert evaluated["perf/tokens_per_s"] == 50.0


def test_a_source_that_samples_at_other_times_says_how_long_it_did() -> None:
    tokens = {"num_completion_tokens": 600.0}
    assert (
        time_metrics({"generate": 0.1, "train": 3.9}, tokens | {"time/sampling_s": 3.0})["perf/generate_tokens_per_s"]
        == 200.0
    )
    assert "perf/generate_tokens_per_s" not in time_metrics(
        {"generate": 0.1, "train": 3.9}, tokens | {"time/sampling_s": 0.0}
    )


def test_an_iteration_that_trains_on_nothing_has_no_training_throughput() -> None:
    assert "perf/train_tokens_per_s" not in time_metrics(
        {"generate": 2.0, "train": 0.1}, {"num_completion_tokens": 600.0}
    )


def test_there_is_no_gpu_memory_without_a_gpu() -> None:
    assert gpu_memory(torch.device("cpu"), card_bytes(torch.device("cpu"))) == {}


@pytest.mark.gpu
def test_gpu_memory_is_the_peak_since_the_last_call() -> None:
    device = torch.device("cuda")
    gpu_memory(device, 0)
    torch.empty(2_000_000_000, dtype=torch.uint8, device=device)  # freed at once
    first, second = gpu_memory(device, 0), gpu_memory(device, 0)
    assert 2 <= first["perf/gpu_memory_gb"] <= first["perf/gpu_memory_reserved_gb"]
    assert second["perf/gpu_memory_gb"] <= first["perf/gpu_memory_gb"] - 2


@pytest.mark.gpu
def test_the_card_holds_what_this_process_has_reserved_and_what_others_have() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()  # else what earlier tests left is taken again
    before = card_bytes(device)
    kept = torch.empty(2_000_000_000, dtype=torch.uint8, device=device)
    assert card_bytes(device) - before >= kept.numel()
    assert gpu_memory(device, 5 * 10**9)["perf/gpu_memory_card_gb"] == 5.0
