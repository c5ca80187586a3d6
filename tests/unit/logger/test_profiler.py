"""`train.profile` in a whole run."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

from factories import compose_config

from offline_grpo.run import app


def test_a_trace_and_the_costliest_operators(tmp_path: Path) -> None:
    small = ["data.problems_per_iteration=2", "data.rollouts_per_problem=4", "eval.enabled=false"]
    small += ["train.drop_zero_signal_groups=false", "model.tiny.warm_start_steps=1", "train.iterations=2"]
    app.run(compose_config("train.profile=2", *small), tmp_path)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["iter_001.json.gz"]
    with gzip.open(tmp_path / "profile" / "iter_001.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names
    text = (tmp_path / "run.log").read_text()
    costs = [float(cost) for cost in re.findall(r"([\d.]+) ms +[\d,]+ calls  \S", text)]
    assert len(costs) == 10
    assert costs == sorted(costs, reverse=True)
    assert "train.profile=2: open " in text
