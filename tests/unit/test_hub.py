"""The Hub that is there, refuses, is silent, or is not needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from factories import compose_config, make_qwen2
from huggingface_hub import constants

from offline_grpo import hub
from offline_grpo.config.compose import typed
from offline_grpo.config.parts import make_plan
from offline_grpo.errors import ConfigError
from offline_grpo.model.load import read_model_config

REFUSED = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", REFUSED)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    hub.unreachable.cache_clear()
    return tmp_path


def test_a_run_that_needs_it_is_refused_in_one_line_before_torch_is_imported() -> None:
    code = (
        "import sys; from offline_grpo.commands import main\ntry: main.main()\nfinally: print('torch' in sys.modules)"
    )
    words = ("model=hf", "model.train_id=some/model")
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment["HF_ENDPOINT"] = REFUSED
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "False")
    assert line.startswith("error: model.train_id=some/model: the Hugging Face Hub cannot")
    assert "Connection refused" in line


def test_a_task_of_the_hub_names_those_that_need_none() -> None:
    for task in ("gsm8k", "math", "ifeval"):
        with pytest.raises(ConfigError, match=r"cannot be reached .*; use task=math_sample or task=ifeval_sample, or"):
            make_plan(typed(compose_config(f"task={task}")))


def test_what_the_cache_has_is_loaded_without_the_hub(empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = empty_cache / "hub" / "models--some--model"
    make_qwen2().save_pretrained(folder / "snapshots" / ("a" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    (empty_cache / "datasets" / "some___rows").mkdir(parents=True)
    hub.need_model("some/model", "model.train_id")
    assert "model.train_id=some/model: the Hugging Face Hub cannot be reached" in caplog.text
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert read_model_config("some/model", "model.train_id").model_type == "qwen2"
    hub.need_dataset("some/rows", "task.path", "")


def test_nobody_asks_where_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.need_model(str(tmp_path), "MODEL")
    make_plan(typed(compose_config("model.ref_id=some/model", "train.kl_coef=0")))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.need_model("some/model", "MODEL")
    hub.need_dataset("some/rows", "task.path", "")
