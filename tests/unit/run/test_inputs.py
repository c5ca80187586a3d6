"""Other rows, or other code of rewards, in the place that the configuration names."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from factories import compose_config

from offline_grpo.run import going_on, inputs
from offline_grpo.run.config import typed
from offline_grpo.run.run_dir import RunDir
from offline_grpo.run.task_data import task_data
from offline_grpo.task.mixture import Mixture

REWARD = "def score(completion):\n    return 1.0\n"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A start of a run as it is recorded: what it says about its inputs beforehand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_reward", raising=False)
    (tmp_path / "a_reward.py").write_text(REWARD)
    (tmp_path / "run" / ".hydra").mkdir(parents=True)

    def start(*overrides: str, changed: tuple[str, ...] = ()) -> list[str]:
        cfg = compose_config("task=dataset", "task.path=rows.jsonl", *overrides)
        found = inputs.hashes(task_data(typed(cfg)))
        lines = inputs.describe_other(tmp_path / "run", found, changed)
        going_on.record(RunDir(tmp_path / "run"), cfg, [], None, None, found)
        return lines

    return start


def write_rows(number: int, **more: object) -> None:
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), **more} for i in range(number)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_other_rows_in_the_same_place_are_told_once(start) -> None:
    for more in ({}, {"level": 1}, {"level": 2}):
        write_rows(20, **more)
        told = start()
        assert (
            (not told)
            if not more
            else told[0].startswith("task.path=rows.jsonl: its content has changed since this run was started last")
        )
        assert start() == []
    write_rows(21)
    assert start("task.eval_frac=0.5", changed=("task.eval_frac",)) == [], "other settings of the task are told as such"


def test_how_many_of_the_rows_are_used_does_not_matter(start) -> None:
    write_rows(20)
    assert start() == []
    assert start("data.num_train_seeds=4", "eval.num_ids=1") == []


def test_other_code_of_rewards_is_told(start, tmp_path: Path) -> None:
    write_rows(20)
    words = ("task.reward=a_reward:score", "task.answer_field=null")
    assert start(*words) == start(*words) == []
    (tmp_path / "a_reward.py").write_text(REWARD.replace("1.0", "0.5"))
    [line] = start(*words)
    assert line.startswith(f"task.reward ({tmp_path}/a_reward.py): its content has changed")


def test_those_of_a_mixture_are_looked_at(start) -> None:
    write_rows(20)
    cfg = compose_config("task=dataset", "task.path=rows.jsonl", "task.reward=a_reward:score")
    alone = task_data(typed(cfg))
    found = inputs.hashes(alone)
    assert len(found) == 2
    assert inputs.hashes(replace(alone, task=Mixture(tasks={"one": alone.task}, weights=None))) == found


def test_a_record_that_was_cut_off_stops_nothing(start, tmp_path: Path) -> None:
    write_rows(20)
    (tmp_path / "run" / ".hydra" / "starts.yaml").write_text("- time: '2026-")
    assert inputs.describe_other(tmp_path / "run", {"task.path=rows.jsonl": "a"}, ()) == []
