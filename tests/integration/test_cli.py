"""The commands as people type them, and the main variants of a run."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from children import SMALL, metrics_of, printed, run_command, run_in_child, weights_of
from factories import compose_config
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from offline_grpo.checkpoint.files import list_checkpoints
from offline_grpo.model import load
from offline_grpo.run import train

ROOT = Path(__file__).parents[2]
ONE_ITERATION = (*SMALL, "train.iterations=1", "eval.eval_first=false", "model.device=cpu")


def command(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT WORDS` from an empty folder."""
    return run_command(folder, ROOT / script, *words)


def fresh_command(
    folder: Path, script: str, *words: str, python: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """The same in a new interpreter."""
    arguments = [sys.executable, *python, str(ROOT / script), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_an_unknown_key_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    done = fresh_command(tmp_path, "run_grpo.py", "train.speed=1", python=("-X", "importtime"))
    assert done.returncode == 2
    imports, lines = [], []
    for line in done.stderr.splitlines():
        (imports if line.startswith("import time:") else lines).append(line)
    assert {"hydra", "omegaconf"} < {line.rpartition("|")[2].strip() for line in imports}
    assert not [line for line in imports if re.search(r"\| +(torch|transformers)$", line)]
    assert len(lines) == 1
    assert lines[0].startswith("error: train.speed: no such key; ")
    assert list(tmp_path.iterdir()) == []


def sweep(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Path, list[dict[str, str]]]:
    """The process, the folder and the rows of summary.csv of a `--multirun`."""
    done = command(folder, "run_grpo.py", "--multirun", *ONE_ITERATION, *words)
    [sweep_dir] = folder.glob("multirun/*/*")
    with (sweep_dir / "summary.csv").open() as file:
        return done, sweep_dir, list(csv.DictReader(file))


@pytest.mark.slow
def test_a_sweep_leaves_a_run_for_each_value_and_a_table(tmp_path: Path, cache: str) -> None:
    done, sweep_dir, rows = sweep(tmp_path, cache, "train.lr=1e-3,1e-4")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"multirun/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-\d{6}", sweep_dir.relative_to(tmp_path).as_posix())
    files = {"summary.csv", "summary.md", "report.html", "multirun.yaml"}
    assert {path.name for path in sweep_dir.iterdir()} == {"0", "1"} | files
    assert {(row["run"], row["train.lr"], row["status"]) for row in rows} == {
        ("0", "0.001", "done"),
        ("1", "0.0001", "done"),
    }
    lrs = {name: metrics_of(sweep_dir / name)["train_iter_000.json"]["lr"] for name in "01"}
    assert lrs == pytest.approx({"0": 0.5e-3, "1": 0.5e-4})
    assert "2 runs, best final pass@1 first" in done.stdout
    table = (sweep_dir / "summary.md").read_text()
    assert table.startswith("| configuration | runs | pass@1 [95%] |")
    assert sum(line.startswith("| lr=") for line in table.splitlines()) == 2


def test_a_refused_job_does_not_stop_the_sweep_but_shows_in_its_exit_code(tmp_path: Path, cache: str) -> None:
    done, sweep_dir, rows = sweep(tmp_path, cache, "data.rollouts_per_problem=1,4")
    assert done.returncode == 2
    assert re.search(r"^error in job 0 of the sweep: data.rollouts_per_problem=1: ", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "1 job of the sweep failed, with an error above; a refused one has no row"
    assert [(row["run"], row["data.rollouts_per_problem"], row["status"]) for row in rows] == [("1", "4", "done")]
    assert "train_iter_000.json" in metrics_of(sweep_dir / "1")
    assert "1 run, best final pass@1 first" in done.stdout


@pytest.mark.slow
def test_the_smoke_test_prints_both_records(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = fresh_command(tmp_path, "smoke_test.py")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60
    )  # seconds on one core, whatever else it is busy with
    for title, name in (("Train", "loss_total"), ("Eval", "pass@1")):
        [line] = [line for line in done.stdout.splitlines() if line.startswith(f"{title} metrics: {{")]
        assert f"'{name}': " in line
    assert list(tmp_path.iterdir()) == []


def test_all_loggers_together(tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_dir = tmp_path / "run"
    assert run_in_child(run_dir, cache, *ONE_ITERATION, "logger=[json,console,wandb,tensorboard]") == 0, printed(
        run_dir
    )
    assert len(list(run_dir.glob("metrics/*.json"))) == 2
    assert "1/1  reward " in printed(run_dir)
    assert len(list(run_dir.glob("wandb/offline-run-*/*.wandb"))) == 1
    assert len(list(run_dir.glob("tensorboard/events.out.tfevents.*"))) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.txt"}


def assert_resumes_equal(tmp_path: Path, whole: Path, *overrides: str) -> None:
    """A run of two iterations that is made two longer ends as `whole`, which had four at once."""
    part, fresh = tmp_path / "part", tmp_path / "fresh"
    constant = ("train.schedule=constant", *overrides)
    assert run_in_child(part, *SMALL, *constant, "train.iterations=2") == 0, printed(part)
    assert run_in_child(fresh, *SMALL, *constant, f"resume={part}") == 0, printed(fresh)
    assert metrics_of(part) == metrics_of(whole)
    assert weights_of(part) == weights_of(whole)


def test_lora_saves_adapters_and_leaves_the_base_as_it_was(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies: list[Any] = []
    load_policy = load.load_policy
    keep = lambda *w, **how: policies.append(load_policy(*w, **how)) or policies[-1]  # noqa: E731
    monkeypatch.setattr(load, "load_policy", keep)
    run_dir = tmp_path / "run"
    overrides = (cache, "model/lora=default", "model.lora.dropout=0.2", "train.schedule=constant")
    train(compose_config(*SMALL, *overrides), run_dir)
    checkpoint = run_dir / "checkpoints" / "iter_003"
    assert {"adapter_model.safetensors", "adapter_config.json"} < {path.name for path in checkpoint.iterdir()}
    assert not (checkpoint / "model.safetensors").exists()

    [policy] = policies
    folder = Path(json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"])
    trained = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in policy.causal_lm.state_dict().items()
        if "lora_" not in name
    }
    base = load_file(folder / "model.safetensors")
    assert len(base) > 10
    assert all(torch.equal(trained[name], tensor) for name, tensor in base.items())

    ids = torch.tensor([[1, 21, 15, 22, 33]])
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(checkpoint)).eval()
    policy.model.eval()
    with torch.no_grad():
        expected = policy.causal_lm(ids).logits
        assert torch.equal(loaded(ids).logits, expected)
        with loaded.disable_adapter():
            assert not torch.equal(loaded(ids).logits, expected)
    assert_resumes_equal(tmp_path, run_dir, *overrides)


def test_bf16_steps_on_masters_that_its_checkpoints_hold(tmp_path: Path, cache: str) -> None:
    run_dir = tmp_path / "run"
    overrides = (cache, "train.precision=bf16", "train.schedule=constant")
    assert run_in_child(run_dir, *SMALL, *overrides) == 0, printed(run_dir)
    [*_, checkpoint] = list_checkpoints(run_dir / "checkpoints")
    model, masters = (
        load_file(checkpoint / "model.safetensors"),
        load_file(checkpoint / "trainer" / "masters.safetensors"),
    )
    assert {tensor.dtype for tensor in model.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert masters.keys() == model.keys()
    assert all(torch.equal(master.bfloat16(), model[name]) for name, master in masters.items())
    assert any(not torch.equal(master, model[name].float()) for name, master in masters.items())
    assert_resumes_equal(tmp_path, run_dir, *overrides)


def test_without_kl_no_reference_is_loaded(tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_frozen", None)
    train(compose_config(cache, *ONE_ITERATION, "train.kl_coef=0"), tmp_path / "without")
    without = metrics_of(tmp_path / "without")["train_iter_000.json"]
    assert without["grad_norm"] > 0
    assert "kl_divergence" not in without
