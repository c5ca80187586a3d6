"""A changed checkpoint is noticed before anything is loaded from it, and an older sound one is used."""

import json
import os

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
from offline_grpo.errors import CheckpointError
from offline_grpo.train.milestones import Watch

STATE = state_of(3, milestones={"keep_best": Watch("pass@1", 0.5, 2, 0.4, 1)}, source={"queue": [1, 2.5, "x", None]})


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
