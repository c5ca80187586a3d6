import io
from pathlib import Path

from rich.console import Console

from offline_grpo.report.runs import Run
from offline_grpo.report.tables import print_summary

EVALS = {
    -1: {"pass@1": 0.2, "pass@1_low": 0.1, "pass@1_high": 0.3},
    0: {"pass@1": 0.6, "pass@1_low": 0.5, "pass@1_high": 0.7},
    1: {"pass@1": 0.4, "pass@1_low": 0.3, "pass@1_high": 0.5},
}


def test_before_after_best_time_throughput_and_place() -> None:
    train = {
        i: {
            "reward_mean": 0.25 + i / 2,
            "success_rate": 0.5,
            "num_completion_tokens": 900.0,
            "num_tokens_trained": 600.0,
        }
        | {"time/generate_s": 90.0, "time/sampling_s": 45.0, "time/train_s": 30.0}
        for i in range(2)
    }
    train[0] |= {"time/start_s": 60.0, "time/start_imports_s": 6.0, "time/start_load_model_s": 48.0}
    train[0] |= {"time/start_sync_s": 0.001, "perf/gpu_memory_gb": 70.25, "perf/gpu_memory_reserved_gb": 79.0}
    stream = io.StringIO()
    print_summary(Run(Path("/runs/one"), train, EVALS), Console(file=stream, width=80))
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == [
        "2 training iterations, 3 evaluations",
        "                 before [95%]          after [95%]           best (iteration)",
        "pass@1           0.200 [0.100, 0.300]  0.400 [0.300, 0.500]  0.600 (1)",
        "training reward  0.250                 0.750                 0.750 (2)",
        "success rate     0.500                 0.500                 0.500 (1)",
        "time             5.0 min  start 20%  generate 60%  train 20%",
        "start            1.0 min  load model 48.0 s  imports 6.0 s",
        "throughput       generate 20 tokens/s  train 20 tokens/s",
        "GPU memory       peak 70.2 GB in tensors, 79.0 GB reserved",
        "files            /runs/one",
    ]
