import io
import math
from pathlib import Path

from rich.console import Console

from offline_grpo.report.history import History
from offline_grpo.report.summary import print_summary


def printed(history: History, width: int = 80) -> list[str]:
    stream = io.StringIO()
    print_summary(history, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


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
    train[0] |= {
        "time/start_s": 60.0,
        "time/start_imports_s": 6.0,
        "time/start_load_model_s": 48.0,
        "time/start_sync_s": 0.001,
    }
    assert printed(History(Path("/runs/one"), train, EVALS)) == [
        "2 training iterations, 3 evaluations",
        "                before                after                 best (iteration)",
        "pass@1          0.200 [0.100, 0.300]  0.400 [0.300, 0.500]  0.600 (1)",
        "training reward 0.250                 0.750                 0.750 (2)",
        "success rate    0.500                 0.500                 0.500 (1)",
        "time            5.0 min  start 20%  generate 60%  train 20%",
        "start           1.0 min  load model 48.0 s  imports 6.0 s",
        "throughput      generate 20 tokens/s  train 20 tokens/s",
        "files           /runs/one",
    ]


def test_a_mixture_has_a_line_for_each_task() -> None:
    def of_task(value: float) -> dict[str, float]:
        return {"pass@1": value, "pass@1_low": value - 0.1, "pass@1_high": value + 0.1, "pass@4": 0.9}

    evals = {
        i: EVALS[i]
        | {
            f"task/{name}/{key}": v
            for name in ("sat", "a_task_of_a_long_name")
            for key, v in of_task(0.5 + i / 10).items()
        }
        for i in (-1, 1)
    }
    lines = printed(History(Path("/r"), {}, evals))
    assert lines[2:5] == [
        "pass@1          0.200 [0.100, 0.300]  0.400 [0.300, 0.500]  0.400 (2)",
        "  a_task_of_a_… 0.400 [0.300, 0.500]  0.600 [0.500, 0.700]  0.600 (2)",
        "  sat           0.400 [0.300, 0.500]  0.600 [0.500, 0.700]  0.600 (2)",
    ]


def test_no_line_is_wider_than_the_terminal_and_the_folder_stays_whole() -> None:
    parts = ("imports", "load_data", "warm_start", "load_model", "start_server", "load_reference", "sync", "eval")
    train = {
        i: {f"time/{phase}_s": 1e5 for phase in ("generate", "train", "sync", "eval", "checkpoint")} for i in range(3)
    }
    train[0] |= {"time/start_s": 800.0, **{f"time/start_{part}_s": 100.0 for part in parts}}
    train[1] |= {"perf/gpu_memory_gb": 70.25, "perf/gpu_memory_reserved_gb": 79.0}
    folder = Path("/" + "long/" * 30)
    lines = printed(History(folder, train, {1999: EVALS[1]}))
    assert [line for line in lines if len(line) > 80] == [f"files           {folder}"]
    assert "GPU memory      peak 70.2 GB in tensors, 79.0 GB reserved" in lines
    assert sum(line.count("1.7 min") for line in lines) == 8


def test_the_starts_of_a_resumed_run_are_added() -> None:
    train = {
        0: {"time/start_s": 3.0, "time/start_eval_s": 1.0, "time/train_s": 4.0},
        5: {"time/start_s": 2.0, "time/train_s": 1.0},
    }
    assert "time            10.0 s  start 50%  train 50%" in printed(History(Path("/r"), train, {}))


def test_a_run_without_evaluation_or_metrics() -> None:
    lines = printed(History(Path("/runs/two"), {0: {"reward_mean": 0.5}}, {}))
    assert "training reward 0.500                 0.500                 0.500 (1)" in lines
    assert not [line for line in lines if line.startswith(("pass@", "time", "start", "throughput", "GPU"))]
    assert printed(History(Path("/runs/three"), {}, {})) == []


def test_a_run_that_was_only_evaluated_before_training() -> None:
    lines = printed(History(Path("/runs/four"), {}, {-1: EVALS[-1]}))
    assert "pass@1          0.200 [0.100, 0.300]                        0.200 (0)" in lines


def test_a_reward_that_is_not_finite_is_not_the_best() -> None:
    train = {i: {"reward_mean": value} for i, value in enumerate((0.25, math.nan, math.inf))}
    assert "training reward 0.250                 inf                   0.250 (1)" in printed(
        History(Path("/r"), train, {})
    )
