"""`offline_grpo.score`: the reward of a completion without a model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from offline_grpo import score
from offline_grpo.errors import ConfigError, ScoreError

REWARDS = """
def brief(completion, answer):
    print("judging", completion)
    return (completion.strip() == answer) - 0.25 * len(completion)


def facts(completion):
    return {"two": 2.0, "\\x1b[31m": 1.0}


def fails(completion):
    raise ValueError(completion)


def rank(completions):
    return [float(len(completions))] * len(completions)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with rewards and rows: 1+1, 2+2 and 3+3."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rewards_to_try.py").write_text(REWARDS)
    rows = ({"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in (1, 2, 3))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def dataset(*rewards: str) -> list[str]:
    return ["task=dataset", "task.path=rows.jsonl", *(f"task.reward={each}" for each in rewards)]


def test_parts_have_their_weights_and_the_reward_stands_alone_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    """3 of 1 character: 1 - 0.25 for the first function; the second one counts half."""
    both = "[rewards_to_try:brief, {fn: rewards_to_try:facts, weight: 0.5}]"
    score.run([*dataset(both), "--row", "1", "4"])
    out, err = capfd.readouterr()
    head, *parts, total, last = out.splitlines()
    assert head == "the completion, train-1, answer 4"
    assert [part.split() for part in parts] == [
        ["brief", "0.75"],
        ["facts/two", "1"],
        ["facts/\\x1b[31m", "0.5"],
    ]
    assert total.split() == ["total", "2.25,", "which", "counts", "as", "right"]
    assert last == "2.25"
    assert "judging 4" in err


def test_a_file_has_completions_of_several_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ['{"completion": "2"}', '{"completion": "4", "row": 1}', '{"completion": "?", "row": 2}', ""]
    (folder / "texts.jsonl").write_text("\n".join([*lines, '{"completion": ""}']))
    score.run([*dataset(), "--file", "texts.jsonl"])
    out = capsys.readouterr().out.splitlines()
    heads = [line for line in out if line.startswith("line")]
    assert heads == [
        "line 1, train-0, answer 2",
        "line 4, train-0, answer 2",
        "line 2, train-1, answer 4",
        "line 3, train-2, answer 6",
    ]
    assert out[-1] == "0.5"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "row 2, is not valid JSONL"),
        ("[]", "row 2, is not a JSON object"),
        ('{"completion": 4}', "row 2, must have a text as completion"),
        ('{"completion": "4", "problem_id": "train-1"}', "row 2, must have a text as completion, and as row the"),
        ('{"completion": "4", "row": 9}', "--row=9: the task has 3 problems"),
    ],
)
def test_a_line_that_is_wrong_is_named(folder: Path, line: str, said: str) -> None:
    (folder / "texts.jsonl").write_text('{"completion": "2"}\n' + line)
    with pytest.raises(ConfigError) as error:
        score.run([*dataset(), "--file", "texts.jsonl"])
    assert said in str(error.value)


def test_completions_of_one_row_are_a_group() -> None:
    both = [*dataset("rewards_to_try:brief"), "task.group_reward=rewards_to_try:rank"]
    found = score.scores(both, ["6", "no"], row=2)
    assert [each.parts for each in found] == [{"brief": 0.75, "rank": 2.0}, {"brief": -0.5, "rank": 2.0}]


def test_a_text_alone_is_no_episode(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ScoreError, match="completions have no reward"):
        score.run(["task=environment", "task.environment=worlds:Talk", "task.path=rows.jsonl", "x"])
    assert "train-0 is played in turns; a text alone has no score" in capsys.readouterr().out


def test_without_a_reward_the_last_line_is_nan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ScoreError, match="completions have no reward"):
        score.run([*dataset("rewards_to_try:fails"), "x\x1b[31m"])
    *_, why, last = capsys.readouterr().out.splitlines()
    assert last == "nan"
    assert why.startswith("  no reward: raised: ValueError: x\\x1b[31m (rewards_to_try.py, line 12, in fails)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "TEXT='': the last word must be the completion"),
        (dataset(), "TEXT=task.path=rows.jsonl: the last word must be the completion"),
        ([*dataset(), "--row", "3", "x"], "--row=3: the task has 3 problems, 0 to 2"),
        ([*dataset(), "--row=-1", "x"], "--row=-1: the task has 3 problems, 0 to 2"),
        ([*dataset(), "--file", "none.jsonl"], "--file=none.jsonl: is no file"),
    ],
)
def test_what_cannot_be_scored_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        score.run(words)
    assert said in str(error.value)


def test_texts_that_look_like_something_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A negative number, a sum, and what comes by a pipe: here half a character."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"task=2 \xf0\x9f")))
    for words in (["-2"], ["1+1=2"], ["-"]):
        score.run([*dataset("rewards_to_try:brief"), *words])
    assert [line for line in capsys.readouterr().out.splitlines() if line[0] in "-0123456789"] == [
        "-0.5",
        "-1.25",
        "-2",
    ]


def test_torch_is_not_imported() -> None:
    program = "import sys; from offline_grpo import score; score.run(['22']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1.1"
