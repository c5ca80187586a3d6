"""What a command line that resumes starts: which run or sweep, in which folder, with which configuration."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from factories import compose_config
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from run_folders import make_checkpoint, state_of

from offline_grpo.commands import main
from offline_grpo.config.compose import quoted
from offline_grpo.errors import ConfigError
from offline_grpo.history import sweeps

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
WORDS = ["experiment=smoke", "train.lr=1e-3,1e-4", "seed=0,1"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was started: the words that Hydra gets, or configuration, folder, overrides and typed keys of a run."""
    found: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "run_hydra", lambda words: found.append(words))
    monkeypatch.setattr(main, "_run", lambda *run: found.append(run))
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with dapo, whose stored configuration lacks a key that is new, and has other values than conf/."""
    path, own = tmp_path / "my run", ["train/loss=dapo", "train.lr=1e-4", "resume=auto"]
    config = OmegaConf.to_container(compose_config(*own[:2]))
    assert isinstance(config, dict)
    del config["train"]["grad_clip"]
    config["train"] |= {"iterations": 400}
    config["train"]["loss"]["clip_high"] = 0.5
    (path / ".hydra").mkdir(parents=True)
    runtime = {"choices": {"train/loss": "dapo", "task": "arithmetic"}, "config_sources": []}
    for name, content in {"config": config, "overrides": own, "hydra": {"hydra": {"runtime": runtime}}}.items():
        (path / ".hydra" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    make_checkpoint(path / "checkpoints" / "iter_003", state_of(3))
    return path


@pytest.mark.parametrize("part", ["", "checkpoints/iter_003"])
def test_a_run_goes_on_with_its_own_configuration_and_what_is_typed_on_top(
    run: Path, part: str, started: list[Any]
) -> None:
    main.start([f"resume='{run / part}'", "train.iterations=800", "task=arithmetic", "train.loss.clip_low=0.3"])
    [(cfg, folder, overrides, typed)] = started
    assert folder == run
    assert cfg.train.loss._target_.endswith("DAPO")
    assert (cfg.train.lr, cfg.train.loss.clip_high, cfg.train.iterations) == (1e-4, 0.5, 800)
    assert cfg.train.grad_clip == compose_config().train.grad_clip, "new since the run began"
    assert overrides == ["train/loss=dapo", "train.lr=1e-4", "train.iterations=800", "train.loss.clip_low=0.3"]
    assert {"resume", "train.iterations"} <= typed
    stored = (run / ".hydra" / "config.yaml").read_text()
    assert "${generation.max_new_tokens}" in stored
    assert OmegaConf.to_container(cfg, resolve=False)["eval"]["max_new_tokens"] == "${generation.max_new_tokens}"  # type: ignore[call-overload, index]
    main.start([f"resume='{run}'", "logger=[json]"])
    assert list(started[1][0].logger) == ["json"], "loggers may be others from now on"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train/loss=grpo", r"^train/loss=grpo: a resumed run keeps its groups; .*train_id=.*iter_003 train/loss"),
        ("resume=nowhere", r"^resume=nowhere: no checkpoint found; use a run folder"),
        ("-m", r"^resume=.*: is one run, whose folder all jobs of --multirun"),
    ],
)
def test_what_cannot_be_resumed_is_refused(word: str, message: str, run: Path, started: list[Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        main.start([f"resume='{run}'", word])
    assert not started


def test_an_older_checkpoint_starts_in_a_new_folder(run: Path, started: list[Any]) -> None:
    make_checkpoint(run / "checkpoints" / "iter_005", state_of(5))
    for number in (3, 5):
        main.start([f"resume='{run}/checkpoints/iter_00{number}'"])
    older, newest = (folder for _, folder, *_ in started)
    assert older.parts[0] == "outputs"
    assert newest == run


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_the_beginning(
    run: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints").rename(run / "others")
    main.start([f"resume='{run}'", "train.lr=1e-5"])
    assert (started[0][1], started[0][0].train.lr) == (run, 1e-5)
    assert "has no checkpoint yet; it starts from the beginning" in capsys.readouterr().out
    (run / "report.png").touch()
    with pytest.raises(ConfigError, match=r"no checkpoint found"):
        main.start([f"resume='{run}'"])


def test_auto_in_the_folder_of_a_run_is_its_path(run: Path, started: list[Any], tmp_path: Path) -> None:
    """So that a scheduler's command finds its own run, with the configuration that it stored."""
    main.start(["resume=auto", f"hydra.run.dir='{run}'", "train/loss=dapo"])
    assert started[0][1] == run
    words = ["resume=auto", f"hydra.run.dir={tmp_path}/new"]
    main.start(words)
    main.start(["train.lr=1", "--info"])
    assert started[1:] == [words, ["train.lr=1", "--info"]]


PLAIN = ["/home/me/outputs/2026-01-31/12-00-00", "a.b:c+d@e%f", "trueish", "1/2"]
HOSTILE = ["/home/jürgen/run", " a", "a,b", "a=b", "[a]", "f(x)", "~a", "a#b", "NULL", "12", "1e3", "inf"]
HOSTILE += ["it's", 'say "a"', "a\\b", "a\\\\b", "a\\", "\\'", "a\\'b\\\\'c\\", "''"]


def test_hydra_reads_a_folder_as_it_is() -> None:
    for text in (*PLAIN, *HOSTILE):
        value = OverridesParser.create().parse_override(f"resume={quoted(text)}").value()
        assert (type(value), value) == (str, text)
        assert (quoted(text) == text) == (text in PLAIN)


