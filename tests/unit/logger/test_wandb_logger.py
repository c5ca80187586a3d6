import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import wandb
from factories import compose_config, make_group
from wandb.proto import wandb_internal_pb2

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import RunListener
from offline_grpo.logger.wandb_logger import WandbLogger

EVAL = {"pass@1": 0.25, "pass@1_low": 0.125, "pass@1_high": 0.375}


def make(output_dir: Path, **changes: Any) -> WandbLogger:
    settings = {
        "mode": "offline",
        "project": "p",
        "entity": None,
        "group": "g",
        "name": "n",
        "notes": "why",
        "names": "default",
        "tags": ["t"],
        "samples": 2,
    }
    return WandbLogger(output_dir=output_dir, **(settings | changes))


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode=on: must be one of online, offline, disabled$"):
        make(tmp_path, mode="on")


def test_a_mode_of_the_environment_is_the_default_and_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert compose_config("logger=[wandb]").logger.wandb.mode == "offline"
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    mode = compose_config("logger=[wandb]").logger.wandb.mode
    with pytest.raises(
        ConfigError, match=r"logger\.wandb\.mode=dryrun: must be one of .*; it is the environment variable WANDB_MODE"
    ):
        make(tmp_path, mode=mode)


def test_offline_files_lie_in_the_run_folder_and_hold_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = make(tmp_path)
    assert isinstance(logger, RunListener)
    monkeypatch.setattr(sys, "argv", typed := ["run_grpo.py", "generation.api_key=sk-314"])
    logger.start({"train": {"lr": 0.5}, "generation": {"api_key": "sk-314"}}, 1)
    assert sys.argv is typed
    logger.log("eval", EVAL | {"pass@1": 0.75}, iteration=-1)
    logger.log("train", {"time/generate_s": 1.5, "clip_low_frac": 0.1, "entropy": 0.25}, iteration=0)
    logger.log("eval", EVAL, iteration=0)
    logger.log("train", {"time/generate_s": 2.5, "clip_low_frac": 0.1, "entropy": 0.5}, iteration=1)
    logger.close()
    logger.close()
    [file] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    records = stored(file)
    kept = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert not [path for path in kept if b"sk-314" in path.read_bytes()]
    assert b"generation.api_key=***" in b"".join(path.read_bytes() for path in kept)
    [stored_run] = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    named = (stored_run.project, stored_run.run_group, stored_run.display_name, stored_run.notes, list(stored_run.tags))
    assert named == ("p", "g", "n", "why", ["t"])
    rows = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in r.history.item}
        for r in records
    ]
    rows = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows if row]
    assert rows[0] == {
        "iteration": 0,
        "eval/pass@1": 0.75,
        "eval_intervals/pass@1_low": 0.125,
        "eval_intervals/pass@1_high": 0.375,
    }
    assert rows[1] == {"iteration": 0, "train/time/generate_s": 1.5, "train/clip_low_frac": 0.1, "train/entropy": 0.25}
    assert (rows[2]["iteration"], rows[2]["eval/pass@1"]) == (1, 0.25)
    metrics = {
        record.metric.name or record.metric.glob_name: record.metric for record in records if record.HasField("metric")
    }
    assert metrics["eval/pass@1"].summary.max
    assert metrics["eval/pass@1"].summary.last
    assert metrics["train/entropy"].summary.min
    assert {"train/*", "eval/*", "eval_intervals/*"} < metrics.keys()


def test_the_table_of_runs_has_the_best_beside_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = make(tmp_path)
    logger.start({}, 1)
    for iteration, value in enumerate((0.25, 0.75, 0.5)):
        logger.log("eval", {"pass@1": value, "tasks": value}, iteration=iteration)
        logger.log("train", {"entropy": value}, iteration=iteration)
    summary = logger._run.summary
    assert dict(summary["eval/pass@1"]) == {"max": 0.75, "last": 0.5}
    assert dict(summary["train/entropy"]) == {"min": 0.25, "last": 0.5}
    assert summary["eval/tasks"] == 0.5
    logger.close()


