"""`python -m offline_grpo.report FOLDER...`: the table of any run or sweep, and one line for anything else."""

import io
import json
import re
from pathlib import Path

import pytest
import rich
import yaml
from rich.console import Console
from run_folders import make_run

from offline_grpo.report import page
from offline_grpo.report.__main__ import main


@pytest.fixture(autouse=True)
def to_a_file(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the command prints; a file has 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(page, "_plotly", lambda: "")
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
    (run / "metrics" / "eval_init.json").write_text(json.dumps({"pass@1": 0.25}))
    (run / "metrics" / "train_iter_000.json").write_text(json.dumps({"reward_mean": 0.5, "time/train_s": 3.0}))
    (run / "metrics" / ".train_iter_001.json.tmp").write_text('{"rew')
    return run


def test_a_killed_run_and_its_sweep_have_table_picture_and_page(killed: Path, to_a_file: io.StringIO) -> None:
    assert main([str(killed)]) == 0
    lines = to_a_file.getvalue().splitlines()
    assert lines[0] == "1 training iteration, 1 evaluation"
    assert [line.split()[0] for line in lines[2:5]] == ["pass@1", "training", "time"]
    written = [["report", f"{killed}/report.png"], ["page", f"{killed}/report.html"]]
    assert [line.split() for line in lines[-2:]] == written
    assert all(Path(path).exists() for _, path in written)
    assert main([str(killed.parent)]) == 0
    lines = to_a_file.getvalue().splitlines()
    assert "run 0: stopped at 1/10" in lines
    assert all(len(line) <= 80 or str(killed.parent) in line for line in lines)


def test_several_folders_make_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_a_file: io.StringIO) -> None:
    """Options may stand among them."""
    make_run(tmp_path / "a" / "0", seed=0)
    make_run(tmp_path / "b", seed=1)
    monkeypatch.chdir(tmp_path)
    assert main(["a", "b"]) == 0
    lines = [line.rstrip() for line in to_a_file.getvalue().splitlines()]
    assert lines[0] == "1 configuration, 2 runs, best mean final pass@1 first"
    assert re.match(r"loss=grpo +b a/0  0\.750 ", lines[3])
    assert lines[4] == "report.html"
    assert main(["a", "--out", "b/both.html", "b"]) == 0
    assert Path("report.html").read_bytes() == Path("b/both.html").read_bytes()
