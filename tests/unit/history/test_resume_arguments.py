"""The command line and the configuration of a resumed run."""

import shutil

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from run_folders import make_checkpoint, state_of

from offline_grpo.config.compose import quoted
from offline_grpo.errors import ConfigError
from offline_grpo.history import resume
from offline_grpo.history.folder import RunDir, begin_anew, find_resume_point, released_at_end


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "my run"
    make_checkpoint(path / "checkpoints" / "iter_003", state_of(3))
    (path / ".hydra").mkdir()
    own = ["task=gsm8k", "+new.key=1", "train.lr=1e-4", "resume=auto"]
    (path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(own))
    folders = {"main": "conf", "command-line": "/my/conf", "hydra.searchpath in command-line": "/more"}
    sources = [{"path": path, "provider": provider, "schema": "file"} for provider, path in folders.items()]
    record = {"runtime": {"config_sources": sources}}
    (path / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": record}))
    return path


@pytest.mark.parametrize("part", ["", "checkpoints/iter_003"])
def test_the_own_overrides_come_before_the_typed_ones(run, part):
    words = resume.arguments([f"resume='{run / part}'", "train.lr=1e-5", "--hydra-x", "+new.key=2"])
    assert words == [
        *("task=gsm8k", "hydra.searchpath=[file:///my/conf,file:///more]"),
        *("train.lr=1e-5", "+new.key=2", f"resume='{run / part}'", f"hydra.run.dir='{run}'", "--hydra-x"),
    ]
    words = resume.arguments(["hydra.searchpath=[/other]", f"resume='{run}'"])
    assert [word for word in words if "searchpath" in word] == ["hydra.searchpath=[/other]"]


@pytest.mark.parametrize("words", [["train.lr=1"], ["resume=auto"], ["resume=null", "--info"]])
def test_any_other_command_line_stays_as_it_is(words):
    assert resume.arguments(words) == words


def test_an_older_checkpoint_starts_in_a_new_folder(run):
    make_checkpoint(run / "checkpoints" / "iter_005", state_of(5))
    assert not [word for word in resume.arguments([f"resume='{run}/checkpoints/iter_003'"]) if "run.dir" in word]
    assert f"hydra.run.dir='{run}'" in resume.arguments([f"resume='{run}/checkpoints/iter_005'"])


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_the_beginning(run, tmp_path, capsys):
    shutil.rmtree(run / "checkpoints")
    stored = run / ".hydra" / "config.yaml"
    stored.write_text("checkpoint: {enabled: true}")
    words = resume.arguments([f"resume='{run}'", "train.lr=1e-5"])
    assert words[0] == "task=gsm8k"
    assert words[-3:] == ["train.lr=1e-5", f"resume='{run}'", f"hydra.run.dir='{run}'"]
    assert "has no checkpoint yet; it starts from the beginning" in capsys.readouterr().out
    (run / "metrics").mkdir()
    (run / "metrics" / "train_iter_000.json").touch()
    with released_at_end():
        assert find_resume_point(str(run), RunDir(run), {}) is None
    begin_anew(RunDir(run))
    assert not any(RunDir(run).records())
    assert not stored.exists(), "the run writes its new one"
    for is_enabled, name in ((False, "nothing"), (True, "report.png")):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(yaml.safe_dump({"checkpoint": {"enabled": is_enabled}}))
        (run / name).touch()
        with pytest.raises(ConfigError, match=r"no checkpoint found"):
            resume.arguments([f"resume='{run}'"])


def test_auto_in_the_folder_of_a_run_is_its_path(run, tmp_path):
    """So that a scheduler's command finds its own run, with the configuration that it stored."""
    words = resume.arguments(["resume=auto", f"hydra.run.dir='{run}'", "task=gsm8k"])
    assert words[-4:] == [f"hydra.run.dir='{run}'", "task=gsm8k", f"resume='{run}'", f"hydra.run.dir='{run}'"]
    words = ["resume=auto", f"hydra.run.dir={tmp_path}/new"]
    assert resume.arguments(words) == words


def test_what_cannot_be_resumed_is_refused_before_torch_is_loaded(run, tmp_path):
    with pytest.raises(ConfigError, match=rf"^resume={tmp_path}: no checkpoint found; use a run folder"):
        resume.arguments(["train.lr=1", f"resume={tmp_path}"])
    with pytest.raises(ConfigError, match=rf"^resume={run}: is one run, whose folder all jobs of --multirun"):
        resume.arguments(["-m", f"resume='{run}'", "train.lr=1e-4,1e-2"])


def test_only_what_was_typed_changes_the_stored_configuration():
    before = {
        "train": {"lr": 2, "iterations": 100, "added": 5},
        "eval": {"n": "${train.lr}"},
        "loss": {"_target_": "a.A", "clip": 1},
    }
    stored = {
        "train": {"lr": 1, "iterations": 400},
        "eval": {"n": "${train.lr}"},
        "loss": {"_target_": "a.A", "clip": 3, "gone": 1},
    }
    now = {**before, "train": {"lr": 2, "iterations": 800, "added": 5}}
    assert resume.merged(stored, before, now, {"train.iterations"}) == {
        **stored,
        "train": {"lr": 1, "iterations": 800, "added": 5},  # the default of lr has changed since; `added` did not exist
    }
    # a typed value counts even where it is today's default; another component is taken as a whole
    other = {**before, "loss": {"_target_": "b.B", "beta": 1}}
    found = resume.merged(stored, before, other, {"train.lr"})
    assert (found["train"]["lr"], found["loss"]) == (2, {"_target_": "b.B", "beta": 1})
    # a deleted component
    without = {name: value for name, value in before.items() if name != "loss"}
    assert "loss" not in resume.merged(stored, before, without, {"loss"})


PLAIN = ["/home/me/outputs/2026-01-31/12-00-00", "a.b:c+d@e%f", "trueish", "1/2"]
HOSTILE = ["/home/jürgen/run", " a", "a,b", "a=b", "[a]", "f(x)", "~a", "a#b", "NULL", "12", "1e3", "inf"]
HOSTILE += ["it's", 'say "a"', "a\\b", "a\\\\b", "a\\", "\\'", "a\\'b\\\\'c\\", "''"]


def test_hydra_reads_a_folder_as_it_is():
    for text in (*PLAIN, *HOSTILE):
        value = OverridesParser.create().parse_override(f"resume={quoted(text)}").value()
        assert (type(value), value) == (str, text)
        assert (quoted(text) == text) == (text in PLAIN)
