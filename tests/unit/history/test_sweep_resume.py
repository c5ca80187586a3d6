"""Which sweep `resume` means, with which overrides it goes on, and what is refused."""

from pathlib import Path

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from run_folders import config_of, make_checkpoint, state_of

from offline_grpo.errors import ConfigError
from offline_grpo.history import resume, sweeps

WORDS = ["experiment=smoke", "train.lr=1e-3,1e-4", "seed=0,1"]
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def make_sweep(folder: Path, done: list[int], *, words: list[str] = WORDS, target: str = BASIC) -> Path:
    """A sweep of which the job N has `done[N]` of two iterations."""
    hydra = {
        "overrides": {"task": words, "hydra": ["hydra.mode=MULTIRUN", "hydra.launcher.n_jobs=2"]},
        "sweeper": {"_target_": target, "params": None},
        "runtime": {
            "cwd": str(folder.parent),
            "config_sources": [{"schema": "file", "path": "/my", "provider": "command-line"}],
        },
    }
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").write_text(yaml.safe_dump({"hydra": hydra}))
    for number, num_done in enumerate(done):
        lr, seed = ("0.001", "0.0001")[number // 2], number % 2
        (folder / str(number) / ".hydra").mkdir(parents=True)
        (folder / str(number) / ".hydra" / "overrides.yaml").write_text(
            yaml.safe_dump(["experiment=smoke", f"train.lr={lr}", f"seed={seed}", "resume=auto"])
        )
        state = state_of(num_done - 1, config=config_of(iterations=2))
        make_checkpoint(folder / str(number) / "checkpoints" / f"iter_{num_done - 1:03d}", state)
    return folder


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "multirun" / "2026-01-31"


def test_auto_takes_the_newest_sweep_with_the_same_overrides_finished_or_not(day: Path) -> None:
    make_sweep(day / "09-00-00", [2, 1])
    right = make_sweep(day / "10-00-00", [2, 2, 2, 2])
    make_sweep(day / "12-00-00", [1], words=[*WORDS, "train.iterations=5"])
    make_sweep(day / "13-00-00", [1], words=[WORDS[0], WORDS[2], WORDS[1]])  # other numbers
    typed = ["seed=7", *WORDS, "resume=auto", "hydra.launcher.n_jobs=2"][1:]
    assert sweeps.newest_alike(typed) == right
    words = resume.arguments(["-m", *typed])
    assert words[:4] == [*WORDS, "hydra.launcher.n_jobs=2"]
    assert words[-3:] == ["resume=auto", f"hydra.sweep.dir={right}", "-m"]
    assert resume.arguments(typed) == typed, "no sweep"
    by_hand = resume.arguments(["-m", *typed, f"hydra.sweep.dir={day / '09-00-00'}"])
    assert by_hand[-3:] == ["resume=auto", f"hydra.sweep.dir={day / '09-00-00'}", "-m"], "in its own order"
    new = [*typed, "hydra.sweep.dir=new", "-m"]
    assert resume.arguments(new) == new


def test_a_folder_goes_on_with_its_overrides_and_what_is_typed_on_top(day: Path) -> None:
    sweep = make_sweep(day / "10-00-00", [2, 1])
    words = resume.arguments(["train.iterations=4", f"resume={sweep}", "seed=0,1", "experiment=other"])
    own = ["train.lr=1e-3,1e-4", "seed=0,1", "hydra.launcher.n_jobs=2", "train.iterations=4", "experiment=other"]
    assert words == [*own, "hydra.searchpath=[file:///my]", "resume=auto", f"hydra.sweep.dir={sweep}", "--multirun"]


def test_relative_paths_are_those_of_the_folder_where_the_sweep_was_started(day: Path) -> None:
    sweep = make_sweep(day / "10-00-00", [], words=["task.path=a.jsonl,'b, c.jsonl',owner/name", "model.train_id=gone"])
    for name in ("a.jsonl", "b, c.jsonl"):
        (day / name).touch()
    words = resume.arguments([f"resume={sweep}"])
    assert words[:2] == [f"task.path={day}/a.jsonl,'{day}/b, c.jsonl',owner/name", "model.train_id=gone"]


def test_a_search_is_repeated_if_it_draws_with_a_seed(day: Path) -> None:
    sweep = make_sweep(day / "10-00-00", [2], words=["experiment=search"], target="optuna.OptunaSweeper")
    with pytest.raises(ConfigError, match=r"^resume=.*: this search drew at random"):
        resume.arguments([f"resume={sweep}"])
    record = sweep / "multirun.yaml"
    record.write_text(record.read_text().replace("params: null", "sampler: {seed: 0}"))
    assert resume.arguments([f"resume={sweep}"])[0] == "experiment=search"


@pytest.mark.parametrize("word", ["seed=1", "train.loss.beta=0,0.1"])
def test_what_would_number_the_runs_anew_is_refused(day: Path, word: str) -> None:
    sweep = make_sweep(day / "10-00-00", [2, 1])
    with pytest.raises(
        ConfigError, match=f"^{word.split('=')[0]}: another value would number the runs of {sweep} anew"
    ):
        resume.arguments([f"resume={sweep}", word])


def test_two_jobs_of_a_sweep_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would resume what the first has written."""
    params = {"train.lr": "interval(0, 1)"}
    config = OmegaConf.create(
        {
            "sweep": {"subdir": "lr"},
            "job": {"num": 1},
            "sweeper": {"params": params},
            "overrides": {"task": ["train.lr=0.5", "seed=1"]},
        }
    )
    monkeypatch.setattr(HydraConfig, "get", lambda: config)
    sweeps.check_folder(tmp_path)
    (tmp_path / ".hydra").mkdir()
    stored = tmp_path / ".hydra" / "hydra.yaml"
    stored.write_text("hydra: {job: {num: 1}}")
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[train.lr=0.5, seed=0]")
    sweeps.check_folder(tmp_path)
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[train.lr=0.25, seed=1]")
    with pytest.raises(ConfigError, match=r"^train.lr=0.5: run 1 of this search has train.lr=0.25"):
        sweeps.check_folder(tmp_path)
    stored.write_text("hydra: {job: {num: 0}}")
    with pytest.raises(ConfigError, match=r"^hydra.sweep.subdir=lr: job 0 of the sweep has that folder"):
        sweeps.check_folder(tmp_path)
