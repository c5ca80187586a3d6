import csv
import io
import json
import math
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from rich.console import Console

from offline_grpo.errors import ConfigError
from offline_grpo.report.sweep import print_sweep, sweep_table


def make_run(run_dir: Path, overrides: list[str], pass_at_1: list[float], *, num_train: int) -> None:
    """`pass_at_1` before training and after each iteration; every iteration took a minute and a half."""
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    config = OmegaConf.merge({"seed": 0, "train": {"iterations": 2}}, OmegaConf.from_dotlist(overrides))
    (run_dir / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(config))
    if not pass_at_1:
        return
    (run_dir / "metrics").mkdir()
    for i, value in enumerate(pass_at_1):
        metrics = {"pass@1": value, "pass@1_low": value - 0.125, "pass@1_high": value + 0.125}
        (run_dir / "metrics" / ("eval_init.json" if i == 0 else f"eval_iter_{i - 1:03d}.json")).write_text(
            json.dumps(metrics)
        )
    for i in range(num_train):
        metrics = {"reward_mean": 0.5 + i / 4, "time/generate_s": 60.0, "time/train_s": 30.0}
        (run_dir / "metrics" / f"train_iter_{i:03d}.json").write_text(json.dumps(metrics))


@pytest.fixture
def multirun_dir(tmp_path: Path) -> Path:
    make_run(tmp_path / "0", ["task=sat", "train.lr=1e-6"], [0.25, 0.625, 0.5], num_train=2)
    make_run(tmp_path / "1", ["task=sat", "train.lr=1e-5"], [], num_train=0)
    make_run(tmp_path / "2", ["task=sat", "train.lr=5e-6"], [0.25, 0.75], num_train=1)
    return tmp_path


def test_runs_are_ordered_by_final_pass_at_1_and_failures_come_last(multirun_dir: Path) -> None:
    stopped, done, failed = sweep_table(multirun_dir)
    assert (stopped.name, stopped.status, stopped.final_pass_at_1, stopped.minutes) == (
        "2",
        "stopped at 1/2",
        0.75,
        1.5,
    )
    assert (done.name, done.status, done.overrides) == ("0", "done", {"task": "sat", "train.lr": "1e-6"})
    assert (done.final_pass_at_1, done.final_low, done.final_high, done.best_pass_at_1) == (0.5, 0.375, 0.625, 0.625)
    assert (done.reward, done.minutes) == (0.75, 3.0)
    assert (failed.name, failed.status, failed.final_pass_at_1, failed.reward, failed.minutes) == (
        "1",
        "no metrics",
        None,
        None,
        None,
    )


def test_a_run_that_the_mean_leaves_out_is_told(multirun_dir: Path) -> None:
    make_run(multirun_dir / "3", ["task=sat", "train.lr=1e-6", "seed=1"], [0.0], num_train=1)
    stream = io.StringIO()
    print_sweep(multirun_dir, Console(file=stream, width=80))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert "lr=1e-6        0 (3)  0.500         0.625  0.750   3.0" in lines
    assert "run 2: stopped at 1/2" in lines
    assert "run 3: stopped at 1/2, not in the mean" in lines


def test_the_table_is_printed_and_saved_for_programs_and_people(multirun_dir: Path) -> None:
    stream = io.StringIO()
    print_sweep(multirun_dir, Console(file=stream, width=80))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[:6] == [
        "3 configurations, 3 runs, best final pass@1 first",
        "configuration  runs  pass@1 [95%]  best   reward  minutes",
        "lr=1e-6        0     0.500         0.625  0.750   3.0",
        "lr=5e-6        2     0.750         0.750  0.500   1.5",
        "lr=1e-5        1",
        "run 1: no metrics",
    ]
    assert lines[6] == "run 2: stopped at 1/2"
    assert (multirun_dir / "sweep.png").stat().st_size > 10_000
    with (multirun_dir / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["task"], row["train.lr"], row["pass@1"]) for row in rows] == [
        ("2", "sat", "5e-6", "0.75"),
        ("0", "sat", "1e-6", "0.5"),
        ("1", "sat", "1e-5", ""),
    ]
    lines = (multirun_dir / "summary.md").read_text().splitlines()
    assert lines[2] == "| train.lr=1e-6 | 0 | 0.500 | 0.625 | 0.750 | 3.0 |"
    runs = lines[6:]
    assert runs[0] == "| run | train.lr | pass@1 [95%] | best | reward | minutes | status |", "task is the same for all"
    assert runs[3] == "| 0 | 1e-6 | 0.500 [0.375, 0.625] | 0.625 | 0.750 | 3.0 | done |"
    assert runs[4] == "| 1 | 1e-5 |  |  |  |  | no metrics |"


def test_a_run_that_was_changed_on_its_way_is_another_configuration(tmp_path: Path) -> None:
    """Its first resume was undone by the second one, which went on from an earlier checkpoint. Run 2 was only started
    again.
    """
    for i in range(3):
        make_run(
            tmp_path / str(i), ["train.lr=0.1", "train.optimizer.lr=${train.lr}", f"seed={i}"], [0.25, 0.5], num_train=2
        )
    starts = [
        {"overrides": []},
        {"after_iteration": 5, "changes": {"train.lr": [0.3, 7.0], "train.optimizer.lr": [0.3, 7.0]}},
        {"after_iteration": 4, "changes": {"train.lr": [0.3, 0.2]}},
        {"after_iteration": 6, "changes": {"train.lr": [0.2, 0.1], "train.optimizer.lr": [0.2, 0.1]}},
    ]
    (tmp_path / "1" / ".hydra" / "starts.yaml").write_text(yaml.safe_dump(starts))
    (tmp_path / "2" / ".hydra" / "starts.yaml").write_text(
        yaml.safe_dump([{"overrides": []}, {"after_iteration": 1, "changes": {}}])
    )
    print_sweep(tmp_path, Console(file=io.StringIO(), width=80))
    rows = [line.split(" | ")[:2] for line in (tmp_path / "summary.md").read_text().splitlines()[2:4]]
    assert rows == [
        ["| train.lr=0.1", "0 2"],
        ["| train.lr=0.3 until iteration 4, 0.2 until iteration 6, then 0.1", "1"],
    ]


