from pathlib import Path
from typing import Any

import pytest
import wandb

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import RunListener
from offline_grpo.logger.wandb_logger import WandbLogger


def make(output_dir: Path, **changes: Any) -> WandbLogger:
    settings = {"mode": "offline", "project": "p", "entity": None, "group": "g", "name": "n", "tags": ["t"]}
    return WandbLogger(output_dir=output_dir, **(settings | changes))


@pytest.mark.parametrize("project", [None, ""])
def test_a_missing_project_is_refused(tmp_path: Path, project: str | None) -> None:
    with pytest.raises(ConfigError, match=r"logger\.wandb\.project"):
        make(tmp_path, project=project)


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode=on: must be one of online, offline, disabled"):
        make(tmp_path, mode="on")


def test_offline_files_lie_in_the_run_folder_and_hold_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = make(tmp_path)
    assert isinstance(logger, RunListener)
    logger.start({"train": {"lr": 0.5}}, 1)
    run = logger._run
    assert (run.project, run.group, run.name, run.tags, run.config["train"]) == ("p", "g", "n", ("t",), {"lr": 0.5})
    logger.log("eval", {"pass@1": 0.25}, iteration=-1)
    logger.log("train", {"time/generate_s": 1.5}, iteration=0)
    logger.log("eval", {"pass@1": 0.75}, iteration=0)
    summary = dict(run.summary)
    logger.close()
    logger.close()
    assert (summary["train/time/generate_s"], summary["eval/pass@1"], summary["iteration"]) == (1.5, 0.75, 1)
    [file] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert file.stat().st_size > 0


def test_a_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **arguments: started.append(arguments) or FakeRun())
    for output_dir in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        make(output_dir, mode="online").start({}, 1)
    first, resumed, other = (arguments["id"] for arguments in started)
    assert first == resumed != other
    assert {arguments["resume"] for arguments in started} == {"allow"}


class FakeRun:
    def define_metric(self, name: str, **_: Any) -> None:
        """Accepted."""
