"""What is refused is one line, with the right exit code, and leaves nothing behind. Nothing here gets as far as
importing a model.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich
from hydra.core.global_hydra import GlobalHydra

from offline_grpo.errors import GrpoError, StopRequested
from offline_grpo.run import app, cli
from offline_grpo.run.main import main
from offline_grpo.run.run_dir import RunDir

ROOT = Path(__file__).parents[3]
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
    monkeypatch.setattr(cli, "SHOWS_TRACEBACKS", False)
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
        (
            "hydra.run.dir=afile/x",
            r"hydra\.run\.dir=afile/x: \S+/afile/x cannot be made or written \(Not a directory\); .*",
        ),
        (
            "--multirun hydra.sweep.dir=afile seed=1,2",
            r"hydra\.sweep\.dir=afile: \S+/afile cannot be made or written .*",
        ),
        ("logger=[json,consol]", r"logger=consol: no such option; choose one of console, json, tensorboard, wandb"),
        (
            "logger=[wandb] logger.wandb.mode=online",
            r"logger\.wandb\.mode=online: Weights & Biases has no API key of yours; run `wandb .*",
        ),
        ("seed=0 eval=false model/lora=true", r"eval=false, model/lora=true: a group needs one of its options; .*"),
        ("loss=dapo", r"loss: no such key; the setting is train/loss"),
        ("train/los=dapo", r"train/los: no such key; did you mean train/loss\?"),
        ("zzz/qqq=default", r"zzz/qqq: no such key; it may be one of checkpoint, data, .*, model/lora, .*"),
        ("train.lr=null", r"train\.lr=null: needs a value"),
        ("model/lora=default model.lora.alpha=0", r"model\.lora\.alpha=0\.0: must be above 0; .*"),
        (
            "train.iterations=2 train.profile=3",
            r"train\.profile=3: an iteration, from 1 to train\.iterations=2, or null",
        ),
        ("num_threads=100000", r"num_threads=100000: from 1 to 4096, .*"),
        ("logger=[] train.lr=0", r"train\.lr=0\.0: must be above 0 and finite"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_nothing(command: Command, tmp_path: Path, words: str, message: str) -> None:
    code, err = command(*words.split())
    assert code == 2
    assert re.fullmatch(f"error: {message}\n", err), err
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


def test_an_os_error_of_a_run_is_not_taken_for_one_of_its_folder(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError(2, "No such file", "model.bin")

    monkeypatch.setattr(app, "run", fail)
    with pytest.raises(FileNotFoundError, match=r"model\.bin"):
        command()


def test_a_full_disk_is_told_of_the_file_that_was_written(tmp_path: Path) -> None:
    """Of a copy that fails, Python names the source first."""
    message = r"^/run/media/a\.json: cannot be written \(No space left on device\); free some space"
    with pytest.raises(GrpoError, match=message), app._told_if_unwritable(RunDir(tmp_path)):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/a.json", None, "/run/media/a.json")


def test_the_end_of_a_reader_is_told_by_whoever_meets_it_without_waiting_for_others_that_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The display's own thread may meet it, and hold what a thread that is logging waits for."""
    monkeypatch.setattr(cli, "forget_output", lambda: None)
    monkeypatch.setattr(rich, "get_console", SimpleNamespace)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    handler = logging.StreamHandler(told := io.StringIO())
    monkeypatch.setattr(cli.log, "handlers", [handler])
    with handler.lock:
        meets_it = threading.Thread(target=cli._stop_unseen)
        meets_it.start()
        meets_it.join(10)
        assert not meets_it.is_alive()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(10)
    assert told.getvalue() == "the program that read the output has ended\n"


def test_a_reader_that_has_ended_ends_the_command_quietly(
    command: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with capfd.disabled(), os.fdopen(write, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert command("--cfg", "job") == (141, "")


@pytest.mark.parametrize(
    ("record", "how"), [(["multirun.yaml"], "the sweep goes on with: .* resume=.*"), ([], "a search starts anew")]
)
def test_a_sweep_that_was_stopped_says_how_it_goes_on(
    record: list[str], how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search does not: Hydra keeps no record of it, and `resume` refuses its folder."""
    for name in record:
        (tmp_path / name).touch()
    cli.say_how_the_sweep_goes_on(StopRequested(signal.SIGINT), tmp_path, "of 2 jobs 1 has a checkpoint")
    assert re.fullmatch(f"stopped by SIGINT; of 2 jobs 1 has a checkpoint; {how}\n", capsys.readouterr().err)


def test_a_traceback_is_shown_to_those_who_ask_for_it(tmp_path: Path) -> None:
    def said(**env: str) -> str:
        words = [sys.executable, str(ROOT / "run_grpo.py"), "train.lr=-1"]
        done = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=100
        )
        assert done.returncode == 2
        return done.stderr

    line = "error: train.lr=-1.0: must be above 0"
    assert said(HYDRA_FULL_ERROR="0").startswith(line)
    shown = said(HYDRA_FULL_ERROR="1")
    assert shown.startswith("Traceback")
    assert "in typed" in shown
    assert shown.splitlines()[-1].startswith(line)
