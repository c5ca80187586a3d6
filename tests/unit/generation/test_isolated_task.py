"""The task as a run sees it whose scores come from other processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from offline_grpo.generation.scoring import isolated
from offline_grpo.generation.scoring.isolated import IsolatedTask
from offline_grpo.settings import ScoringConfig


class Answers:
    """In place of processes that score."""

    async def answer(self, problem, text):
        return {"reward": 1.0, "is_correct": True, "parts": {}, "measured": {}}


def test_code_of_rewards_that_is_edited_under_way_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolated, "LOOK_INTERVAL_S", 0.0)
    edited, other = tmp_path / "a_reward.py", tmp_path / "other.py"
    for file in (edited, other):
        file.write_text("1")
    task = IsolatedTask(SimpleNamespace(code_files=(edited, other)), Answers(), ScoringConfig(2, 5.0, 256, 1.0))
    for content in "1122":
        edited.write_text(content)
        assert asyncio.run(task.score(None, "text")).reward == 1.0
    [message] = caplog.messages
    assert message.startswith(f"task.reward: {edited} has been edited")
