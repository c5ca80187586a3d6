"""`train.profile`: a trace of one iteration."""

from __future__ import annotations

import gzip
import json
import logging
import re
from pathlib import Path

import pytest
import torch

from offline_grpo.logger.profiler import Profiler


def test_a_trace_and_the_costliest_operators(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = Profiler(tmp_path, iteration=1)
    with caplog.at_level(logging.INFO):
        for iteration in range(3):
            profiler.phase("generate", iteration)
            (torch.ones(64, 64) @ torch.rand(64, 64)).softmax(-1).sum()
            profiler.log("train", {}, iteration=iteration)
        profiler.close()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["iter_001.json.gz"]
    with gzip.open(tmp_path / "profile" / "iter_001.json.gz") as file:
        assert "aten::mm" in {event.get("name") for event in json.load(file)["traceEvents"]}
    costs = [float(cost) for cost in re.findall(r"([\d.]+) ms +[\d,]+ calls  \S", caplog.text)]
    assert costs == sorted(costs, reverse=True) != []
    assert "train.profile=2: open " in caplog.messages[-1]
