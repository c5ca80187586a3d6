"""What is refused is one line, with the right exit code, and leaves nothing behind. Nothing here gets as far as importing a model."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from offline_grpo.run import app
from offline_grpo.run.main import main

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """`run_grpo.py WORDS` in an empty folder with a file `afile`: its exit code, and what it said on stderr."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["run_grpo.py", *words])
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            GlobalHydra.instance().clear()
        assert isinstance(ended.value.code, int)
        return ended.value.code, capfd.readouterr().err

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "afile").touch()
    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("+train.foo=1", r"train\.foo: no such key; it may be one of iterations, .*"),
        ("model.lora.r=32", r"model\.lora\.r: model\.lora is empty here; add model/lora=default"),
        ("engine.args.max_model_len=9", r"engine\.args: engine is empty here; add engine=sglang or engine=vllm"),
        ("engine.port=1", r"engine\.port: engine is empty here; add engine=sglang or engine=vllm"),
        (
            "model=hf model.tiny.hidden_size=3",
            r"model\.tiny\.hidden_size: model\.tiny is empty here; \+model\.tiny.*=VALUE adds .*",
        ),
        (
            "hydra.run.dir=afile",
            r"hydra\.run\.dir=afile: \S+/afile cannot be made or written \(File exists\); choose a folder that you can write to",
        ),
        ("hydra.run.dir=afile/x", r"hydra\.run\.dir=afile/x: \S+/afile/x cannot be made or written \(Not a directory\); .*"),
        ("--multirun hydra.sweep.dir=afile seed=1,2", r"hydra\.sweep\.dir=afile: \S+/afile cannot be made or written .*"),
        ("logger=[json,consol]", r"logger=consol: no such option; choose one of console, json, tensorboard, wandb"),
        ("logger=[wandb] logger.wandb.mode=online", r"logger\.wandb\.mode=online: Weights & Biases has no API key of yours; run `wandb .*"),
        ("logger=[] train.lr=0", r"train\.lr=0\.0: must be above 0 and finite"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(command: Command, tmp_path: Path, words: str, message: str) -> None:
    code, err = command(*words.split())
    assert code == 2
    assert re.fullmatch(f"error: {message}\n", err), err
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


def test_an_os_error_of_a_run_is_not_taken_for_one_of_its_folder(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError(2, "No such file", "model.bin")

    monkeypatch.setattr(app, "run", fail)
    with pytest.raises(FileNotFoundError, match=r"model\.bin"):
        command()


def test_a_reader_that_has_ended_ends_the_command_quietly(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with capfd.disabled(), os.fdopen(write, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert command("--cfg", "job") == (141, "")
