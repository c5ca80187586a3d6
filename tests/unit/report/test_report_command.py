"""`python -m offline_grpo.report FOLDER`: the table of any run or sweep, and one line for anything else."""

import io
import json
import shutil
from pathlib import Path

import pytest
import rich
import yaml
from rich.console import Console

from offline_grpo.report.__main__ import main


@pytest.fixture(autouse=True)
def to_a_file(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the command prints; a file has 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    stream = io.StringIO()
    monkeypatch.setattr(rich, "get_console", lambda: Console(file=stream, width=200))
    return stream


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A run of ten iterations that was killed in its second, while a file was being written."""
    run = tmp_path / "time" / "0"
    (run / "metrics").mkdir(parents=True)
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(["seed=0"]))
    (run / ".hydra" / "config.yaml").write_text(yaml.safe_dump({"train": {"iterations": 10}}))
    for name, metrics in {
        "eval_init": {"pass@1": 0.25},
        "train_iter_000": {"reward_mean": 0.5, "time/train_s": 3.0},
    }.items():
        (run / "metrics" / f"{name}.json").write_text(json.dumps(metrics))
    (run / "metrics" / ".train_iter_001.json.tmp").write_text('{"rew')
    return run


def test_a_killed_run_has_its_table_and_picture(killed: Path, to_a_file: io.StringIO) -> None:
    assert main([str(killed)]) == 0
    lines = to_a_file.getvalue().splitlines()
    assert lines[0] == "1 training iteration, 1 evaluation"
    assert [line.split()[0] for line in lines[2:5]] == ["pass@1", "training", "time"]
    assert [line.split() for line in lines[-2:]] == [
        ["report", f"{killed}/report.png"],
        ["page", f"{killed}/report.html"],
    ]
    assert (killed / "report.png").stat().st_size > 10_000


def test_the_folder_of_a_sweep_has_its_table(killed: Path, to_a_file: io.StringIO) -> None:
    assert main([str(killed.parent)]) == 0
    assert "run 0: stopped at 1/10" in to_a_file.getvalue()
    assert all(len(line) <= 80 or str(killed.parent) in line for line in to_a_file.getvalue().splitlines())


@pytest.mark.parametrize("kept", ["overrides.yaml", "config.yaml"])
def test_a_run_without_metrics_is_no_sweep(killed: Path, kept: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(killed / "metrics")
    for path in (killed / ".hydra").iterdir():
        if path.name != kept:
            path.unlink()
    assert main([str(killed)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {killed}: has no metrics yet")
    assert not list(killed.glob("summary.*"))


def test_options_may_stand_among_folders(killed: Path, to_a_file: io.StringIO, tmp_path: Path) -> None:
    other = shutil.copytree(killed, tmp_path / "other")
    assert main([str(killed), "--out", str(tmp_path / "page.html"), str(other)]) == 0
    assert (tmp_path / "page.html").exists()


def test_anything_else_is_one_line(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(killed.parent / "none")]) == 2
    assert "none: is neither a run" in capsys.readouterr().err
    (killed / "metrics" / "train_iter_001.json").write_text("{")
    assert main([str(killed)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {killed}/metrics/train_iter_001.json: is not JSON (")