def test_the_names_of_the_atropos_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"logger\.wandb\.names=seeds: must be one of default, atropos"):
        make(tmp_path, names="seeds")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = make(tmp_path, names="atropos")
    logger.start({"weight_sync": {"_target_": "offline_grpo.weight_sync.restart.Restart"}}, 2)
    step = {
        "loss_total": 0.5,
        "reward_mean": 0.25,
        "time/train_s": 2.0,
        "time/iteration_s": 6.0,
        "alignment/diff_mean": 0.125,
    }
    logger.log("train", step, iteration=0)
    logger.log("train", step, iteration=1)
    logger.log("eval", EVAL, iteration=1)
    logger.close()
    records = stored(next((tmp_path / "wandb").glob("offline-run-*/*.wandb")))
    rows = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in r.history.item}
        for r in records
    ]
    train, _, evaluation = [
        {key: value for key, value in row.items() if not key.startswith("_")} for row in rows if row
    ]
    expected = {"train/loss": 0.5, "train/step_time": 2.0, "train/reward_mean": 0.25, "alignment/diff_mean": 0.125}
    assert train == {"iteration": 0, "train/time/iteration_s": 6.0, **expected}
    assert evaluation["eval/pass@1"] == 0.25
    summary: dict[str, Any] = {}
    for record in records:
        summary |= {
            (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.summary.update
        }
    assert {key: value for key, value in summary.items() if key.startswith("benchmark/")} == {
        "benchmark/mode": "restart",
        "benchmark/total_time_seconds": 12.0,
        "benchmark/total_time_minutes": 0.2,
        "benchmark/total_steps": 2.0,
        "benchmark/avg_step_time_seconds": 2.0,
    }


@pytest.mark.parametrize(
    ("group", "mode", "subdir", "expected"),
    [
        ("auto", "MULTIRUN", "${hydra.job.num}", "day_time"),
        ("auto", "MULTIRUN", "all/${hydra.job.num}", "2026_day"),
        ("auto", "RUN", "${hydra.job.num}", None),
        ("mine", "MULTIRUN", "${hydra.job.num}", "mine"),
        (None, "MULTIRUN", "${hydra.job.num}", None),
    ],
)
def test_the_group_of_a_run(
    group: str | None, mode: str, subdir: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "2026" / "day" / "time" / "3"
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra" / "hydra.yaml").write_text(f"hydra: {{mode: {mode}, sweep: {{dir: x, subdir: '{subdir}'}}}}")
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: started.append(arguments) or FakeRun())
    make(run_dir, group=group).start({}, 1)
    assert started[0]["group"] == expected


def test_a_run_that_hydra_did_not_start_has_no_group_and_the_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: started.append(arguments) or FakeRun())
    make(tmp_path / "day" / "time", group="auto", name=None).start({}, 1)
    assert (started[0]["group"], started[0]["name"]) == (None, "day/time")


def test_samples_of_evaluations_are_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = make(tmp_path)
    logger.start({}, 1)
    logger.rollouts("train", [make_group(("not this", 0.0))], advantages=[[0.0]], iteration=0)
    logger.rollouts("eval", [make_group(("\ud800", 0.0), ("[bold]", 1.0))], advantages=None, iteration=0)
    [file] = (tmp_path / "wandb").glob("offline-run-*/files/media/table/eval/*.json")
    assert json.loads(file.read_text())["data"] == [
        ["2+2=", "[bold]", "4", 1.0, True, "p"],
        ["2+2=", "\\ud800", "4", 0.0, False, "p"],
    ]
    logger.close()


def stored(file: Path) -> list[Any]:
    """The records in the file of a run that has ended. W&B's own process may still be writing the last of them when
    `finish` returns.
    """
    deadline = time.monotonic() + 30
    while True:
        records = read_records(file)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"{file} has {len(records)} records and no end"
        time.sleep(0.05)


def read_records(file: Path) -> list[Any]:
    """The whole records in a file of W&B: protocol buffers in the log format of LevelDB, behind 7 bytes that name the
    file's kind.
    """
    data, position, records, parts = file.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:  # a block's rest is too short for a header
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        if position + 7 + length > len(data):
            break
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def test_a_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: started.append(arguments) or FakeRun())
    monkeypatch.setattr(wandb, "login", lambda **_: True)
    for output_dir in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        make(output_dir, mode="online").start({}, 1)
    first, resumed, other = (arguments["id"] for arguments in started)
    assert first == resumed != other
    assert {arguments["resume"] for arguments in started} == {"allow"}


class FakeRun:
    def define_metric(self, name: str, **_: Any) -> None:
        """Accepted."""
