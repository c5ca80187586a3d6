"""A changed checkpoint is noticed before anything is loaded from it, and an older sound one is used."""

import json
import os
import shutil
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, state_of

from offline_grpo.checkpoint.files import (
    MANIFEST,
    check_model_folder,
    find_damage,
    latest_state,
    newest_sound,
    verified_state,
)
from offline_grpo.checkpoint.pretrained import find_model
from offline_grpo.checkpoint.state import FILE, read_state
from offline_grpo.errors import CheckpointError
from offline_grpo.train.milestones import Watch

STATE = state_of(3, milestones={"keep_best": Watch("pass@1", 0.5, 2, 0.4, 1)}, source={"queue": [1, 2.5, "x", None]})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_state(make_checkpoint(tmp_path / "my_best", STATE)) == STATE


@pytest.mark.parametrize("content", ["", "[]", '{"format": 5}', '{"format": 5, "counters": {"x": 1}}'])
def test_a_state_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "iter_003", STATE)
    (folder / FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"resume=.*iter_003: its trainer/state.json is damaged \("):
        read_state(folder)
    (folder / FILE).write_text('{"format": 4}')
    with pytest.raises(CheckpointError, match="written in format 4, this version reads format 5"):
        read_state(folder)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoints" / "iter_000"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    (folder / "sub" / "vocab.txt").write_text("a")
    return make_checkpoint(folder)


def test_the_manifest_has_every_other_file_with_the_hash_that_sha256sum_prints(checkpoint):
    record = json.loads((checkpoint / MANIFEST).read_text())["files"]
    assert record.keys() == {"model.safetensors", "sub/vocab.txt", "trainer/state.json"}
    assert record["sub/vocab.txt"] == {
        "bytes": 1,
        "sha256": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
    }
    assert find_damage(checkpoint) is None


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "one bit": (flip, "has changed since it was written"),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes and was written with"),
    "gone": (lambda path: path.unlink(), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["model.safetensors", "sub/vocab.txt"])
def test_damage_is_named_with_its_file(damage, name, checkpoint):
    do, words = DAMAGE[damage]
    do(checkpoint / name)
    found = find_damage(checkpoint)
    assert found is not None
    assert name in found
    assert words in found


@pytest.mark.parametrize("content", ["", "[]", '{"files": {"a": 1}}'])
def test_a_damaged_manifest_is_damage(content, checkpoint):
    (checkpoint / MANIFEST).write_text(content)
    assert find_damage(checkpoint) is not None


def test_a_model_to_start_from_may_have_more_files_but_no_damage(checkpoint, tmp_path):
    check_model_folder(str(tmp_path), "model.train_id")  # of somebody else
    check_model_folder("org/model", "model.train_id")
    (checkpoint / "chat_template.jinja").touch()
    flip(checkpoint / "trainer" / "state.json")  # which such a run does not read
    check_model_folder(str(checkpoint), "model.train_id")
    flip(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"^model.train_id={checkpoint}: is damaged: .*has changed"):
        check_model_folder(str(checkpoint), "model.train_id")


@pytest.fixture
def run(tmp_path):
    for iteration in range(3):
        folder = tmp_path / "checkpoints" / f"iter_{iteration:03d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        make_checkpoint(folder, state_of(iteration))
    return tmp_path


def test_the_newest_sound_checkpoint_is_used_and_the_damaged_ones_are_named(run, caplog):
    checkpoints = run / "checkpoints"
    flip(checkpoints / "iter_002" / "model.safetensors")
    (checkpoints / "iter_001" / "trainer" / "state.json").unlink()
    state = latest_state(checkpoints)
    assert state is not None
    assert state.iteration == 2, "its own file is sound"
    assert newest_sound(checkpoints) == (checkpoints / "iter_000", state_of(0))
    first, second = (record.getMessage() for record in caplog.records)
    assert "iter_002: is damaged: model.safetensors has changed since it was written" in first
    assert "iter_001: no readable trainer/state.json (No such file or directory)" in second
    for name, key in ((run / "checkpoints" / "iter_002", "resume"), (run, "MODEL")):
        with pytest.raises(CheckpointError, match=rf"{key}=.*iter_002: is damaged"):
            verified_state(name) if key == "resume" else find_model(str(name))


def test_without_a_sound_one_it_is_one_line(run):
    for path in (run / "checkpoints").glob("iter_*/model.safetensors"):
        flip(path)
    with pytest.raises(CheckpointError, match=r"iter_002: is damaged: .*; no checkpoint in .* is sound$"):
        newest_sound(run / "checkpoints")
    shutil.rmtree(run / "checkpoints")
    assert newest_sound(run / "checkpoints") is None