def make_sweep(folder: Path, *, words: list[str] = WORDS, target: str = BASIC, **sweeper: Any) -> Path:
    hydra = {
        "overrides": {"task": words, "hydra": ["hydra.mode=MULTIRUN", "hydra.launcher.n_jobs=2"]},
        "sweeper": {"_target_": target, "params": None, **sweeper},
        "runtime": {
            "cwd": str(folder.parent),
            "config_sources": [{"schema": "file", "path": "/my", "provider": "command-line"}],
        },
    }
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").write_text(yaml.safe_dump({"hydra": hydra}))
    return folder


def test_auto_takes_the_newest_sweep_with_the_same_overrides(tmp_path: Path, started: list[Any]) -> None:
    day = tmp_path / "multirun" / "2026-01-31"
    older, right = make_sweep(day / "09-00-00"), make_sweep(day / "10-00-00")
    make_sweep(day / "12-00-00", words=[*WORDS, "train.iterations=5"])
    make_sweep(day / "13-00-00", words=[WORDS[0], WORDS[2], WORDS[1]])  # other numbers
    typed = [*WORDS, "resume=auto", "hydra.launcher.n_jobs=2"]
    main.start(["-m", *typed])
    assert started[-1][:4] == [*WORDS, "hydra.launcher.n_jobs=2"]
    assert started[-1][-3:] == ["resume=auto", f"hydra.sweep.dir={right}", "-m"]
    main.start(["-m", *typed, f"hydra.sweep.dir={older}"])
    assert started[-1][-2:] == [f"hydra.sweep.dir={older}", "-m"]
    for words in (typed, [*typed, "hydra.sweep.dir=new", "-m"]):
        main.start(words)
        assert started[-1] == words


def test_a_sweep_goes_on_with_its_overrides_and_what_is_typed_on_top(tmp_path: Path, started: list[Any]) -> None:
    """Its relative paths are those of the folder where it was started."""
    for name in ("a.jsonl", "b, c.jsonl"):
        (tmp_path / "far" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "far" / name).touch()
    sweep = make_sweep(tmp_path / "far" / "sweep", words=[*WORDS, "task.path=a.jsonl,'b, c.jsonl',owner/name"])
    main.start(["train.iterations=4", f"resume={sweep}", "seed=0,1"])
    path = f"task.path={tmp_path}/far/a.jsonl,'{tmp_path}/far/b, c.jsonl',owner/name"
    own = [*WORDS, path, "hydra.launcher.n_jobs=2", "train.iterations=4", "hydra.searchpath=[file:///my]"]
    assert started == [[*own, "resume=auto", f"hydra.sweep.dir={sweep}", "-m"]]
    for word in ("seed=1", "train.loss.beta=0,0.1"):
        with pytest.raises(ConfigError, match=f"^{word.split('=')[0]}: another value would number the runs of"):
            main.start([f"resume={sweep}", word])


def test_a_search_is_repeated_if_it_draws_with_a_seed(tmp_path: Path, started: list[Any]) -> None:
    random = make_sweep(tmp_path / "1", words=["experiment=search"], target="optuna.OptunaSweeper")
    with pytest.raises(ConfigError, match=r"^resume=.*: this search drew at random"):
        main.start([f"resume={random}"])
    seeded = make_sweep(tmp_path / "2", words=["experiment=search"], target="optuna.OptunaSweeper", sampler={"seed": 0})
    main.start([f"resume={seeded}"])
    assert started[0][0] == "experiment=search"


def test_two_jobs_of_a_sweep_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would resume what the first has written."""
    config = OmegaConf.create(
        {
            "sweep": {"subdir": "lr"},
            "job": {"num": 1},
            "sweeper": {"params": {"train.lr": "interval(0, 1)"}},
            "overrides": {"task": ["train.lr=0.5", "seed=1"]},
        }
    )
    monkeypatch.setattr(HydraConfig, "get", lambda: config)
    sweeps.check_folder(tmp_path)
    (tmp_path / ".hydra").mkdir()
    for number, words, message in (
        (1, "[train.lr=0.5, seed=0]", None),
        (1, "[train.lr=0.25, seed=1]", r"^train.lr=0.5: run 1 of this search has train.lr=0.25"),
        (0, "[train.lr=0.5, seed=0]", r"^hydra.sweep.subdir=lr: job 0 of the sweep has that folder"),
    ):
        (tmp_path / ".hydra" / "hydra.yaml").write_text(f"hydra: {{job: {{num: {number}}}}}")
        (tmp_path / ".hydra" / "overrides.yaml").write_text(words)
        if message is None:
            sweeps.check_folder(tmp_path)
        else:
            with pytest.raises(ConfigError, match=message):
                sweeps.check_folder(tmp_path)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python /venv/bin/accelerate launch --num_processes 2 run_grpo.py train.lr=1", 2),
        ("python /venv/bin/accelerate-launch --cpu --num-processes=3 run_grpo.py", 3),
        ("python /venv/bin/accelerate launch run_grpo.py", 1),
        ("python run_grpo.py --num_processes 2", 1),
    ],
)
def test_processes_that_accelerate_was_asked_for_and_did_not_start(
    command: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = SimpleNamespace(cmdline=command.split)
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(parent=lambda: parent))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started: list[list[str]] = []
    monkeypatch.setattr("torch.distributed.run.main", started.append)
    with pytest.raises(SystemExit) if expected > 1 else nullcontext():
        main.start_missing_processes()
    assert [words[words.index("--nproc_per_node") + 1] for words in started] == [str(expected)] * (expected > 1)
