"""What a run tells while it goes on, from the command to the table: order of the records, progress inside the phases,
width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from factories import compose_config
from runs import SMALL, Heard, run_command

from offline_grpo.run import train

SCRIPT = Path(__file__).parents[2] / "run_grpo.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Any:
    """Of a run of two iterations with a redirected output: its folder, what listeners heard, and the printed lines."""
    root = tmp_path_factory.mktemp("screen")
    small = ("train.iterations=2", "train.batch_size=4", "generation.batch_size=8", "model.tiny.warm_start_steps=10")
    overrides = (*SMALL, *small, Heard.override, f"cache_dir={root}/cache")
    Heard.events.clear()
    with pytest.MonkeyPatch.context() as patch, (root / "out.txt").open("w") as out:
        patch.setattr("sys.stdout", out)
        train(compose_config(*overrides), root / "run")
    return root / "run", list(Heard.events), (root / "out.txt").read_text().splitlines()


def test_the_start_has_phases_and_training_comes_before_the_evaluation_after_it(run):
    _, events, _ = run
    logged = [event[1:] for event in events if event[0] == "log"]
    assert logged == [("eval", -1), ("train", 0), ("train", 1), ("eval", 1)]
    before = events[: events.index(("start", 2))]
    phases = [event[1] for event in before if event[0] == "phase"]
    assert phases == [
        *("imports and data", "warm start", "imports and data", "imports and data"),
        *("load model", "proof", "masters", "load reference"),
    ]
    assert ("progress", 5, 10, "steps") in before


def test_progress_inside_an_iteration_reaches_its_total(run):
    _, events, _ = run
    begin = events.index(("phase", "generate", 0))
    steps = [event[1:] for event in events[begin:] if event[0] == "progress"]
    assert [done for done, _, unit in steps if unit == "completions"][:5] == [0, 4, 8, 12, 16], "as they arrive"
    assert [step for step in steps if step[2] == "updates"][:2] == [(0, 2, "updates"), (1, 2, "updates")]
    assert [done for done, _, unit in steps if unit == "microbatches"][:4] == [0, 1, 0, 1]


def test_a_file_has_a_line_per_record_none_wider_than_80_columns_but_for_paths(run):
    run_dir, _, lines = run
    assert [line for line in lines if len(line) > 80 and str(run_dir.parent) not in line] == []
    starts = [line.split()[0:2] for line in lines if "/2 " in line]
    assert starts == [["0/2", "eval"], ["1/2", "reward"], ["2/2", "reward"], ["2/2", "eval"]]
    assert any(line.startswith("loading the model ") for line in lines)
    assert lines[-1].startswith("files ")
    assert (run_dir / "run.log").read_text().endswith(f"{lines[-1]}\n")
    assert any(line.startswith("building the tiny model (once)") for line in lines)


def test_the_first_record_tells_what_the_start_took(run):
    first, second = (json.loads((run[0] / "metrics" / f"train_iter_00{i}.json").read_text()) for i in range(2))
    parts = {key: value for key, value in first.items() if key.startswith("time/start_")}
    assert {f"time/start_{name}_s" for name in ("imports_and_data", "load_model", "warm_start", "eval")} < parts.keys()
    assert sum(parts.values()) - parts["time/start_s"] <= parts["time/start_s"]
    assert not [key for key in second if key.startswith("time/start")]
    assert first["num_trainable_parameters"] > 1000
    assert "num_trainable_parameters" not in second


@pytest.mark.slow
def test_a_sweep_that_is_stopped_has_its_table(cache, tmp_path):
    """One run is done, one was stopped, and the third never began."""
    stops = "+logger.stops={_target_:runs.StopsRun,name:'1'}"
    words = (f"hydra.sweep.dir={tmp_path}/sweep", *SMALL, cache, "train.iterations=2", "eval.interval=1", stops)
    result = run_command(tmp_path / "cwd", SCRIPT, "--multirun", *words, "seed=0,1,2")
    assert result.returncode == 143, result.stderr
    lines = result.stdout.splitlines()
    assert "1 configuration, 2 runs, best mean final pass@1 first" in lines
    assert "run 1: stopped at 1/2, not in the mean" in lines
    written = {path.name for path in (tmp_path / "sweep").iterdir()}
    assert written >= {"0", "1", "summary.csv", "summary.md", "report.html"}
