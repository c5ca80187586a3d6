"""The commands as people type them, and the main variants of a run."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import compose_config
from peft import PeftModel
from runs import SMALL, metrics_of, printed, run_command, run_in_child, weights_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from offline_grpo.checkpoint.files import list_checkpoints
from offline_grpo.model import load
from offline_grpo.run import train

ROOT = Path(__file__).parents[2]
ONE_ITERATION = (*SMALL, "train.iterations=1", "eval.eval_first=false", "model.device=cpu")

SWEEP_FILES = ("summary.csv", "summary.md", "report.html", "multirun.yaml")


def command(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT WORDS` from an empty folder."""
    return run_command(folder, ROOT / script, *words)


def test_an_unknown_key_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """In a new interpreter."""
    words = [sys.executable, "-X", "importtime", str(ROOT / "run_grpo.py"), "train.speed=1"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    imports, lines = [], []
    for line in done.stderr.splitlines():
        (imports if line.startswith("import time:") else lines).append(line)
    assert {"hydra", "omegaconf"} < {line.rpartition("|")[2].strip() for line in imports}
    assert not [line for line in imports if re.search(r"\| +(torch|transformers)$", line)]
    assert len(lines) == 1
    assert lines[0].startswith("error: train.speed: no such key; ")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_leaves_runs_and_a_table_and_a_refused_job_shows_in_its_exit_code(tmp_path: Path, cache: str) -> None:
    done = command(tmp_path, "run_grpo.py", "--multirun", *ONE_ITERATION, cache, "train.lr=-1,1e-3,1e-4")
    assert done.returncode == 2
    assert re.search(r"^error in job 0 of the sweep: train.lr=-1.0: ", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr
    [sweep_dir] = tmp_path.glob("multirun/*/*")
    assert done.stderr.splitlines()[-2:] == [
        "1 job of the sweep failed, with an error above; a refused one has no row",
        f"continue the sweep with: uv run run_grpo.py resume={sweep_dir.relative_to(tmp_path)}",
    ]
    assert re.search(r"/multirun/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-\d{6}$", str(sweep_dir))
    assert {path.name for path in sweep_dir.iterdir()} >= {"1", "2", *SWEEP_FILES}
    with (sweep_dir / "summary.csv").open() as file:
        rows = {(row["run"], row["train.lr"], row["status"]) for row in csv.DictReader(file)}
    assert rows == {("1", "0.001", "done"), ("2", "0.0001", "done")}
    lrs = {name: metrics_of(sweep_dir / name)["train_iter_000.json"]["lr"] for name in "12"}
    assert lrs == pytest.approx({"1": 0.5e-3, "2": 0.5e-4})
    assert "2 runs, best final pass@1 first" in done.stdout
    table = (sweep_dir / "summary.md").read_text()
    assert table.startswith("| configuration | runs | pass@1 [95%] |")
    assert sum(line.startswith("| lr=") for line in table.splitlines()) == 2


@pytest.mark.slow
def test_the_smoke_test_prints_both_records(tmp_path: Path) -> None:
    done = command(tmp_path, "smoke_test.py")
    assert done.returncode == 0, done.stderr
    for title, name in (("Train", "loss_total"), ("Eval", "pass@1")):
        [line] = [line for line in done.stdout.splitlines() if line.startswith(f"{title} metrics: {{")]
        assert f"'{name}': " in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
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
    part = tmp_path / "part"
    for more in ("train.iterations=2", f"resume={part}"):  # made longer, it ends as the run that had four at once
        train(compose_config(*SMALL, *overrides, more), part if "resume" not in more else tmp_path / "fresh")
    assert metrics_of(part) == metrics_of(run_dir)
    assert weights_of(part) == weights_of(run_dir)


def test_bf16_steps_on_masters_that_its_checkpoints_hold(tmp_path: Path, cache: str) -> None:
    run_dir = tmp_path / "run"
    train(compose_config(*ONE_ITERATION, cache, "train.precision=bf16"), run_dir)
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


def test_without_kl_no_reference_is_loaded(tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_frozen", None)
    train(compose_config(cache, *ONE_ITERATION, "train.kl_coef=0"), tmp_path / "without")
    without = metrics_of(tmp_path / "without")["train_iter_000.json"]
    assert without["grad_norm"] > 0
    assert "kl_divergence" not in without


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_saves_and_ends(tmp_path: Path) -> None:
    words = ("experiment=smoke", "eval.enabled=false", "train.iterations=100000", "checkpoint.save_interval=100000")
    command = [sys.executable, str(ROOT / "run_grpo.py"), *words, f"hydra.run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert any(" 1/100000 " in line for line in process.stdout)
    process.stdout.close()
    assert process.wait(100) == 128 + signal.SIGTERM
    assert [*(tmp_path / "run" / "checkpoints").iterdir()]
    assert "SIGTERM: stopping" in (tmp_path / "run" / "run.log").read_text()
