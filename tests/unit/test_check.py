"""`python -m offline_grpo.check` on machines that have and lack things."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from huggingface_hub import constants

from offline_grpo import check

SMI = "NVIDIA H100 80GB HBM3, 81559, 80000, 570.86\nNVIDIA H100 80GB HBM3, 81559, 100, 570.86\n"
Version = namedtuple("Version", ["major", "minor", "micro"])


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A `nvidia-smi` of this content is the only program that is found."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def found(name: str) -> check.Finding:
    return next(one for one in check.findings(Path.cwd(), check.find_gpus()) if one.name == name)


def test_gpus_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_path(tmp_path, monkeypatch, f"printf '{SMI}'")
    assert len(check.find_gpus()) == 2
    assert found("GPU 1").text == "NVIDIA H100 80GB HBM3, 0 of 80 GiB free, driver 570.86"
    put_on_path(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed'; exit 9")
    assert check.find_gpus() == []
    assert found("GPU").state == "missing"
    assert check.fitting(0.0) == {}


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be reached" in found("Hub").text
    monkeypatch.setattr(check, "versions", lambda: {"vllm": "0.19.1"})
    assert (found("vLLM").state, found("vLLM").text) == ("missing", "0.19.1 (0.25 to 0.33 is supported)")
    assert found("torch").state == "error"
    (about := tmp_path / "bare_options-1.0.dist-info").mkdir()
    (about / "entry_points.txt").write_text("[offline_grpo.conf]\nbare = bare_options.conf\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (found("package").state, found("package").text[:19]) == ("error", "bare_options.conf: ")
    monkeypatch.setattr(sys, "version_info", Version(3, 10, 1))
    assert found("Python").state == "error"


def test_it_fits_one_screen_and_imports_no_torch_without_a_gpu(tmp_path: Path) -> None:
    code = (
        "import sys; from offline_grpo import check; code = check.main(sys.argv[1:]); sys.exit(9 if 'torch' in "
        "sys.modules else code)"
    )
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 23
    assert max(len(line) for line in lines) <= 80
    assert lines[-2] == "  uv run run_grpo.py   # tiny model, CPU or GPU"


def test_the_screen_of_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_on_path(tmp_path, monkeypatch, "echo 'NVIDIA RTX 4090, 24564, 24000, 570.86'")
    check.main([])
    lines = capsys.readouterr().out.splitlines()
    assert any("model.quantization=nf4 train.lr=1e-5: mistral, qwen3_8b" in line for line in lines)
    assert max(map(len, lines)) <= 80
