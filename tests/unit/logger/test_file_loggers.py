"""Listeners that write files: JSON, TensorBoard, and the trace of `train.profile`."""

from __future__ import annotations

import gzip
import json
import logging
import re
import time
from pathlib import Path

import pytest
import torch
from factories import make_group
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from offline_grpo.errors import GrpoError
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import JsonLogger
from offline_grpo.logger.profiler import Profiler
from offline_grpo.logger.tensorboard import TensorBoardLogger


def test_files_carry_the_names_that_people_parse(tmp_path: Path) -> None:
    logger = JsonLogger(tmp_path)
    assert isinstance(logger, RunListener)
    logger.log("eval", {"pass@1": 0.25}, iteration=-1)
    logger.log("train", {"loss_total": -0.5, "kl_divergence": 0.125}, iteration=0)
    logger.log("eval", {"pass@1": 0.5}, iteration=12)
    files = {path.name: path.read_text() for path in (tmp_path / "metrics").iterdir()}
    assert set(files) == {"eval_init.json", "train_iter_000.json", "eval_iter_012.json"}
    assert files["train_iter_000.json"] == '{\n  "kl_divergence": 0.125,\n  "loss_total": -0.5\n}\n'
    with pytest.raises(GrpoError, match=r"train metric grad_norm is nan \(iter_003\)"):
        logger.log("train", {"loss_total": 1.0, "grad_norm": float("nan")}, iteration=3)
    assert len(list((tmp_path / "metrics").iterdir())) == 3


def test_event_files_hold_prefixed_metrics_against_completed_iterations(tmp_path: Path) -> None:
    logger = TensorBoardLogger(output_dir=tmp_path, flush_s=10, samples=1)
    assert isinstance(logger, RunListener)
    train = {"lr": 0.5, "ks": [1, 4], "batch_size": None}
    logger.start({"train": train, "seed": 3, "generation": {"api_key": "sk-314"}}, 2)
    logger.log("eval", {"pass@1": 0.25, "pass@1_low": 0.125, "pass@1_high": 0.375}, iteration=-1)
    for iteration in range(2):
        logger.log("train", {"time/generate_s": 1.5 + iteration}, iteration=iteration)
        logger.log("eval", {"pass@1": 0.5 + iteration / 4}, iteration=iteration)
    logger.close()
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/pass@1")] == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars("train/time/generate_s")] == [(0, 1.5), (1, 2.5)]
    assert [event.value for event in events.Scalars("eval_intervals/pass@1_low")] == [0.125]
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("eval/pass@1_")]
    plugins = events.PluginTagToContent("hparams")
    session = HParamsPluginData.FromString(plugins["_hparams_/session_start_info"]).session_start_info
    values = {name: value.number_value or value.string_value for name, value in session.hparams.items()}
    assert values == {"train.lr": 0.5, "train.ks": "[1, 4]", "seed": 3.0, "generation.api_key": "***"}
    experiment = HParamsPluginData.FromString(plugins["_hparams_/experiment"]).experiment
    assert "eval/pass@1" in [info.name.tag for info in experiment.metric_infos], "the tag of the curve"
    assert not [file for file in (tmp_path / "tensorboard").iterdir() if b"sk-314" in file.read_bytes()]
    assert b'"lr": 0.5' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_a_run_that_goes_on_from_an_earlier_checkpoint_has_one_curve(tmp_path: Path) -> None:
    """Starts from iterations 0 and 2; the second finds steps up to 5 of the first."""
    for first, value in ((0, 1.0), (2, 2.0)):
        logger = TensorBoardLogger(output_dir=tmp_path, flush_s=10, samples=1)
        logger.start({}, 5)
        for iteration in range(first, 5 if first == 0 else 4):
            logger.rollouts("train", [], advantages=[], iteration=iteration)
            logger.rollouts("eval", [make_group(("text", 0.0))], advantages=None, iteration=iteration)
            logger.log("train", {"lr": value}, iteration=iteration)
            logger.log("eval", {"pass@1": value}, iteration=iteration)
        logger.close()
        time.sleep(1.1 * (first == 0))  # TensorBoard orders the files by the second in their names
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    evals, rates = (events.Scalars(name) for name in ("eval/pass@1", "train/lr"))
    assert [(event.step, event.value) for event in evals] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert [(event.step, event.value) for event in rates] == [(0, 1.0), (1, 1.0), (2, 1.0), (2, 2.0), (3, 2.0)]


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
