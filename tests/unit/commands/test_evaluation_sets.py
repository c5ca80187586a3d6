"""Sets of held-out problems for the checkpoints of a run that chose its task in its own way."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from factories import CONF

from offline_grpo.commands.evaluation import evaluation_sets, saved_overrides
from offline_grpo.history.resume import SWEEP_KEY
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.task.countdown import Countdown
from offline_grpo.task.mixture import Mixture

MIXED = ["task=mixture", "+task@task.tasks.sums=arithmetic", "+task@task.tasks.others=arithmetic", "eval.num_ids=3"]


def run_with(folder: Path, overrides: list[str], config: dict[str, object] | None = None) -> Path:
    """The folder of a run with these overrides, as Hydra leaves it."""
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config or {}))
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    return folder


@pytest.mark.parametrize(
    ("overrides", "words", "expected"),
    [
        (MIXED, "task=countdown task.max_number=30", Countdown),
        (["experiment=mixture", "eval.num_ids=3"], "task=countdown task.max_number=30", Countdown),
        (MIXED, "task=arithmetic task.max_operand=8", Arithmetic),
        (MIXED, "", Mixture),  # that of the run where none is named
    ],
)
def test_another_task_than_that_of_the_run(overrides: list[str], words: str, expected: type, tmp_path: Path) -> None:
    run = run_with(tmp_path, overrides)
    (found,) = evaluation_sets(saved_overrides(run, words.split()), words.split())
    assert isinstance(found.task, expected)
    assert len(found.problems) == 3


def test_a_task_in_a_folder_that_the_run_was_started_with(tmp_path: Path) -> None:
    """By `hydra.searchpath`; `--config-dir` is stored alike."""
    mine = tmp_path / "my, own conf"
    (mine / "task").mkdir(parents=True)
    (mine / "task" / "mine.yaml").write_text((CONF / "task" / "countdown.yaml").read_text())
    run = run_with(
        tmp_path, ["task=mine", "task.max_number=30", "eval.num_ids=3", f"hydra.searchpath=['file://{mine}']"]
    )
    sources = [
        {"path": str(CONF), "schema": "file", "provider": "main"},
        {"path": str(mine), "schema": "file", "provider": "hydra.searchpath in command-line"},
    ]
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"config_sources": sources}}}))
    (found,) = evaluation_sets(saved_overrides(run, []), [])
    assert isinstance(found.task, Countdown)
    typed = ["hydra.searchpath=[file:///other]"]
    assert saved_overrides(run, typed) == ["task=mine", "task.max_number=30", "eval.num_ids=3"], "Hydra reads one"


def test_paths_of_the_run_are_found_from_any_folder(tmp_path: Path) -> None:
    stored = {"task": {"path": "/data/my, own.jsonl", "answer_field": "answer"}}
    run = run_with(tmp_path, ["+task.path=own.jsonl", "task.answer_field=answer"], stored)
    assert saved_overrides(run, []) == ["+task.path='/data/my, own.jsonl'", "task.answer_field=answer"]


def test_a_server_of_the_runs_sweep_has_ended(tmp_path: Path) -> None:
    of_run = ["generation=vllm_server", "generation.base_url=[http://127.0.0.1:1]"]
    run = run_with(tmp_path, [*of_run, f"generation.api_key=${{oc.env:{SWEEP_KEY}}}"])
    assert saved_overrides(run, []) == of_run[:1]
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(of_run))
    assert saved_overrides(run, []) == of_run, "a server of somebody's own may still be there"
