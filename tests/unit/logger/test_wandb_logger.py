import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from factories import compose_config, make_group

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import RunListener
from offline_grpo.logger.wandb_logger import WandbLogger

EVAL = {"pass@1": 0.25, "pass@1_low": 0.125, "pass@1_high": 0.375}


def make(output_dir: Path, **changes: Any) -> WandbLogger:
    settings = {"mode": "offline", "project": "p", "entity": None, "group": "g", "name": "n", "notes": "why"}
    settings |= {"names": "default", "tags": ["t"], "samples": 2}
    return WandbLogger(output_dir=output_dir, **(settings | changes))


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """In place of W&B's."""
    init = MagicMock()
    monkeypatch.setattr("wandb.init", init)  # imported now, and not while tests are collected
    monkeypatch.setattr("wandb.login", lambda **_: True)
    return init


def rows(init: MagicMock) -> list[dict[str, Any]]:
    """What was logged."""
    return [call.args[0] for call in init.return_value.log.call_args_list]


def test_bad_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert compose_config("logger=[wandb]").logger.wandb.mode == "offline"
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    mode = compose_config("logger=[wandb]").logger.wandb.mode
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode=dryrun: must be one of online, offline, disabled"):
        make(tmp_path, mode=mode)


def test_metrics_are_logged_against_completed_iterations(tmp_path: Path, init: MagicMock) -> None:
    logger = make(tmp_path)
    assert isinstance(logger, RunListener)
    logger.start({}, 1)
    logger.log("eval", EVAL, iteration=-1)
    logger.log("train", {"time/generate_s": 1.5}, iteration=0)
    logger.log("eval", EVAL, iteration=0)
    logger.close()
    logger.close()
    intervals = {"eval_intervals/pass@1_low": 0.125, "eval_intervals/pass@1_high": 0.375}
    assert rows(init) == [
        {"iteration": 0, "eval/pass@1": 0.25} | intervals,
        {"iteration": 0, "train/time/generate_s": 1.5},
        {"iteration": 1, "eval/pass@1": 0.25} | intervals,
    ]
    init.return_value.finish.assert_called_once()


@pytest.mark.slow
def test_offline_files_have_the_best_beside_the_last_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With W&B itself."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = make(tmp_path)
    monkeypatch.setattr(sys, "argv", typed := ["run_grpo.py", "generation.api_key=sk-314"])
    logger.start({"train": {"lr": 0.5}, "generation": {"api_key": "sk-314"}}, 1)
    assert sys.argv is typed
    for iteration, value in enumerate((0.25, 0.75, 0.5)):
        logger.log("eval", {"pass@1": value, "tasks": value}, iteration=iteration)
    summary = logger._run.summary
    assert dict(summary["eval/pass@1"]) == {"max": 0.75, "last": 0.5}
    assert summary["eval/tasks"] == 0.5
    logger.rollouts("train", [make_group(("not this", 0.0))], advantages=[[0.0]], iteration=0)
    logger.rollouts("eval", [make_group(("\ud800", 0.0), ("[bold]", 1.0))], advantages=None, iteration=0)
    logger.close()
    [table] = (tmp_path / "wandb").glob("offline-run-*/files/media/table/eval/*.json")
    rows = [["2+2=", "[bold]", "4", 1.0, True, "p"], ["2+2=", "\\ud800", "4", 0.0, False, "p"]]
    assert json.loads(table.read_text())["data"] == rows
    deadline, kept = time.monotonic() + 30, b""
    while b"generation.api_key=***" not in kept:  # W&B's own process may still be writing
        assert time.monotonic() < deadline
        kept = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file())
    assert b"sk-314" not in kept


def test_the_names_of_the_atropos_trainer(tmp_path: Path, init: MagicMock) -> None:
    logger = make(tmp_path, names="atropos")
    logger.start({"weight_sync": {"_target_": "offline_grpo.weight_sync.restart.Restart"}}, 2)
    step = {"loss_total": 0.5, "reward_mean": 0.25, "time/train_s": 2.0, "time/iteration_s": 6.0}
    for iteration in range(2):
        logger.log("train", step, iteration=iteration)
    logger.close()
    theirs = {"train/loss": 0.5, "train/step_time": 2.0, "train/reward_mean": 0.25, "train/time/iteration_s": 6.0}
    assert rows(init)[0] == {"iteration": 0} | theirs
    times = {"benchmark/total_time_seconds": 12.0, "benchmark/total_time_minutes": 0.2}
    steps = {"benchmark/total_steps": 2.0, "benchmark/avg_step_time_seconds": 2.0}
    init.return_value.summary.update.assert_called_once_with({"benchmark/mode": "restart"} | times | steps)


def test_group_name_and_id_of_a_run(tmp_path: Path, init: MagicMock) -> None:
    run_dir = tmp_path / "2026" / "day" / "time" / "3"
    (run_dir / ".hydra").mkdir(parents=True)
    stored = run_dir / ".hydra" / "hydra.yaml"

    def started(**changes: Any) -> dict[str, Any]:
        make(run_dir, name=None, **changes).start({}, 1)
        return init.call_args.kwargs

    stored.write_text("hydra: {mode: MULTIRUN, sweep: {dir: x, subdir: '${hydra.job.num}'}}")
    assert (started(group="auto")["group"], started(group="mine")["group"]) == ("day_time", "mine")
    stored.write_text("hydra: {mode: RUN, sweep: {dir: x, subdir: y}}")
    first, resumed = started(group="auto", mode="online"), started(group=None, mode="online")
    assert (first["group"], first["name"], first["resume"]) == (None, "time/3", "allow")
    assert first["id"] == resumed["id"]
