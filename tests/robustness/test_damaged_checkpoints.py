"""Every file of a checkpoint, damaged in a dozen ways: noticed and named; and where the manifest was made to fit, one
line and no code.
"""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import config_of
from children import metrics_of, weights_of
from damage import DAMAGES
from factories import compose_config, make_updater

from offline_grpo.checkpoint.checkpointer import Checkpointer
from offline_grpo.checkpoint.files import newest_sound, verified_state
from offline_grpo.checkpoint.manifest import write_manifest
from offline_grpo.checkpoint.pretrained import find_model
from offline_grpo.errors import CheckpointError, GrpoError
from offline_grpo.model.char_tokenizer import build_char_tokenizer
from offline_grpo.report import plots
from offline_grpo.run import app
from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.milestones import Milestones
from offline_grpo.train.push_schedule import PushSchedule

MANIFEST = "trainer/manifest.json"
FILES = [
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("trainer/masters.safetensors", "trainer/served.safetensors", "trainer/optimizer.pt", "trainer/state.json"),
]
CASES = [(file, damage) for file in FILES for damage in DAMAGES]
QUICK = [case for index, case in enumerate(CASES) if index % 7 == 0]


def checkpointer_of(folder: Path, updater):
    shared = {
        "policy": updater.policy,
        "updater": updater,
        "ranks": updater.ranks,
        "source": SimpleNamespace(state_dict=dict),
    }
    schedule, milestones = PushSchedule(3), Milestones(None, StopWhenConfig("pass@1", None, None))
    config = config_of(precision="bf16")
    return Checkpointer(
        **shared,
        folder=folder,
        schedule=schedule,
        milestones=milestones,
        config=config,
        keep_last_k=None,
        format="full",
    )


def trainer_of(folder: Path):
    updater = make_updater(folder, dtype=torch.bfloat16, precision="bf16")
    updater.policy.tokenizer = build_char_tokenizer(64)
    return checkpointer_of(folder / "checkpoints", updater)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A run folder with two checkpoints, whose last has served weights of its own."""
    folder = tmp_path_factory.mktemp("written")
    checkpointer = trainer_of(folder)
    updater = checkpointer.updater
    for iteration in range(2):
        if iteration == 0:
            checkpointer.schedule.pushed(updater.policy, 0)
        for parameter in updater.policy.masters.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        updater.optimizer.step()
        updater.policy.masters.publish()
        updater.counters.num_updates += 1
        checkpointer.write(iteration).commit()
    names = {
        str(path.relative_to(folder / "checkpoints" / "iter_001"))
        for path in folder.glob("checkpoints/iter_001/**/*")
        if path.is_file()
    }
    assert {*FILES, MANIFEST} <= names
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("file", [*FILES, MANIFEST])
def test_damage_is_noticed_and_the_checkpoint_before_is_used(file: str, written: Path, tmp_path: Path) -> None:
    """All files and all ways, in the default tier: nothing is loaded for it."""
    for name, damage in DAMAGES.items():
        run = tmp_path / name
        shutil.copytree(written, run)
        sound, damaged = (run / "checkpoints" / f"iter_{iteration:03d}" for iteration in range(2))
        before = (damaged / file).read_bytes()
        damage(damaged / file, random.Random(f"{file} {name}"))
        if (damaged / file).is_file() and name != "an endless device" and (damaged / file).read_bytes() == before:
            continue  # a block of zeros that were zeros
        found = newest_sound(run / "checkpoints")
        assert found is not None, name
        assert found[0] == sound, name
        for ask in (lambda damaged=damaged: verified_state(damaged), lambda damaged=damaged: find_model(str(damaged))):
            with pytest.raises(CheckpointError, match=r"iter_001: [^\n]*; the newest sound one is .*iter_000$"):
                ask()
        shutil.rmtree(run)


def load_all(checkpoint: Path, checkpointer: Checkpointer) -> None:
    """What `resume`, `evaluate`, `sample` and `export` load."""
    source = find_model(str(checkpoint))
    source.tokenizer()
    source.load(device=torch.device("cpu"))
    checkpointer.restore(checkpoint)


def loads_or_is_one_line(file: str, name: str, run: Path) -> None:
    checkpoint = run / "checkpoints" / "iter_001"
    shutil.rmtree(checkpoint.with_name("iter_000"))
    DAMAGES[name](checkpoint / file, random.Random(f"{file} {name}"))
    with suppress(OSError):  # there is no manifest with a pipe in it
        write_manifest(checkpoint)
    line = ""
    try:
        load_all(checkpoint, trainer_of(run))
    except GrpoError as error:
        line = str(error)
    assert line == "" or (str(run) in line and "\n" not in line)


@pytest.mark.parametrize(("file", "name"), QUICK)
def test_with_a_manifest_that_fits_it_loads_or_is_one_line(file: str, name: str, run: Path) -> None:
    loads_or_is_one_line(file, name, run)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "name"), [case for case in CASES if case not in QUICK])
def test_all_others_with_a_manifest_that_fits_load_or_are_one_line(file: str, name: str, run: Path) -> None:
    loads_or_is_one_line(file, name, run)


TINY = (
    *(
        "num_threads=1",
        "train.iterations=3",
        "data.problems_per_iteration=2",
        "data.rollouts_per_problem=2",
        "data.num_train_seeds=20",
    ),
    *(
        "eval.enabled=false",
        "checkpoint.save_interval=1",
        "generation.max_new_tokens=4",
        "train.drop_zero_signal_groups=false",
    ),
    *("model.tiny.warm_start_steps=5", "model.tiny.hidden_size=32", "task.format_weight=0.5"),
)


def test_a_run_goes_on_from_the_newest_sound_checkpoint_to_the_same_end(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(plots, "save_report", lambda history: None)
    overrides = (*TINY, f"cache_dir={tmp_path}/cache")
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    app.run(compose_config(*overrides), whole)
    shutil.copytree(whole, damaged)
    DAMAGES["one bit"](damaged / "checkpoints" / "iter_002" / "trainer" / "optimizer.pt", random.Random(0))
    with pytest.raises(
        CheckpointError,
        match=r"iter_002: is damaged: trainer/optimizer.pt has changed .*; the newest sound one is .*iter_001",
    ):
        app.run(compose_config(*overrides, f"resume={damaged}/checkpoints/iter_002"), tmp_path / "fresh")
    capsys.readouterr()
    app.run(compose_config(*overrides, f"resume={damaged}"), tmp_path / "fresh")
    printed = capsys.readouterr().out
    assert (
        f"iter_002: is damaged: trainer/optimizer.pt has changed since it was written; using {damaged}/checkpoints/iter_001"
        in printed
    )
    assert "going on after iteration 2 of 3" in printed
    assert weights_of(damaged) == weights_of(whole)
    assert metrics_of(damaged) == metrics_of(whole)
    assert verified_state(damaged / "checkpoints" / "iter_002").iteration == 2
    DAMAGES["one bit"](damaged / "checkpoints" / "iter_002" / "model.safetensors", random.Random(0))
    for key in ("model.train_id", "model.ref_id"):
        with pytest.raises(CheckpointError, match=rf"^{key}=.*iter_002: is damaged: model.safetensors has changed"):
            app.run(
                compose_config(*overrides, "train.kl_coef=0.1", f"{key}={damaged}/checkpoints/iter_002"),
                tmp_path / "fresh",
            )
