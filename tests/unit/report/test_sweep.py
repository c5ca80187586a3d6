import csv
import io
import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from rich.console import Console

from offline_grpo.report.configurations import searched
from offline_grpo.report.runs import load_runs
from offline_grpo.report.sweep import print_sweep


def make_run(run_dir: Path, overrides: list[str], pass_at_1: list[float], *, num_train: int) -> None:
    """`pass_at_1` before training and after each iteration; every iteration took a minute and a half."""
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    values = [word for word in overrides if word != "task=sat"]  # a choice
    config = OmegaConf.merge({"seed": 0, "train": {"iterations": 2}}, OmegaConf.from_dotlist(values))
    (run_dir / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(config))
    (run_dir / "metrics").mkdir()
    for i, value in enumerate(pass_at_1):
        metrics = {"pass@1": value, "pass@1_low": value - 0.125, "pass@1_high": value + 0.125}
        name = "eval_init.json" if i == 0 else f"eval_iter_{i - 1:03d}.json"
        (run_dir / "metrics" / name).write_text(json.dumps(metrics))
    for i in range(num_train):
        metrics = {"reward_mean": 0.5 + i / 4, "time/generate_s": 60.0, "time/train_s": 30.0}
        (run_dir / "metrics" / f"train_iter_{i:03d}.json").write_text(json.dumps(metrics))


@pytest.fixture
def multirun_dir(tmp_path: Path) -> Path:
    make_run(tmp_path / "0", ["task=sat", "train.lr=1e-6", "resume=auto"], [0.25, 0.625, 0.5], num_train=2)
    make_run(tmp_path / "1", ["task=sat", "train.lr=1e-5"], [], num_train=0)
    make_run(
        tmp_path / "2",
        ["task=sat", "train.lr=5e-6", "generation.base_url=[http://restarted:1]"],
        [0.25, 0.75],
        num_train=1,
    )
    return tmp_path


def printed(multirun_dir: Path) -> list[str]:
    stream = io.StringIO()
    print_sweep([multirun_dir], Console(file=stream, width=80))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_the_table_is_printed_and_saved_for_programs_and_people(multirun_dir: Path) -> None:
    assert printed(multirun_dir) == [
        "3 configurations, 3 runs, best final pass@1 first",
        "intervals are over problems; to compare settings, run several seeds: seed=0,1,2",
        "configuration  runs  pass@1 [95%]          best   reward  minutes",
        "lr=1e-6        0     0.500 [0.375, 0.625]  0.625  0.750   3.0",
        "lr=5e-6        2     0.750 [0.625, 0.875]  0.750  0.500   1.5",
        "lr=1e-5        1",
        "run 2: stopped at 1/2",
        "run 1: no metrics",
        *(str(multirun_dir / name) for name in ("summary.csv", "summary.md", "report.html")),
    ]
    with (multirun_dir / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["task"], row["train.lr"], row["pass@1"]) for row in rows] == [
        ("2", "sat", "5e-6", "0.75"),
        ("0", "sat", "1e-6", "0.5"),
        ("1", "sat", "1e-5", ""),
    ]
    lines = (multirun_dir / "summary.md").read_text().splitlines()
    assert lines[2] == "| lr=1e-6 | 0 | 0.500 [0.375, 0.625] | 0.625 | 0.750 | 3.0 |"
    runs = lines[6:]
    assert runs[0] == "| run | train.lr | pass@1 [95%] | best | reward | minutes | status |", "task is the same for all"
    assert runs[3] == "| 0 | 1e-6 | 0.500 [0.375, 0.625] | 0.625 | 0.750 | 3.0 | done |"
    assert runs[4] == "| 1 | 1e-5 |  |  |  |  | no metrics |"


def test_a_run_that_was_changed_on_its_way_is_another_configuration(tmp_path: Path) -> None:
    """Run 2 was only started again."""
    words = ["train.lr=0.1", "train.optimizer.lr=${train.lr}"]
    for i in range(3):
        make_run(tmp_path / str(i), [*words, f"seed={i}"], [0.25, 0.5], num_train=2)
    starts = [
        {"overrides": []},
        {"after_iteration": 4, "changes": {"train.lr": [0.3, 0.2]}},
        {"after_iteration": 6, "changes": {"train.lr": [0.2, 0.1], "train.optimizer.lr": [0.2, 0.1]}},
    ]
    (tmp_path / "1" / ".hydra" / "starts.yaml").write_text(yaml.safe_dump(starts))
    again = [{"overrides": []}, {"after_iteration": 1, "changes": {}}]
    (tmp_path / "2" / ".hydra" / "starts.yaml").write_text(yaml.safe_dump(again))
    printed(tmp_path)
    rows = [line.split(" | ")[:2] for line in (tmp_path / "summary.md").read_text().splitlines()[2:4]]
    assert rows == [["| lr=0.1", "0 2"], ["| lr=0.3, then 0.2, then 0.1", "1"]]


def test_the_numbers_of_a_search_have_a_picture(tmp_path: Path) -> None:
    for number in range(6):
        words = ["task=sat", f"train.lr={10 ** (number - 6)}", f"data.rollouts_per_problem={4 + 4 * (number % 2)}"]
        make_run(tmp_path / str(number), words, [0.25, number / 10], num_train=2)
    rates, sizes = searched(load_runs([tmp_path]))
    assert [each["key"] for each in (rates, sizes)] == ["train.lr", "data.rollouts_per_problem"]
    assert [rates[name][2] for name in ("x", "y", "runs")] == [1e-4, 0.2, "2"]
    assert searched(load_runs([tmp_path])[:4]) == [], "as a grid"
