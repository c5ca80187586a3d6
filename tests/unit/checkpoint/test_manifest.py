"""A changed checkpoint is noticed before anything is loaded from it, and an older sound one is used."""

import json
import os
import shutil

import pytest
from checkpoints import make_checkpoint, state_of

from offline_grpo.checkpoint.files import check_model_folder, latest_state, newest_sound, verified_state
from offline_grpo.checkpoint.manifest import FILE, find_damage
from offline_grpo.checkpoint.pretrained import find_model
from offline_grpo.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoints" / "iter_000"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    (folder / "sub" / "vocab.txt").write_text("a")
    return make_checkpoint(folder)


def test_the_manifest_has_every_other_file_with_the_hash_that_sha256sum_prints(checkpoint):
    record = json.loads((checkpoint / FILE).read_text())["files"]
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
    "gone": (lambda path: path.unlink(), "is missing"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is missing"),
    "a link to itself": (lambda path: (path.unlink(), path.symlink_to(path.name)), "cannot be read"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "bytes and was written with"),
    "an endless device": (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "bytes and was written with"),
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


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"files": {}}', b'{"files": {"a": 1}}', b"[" * 10**6, b"\xff", b'{"files": NaN}']
)
def test_a_damaged_manifest_is_damage(content, checkpoint):
    (checkpoint / FILE).write_bytes(content)
    assert find_damage(checkpoint) is not None


def test_what_was_added_is_damage_unless_it_is_hidden(checkpoint):
    (checkpoint / ".DS_Store").touch()
    assert find_damage(checkpoint) is None
    (checkpoint / "sub" / "added").symlink_to("/")
    assert find_damage(checkpoint) == "sub/added was added to it"


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_model_to_start_from_may_have_more_files_but_no_damage(damage, checkpoint, tmp_path):
    check_model_folder(str(tmp_path), "model.train_id")  # of somebody else
    check_model_folder("org/model", "model.train_id")
    (checkpoint / "chat_template.jinja").touch()
    flip(checkpoint / "trainer" / "state.json")  # which such a run does not read
    check_model_folder(str(checkpoint), "model.train_id")
    do, words = DAMAGE[damage]
    do(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"^model.train_id={checkpoint}: is damaged: .*{words}"):
        check_model_folder(str(checkpoint), "model.train_id")


def test_only_the_content_counts_not_where_it_lies(checkpoint, tmp_path):
    shutil.move(checkpoint / "model.safetensors", tmp_path / "elsewhere")
    (checkpoint / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert find_damage(checkpoint) is None


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
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "iter_002: is damaged: model.safetensors has changed since it was written; using" in lines[0]
    assert "iter_001: no readable trainer/state.json (No such file or directory)" in lines[1]


def test_without_a_sound_one_it_is_one_line(run):
    for path in (run / "checkpoints").glob("iter_*/model.safetensors"):
        flip(path)
    with pytest.raises(CheckpointError, match=r"iter_002: is damaged: .*; no checkpoint in .* is sound$"):
        newest_sound(run / "checkpoints")
    shutil.rmtree(run / "checkpoints")
    assert newest_sound(run / "checkpoints") is None


def test_a_damaged_one_that_was_asked_for_is_refused_with_the_newest_sound_one(run):
    flip(run / "checkpoints" / "iter_002" / "model.safetensors")
    for name, key in ((run / "checkpoints" / "iter_002", "resume"), (run, "MODEL")):
        with pytest.raises(
            CheckpointError, match=rf"{key}=.*iter_002: is damaged: .*; the newest sound one is .*iter_001$"
        ):
            verified_state(name) if key == "resume" else find_model(str(name))
