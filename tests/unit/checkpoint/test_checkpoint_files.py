"""A changed checkpoint is noticed before anything is loaded from it, and an older sound one is used."""

import json
import os

import pytest
from run_folders import make_checkpoint, state_of

from offline_grpo.checkpoint.files import MANIFEST, check_model_folder, verified_state
from offline_grpo.errors import CheckpointError
from offline_grpo.train.schedule import Watch

STATE = state_of(3, milestones={"keep_best": Watch("pass@1", 0.5, 2, 0.4, 1)}, source={"queue": [1, 2.5, "x", None]})


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoints" / "iter_000"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    (folder / "sub" / "vocab.txt").write_text("a")
    return make_checkpoint(folder, STATE)


def test_the_manifest_has_every_other_file_with_the_hash_that_sha256sum_prints(checkpoint):
    record = json.loads((checkpoint / MANIFEST).read_text())["files"]
    assert record.keys() == {"model.safetensors", "sub/vocab.txt", "trainer/state.json"}
    assert record["sub/vocab.txt"] == {
        "bytes": 1,
        "sha256": "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
    }
    assert verified_state(checkpoint) == STATE


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [flip, lambda path: os.truncate(path, path.stat().st_size - 1), lambda path: path.unlink()]
)
def test_a_model_to_start_from_may_have_more_files_but_no_damage(checkpoint, damage):
    check_model_folder("org/model", "model.train_id")
    (checkpoint / "chat_template.jinja").touch()
    damage(checkpoint / "trainer" / "state.json")  # which such a run does not read
    check_model_folder(str(checkpoint), "model.train_id")
    damage(checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"^model.train_id={checkpoint}: is damaged: .*model.safetensors"):
        check_model_folder(str(checkpoint), "model.train_id")