def test_a_short_run_took_more_than_no_time(tmp_path: Path) -> None:
    make_run(tmp_path / "0", ["task=sat"], [0.25, 0.75], num_train=1)
    path = tmp_path / "0" / "metrics" / "train_iter_000.json"
    path.write_text(json.dumps({"time/train_s": 2.7}))
    stream = io.StringIO()
    print_sweep(tmp_path, Console(file=stream, width=80))
    assert stream.getvalue().splitlines()[2].split()[-1] == "0.045"


def test_without_evaluations_the_reward_ranks_and_its_columns_are_left_out(tmp_path: Path) -> None:
    for number, num_train in enumerate((1, 2)):
        make_run(tmp_path / str(number), [f"train.lr={number}e-6", "eval.enabled=false"], [0.0], num_train=num_train)
        (tmp_path / str(number) / "metrics" / "eval_init.json").unlink()
    stream = io.StringIO()
    print_sweep(tmp_path, Console(file=stream, width=80))
    assert [line.rstrip() for line in stream.getvalue().splitlines()][:4] == [
        "2 configurations, 2 runs, best final reward first",
        "configuration  runs  reward  minutes",
        "lr=1e-6        1     0.750   3.0",
        "lr=0e-6        0     0.500   1.5",
    ]


def test_a_narrow_terminal_folds_lines_and_cuts_no_number(tmp_path: Path) -> None:
    for i in range(4):
        make_run(tmp_path / str(i), [f"seed={i % 2}", f"train.lr={i // 2}e-6"], [0.25, 0.5 + i / 100], num_train=2)
    tables = []
    for width in (40, 80):
        stream = io.StringIO()
        print_sweep(tmp_path, Console(file=stream, width=width))
        tables.append([line.split() for line in stream.getvalue().splitlines() if "0e-6" in line or "1e-6" in line])
    assert tables[0] == tables[1] != []


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_the_table_is_wider_than_the_terminal_and_nothing_is_cut(tmp_path: Path, width: int) -> None:
    long = ["train.loss.importance_correction=token_truncate", f"model.train_id=/models/{'long/' * 20}end"]
    for i in range(12):
        make_run(
            tmp_path / str(i), [*long, f"seed={i % 6}", f"train.lr={i // 6}e-6"], [0.25, 0.5 + i / 100], num_train=2
        )
    make_run(tmp_path / "12", ["task=sat"], [0.25, 1.0], num_train=2)
    stream = io.StringIO()
    print_sweep(tmp_path, Console(file=stream, width=width))
    lines = [line for line in stream.getvalue().splitlines() if not line.startswith(str(tmp_path))]
    assert max(map(len, lines)) <= width
    text = "".join(line.split("  ")[0] if line.startswith("importance") else line.strip() for line in lines)
    assert "importance_correction=" in text
    assert "token_truncate" in text
    assert "\u2026" not in text
    assert sum(line.count("[0.") for line in lines) == 2, "an interval for each configuration with several seeds"
    assert "means over runs that differ in the seed alone, with 95% intervals" in lines


@pytest.mark.parametrize("name", ["train", "eval"])
def test_a_run_that_stopped_early_is_done(tmp_path: Path, name: str) -> None:
    """Its last iteration says so, or the evaluation that this one owed."""
    make_run(tmp_path / "0", ["task=sat"], [0.25, 0.75], num_train=1)
    path = tmp_path / "0" / "metrics" / f"{name}_iter_000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stopped_early": 1.0}))
    [run] = sweep_table(tmp_path)
    assert run.is_done


@pytest.mark.parametrize("name", [".hydra/config.yaml", ".hydra/starts.yaml", "metrics/train_iter_000.json"])
def test_a_damaged_run_is_named_and_the_others_have_their_table(multirun_dir: Path, name: str) -> None:
    path = multirun_dir / "2" / name
    path.write_text("- changes: {train.lr: 1}" if name.endswith("starts.yaml") else "")
    stream = io.StringIO()
    print_sweep(multirun_dir, Console(file=stream, width=80))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert "lr=1e-6        0     0.500         0.625  0.750   3.0" in lines
    assert [
        line for line in lines if line.startswith(f"run 2: damaged: {path}: is ") and line.endswith("the run folder")
    ]
    assert all((multirun_dir / saved).is_file() for saved in ("summary.csv", "summary.md", "sweep.png"))


def test_a_run_whose_last_pass_at_1_is_not_finite_comes_last(multirun_dir: Path) -> None:
    path = multirun_dir / "0" / "metrics" / "eval_iter_001.json"
    path.write_text(json.dumps({"pass@1": math.nan}))
    first, *others = sweep_table(multirun_dir)
    assert first.name == "2"
    assert [(run.final_pass_at_1, run.best_pass_at_1) for run in others if run.name == "0"] == [(None, 0.625)]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"contains no runs.*multirun"):
        sweep_table(tmp_path / "empty")
