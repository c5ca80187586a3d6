"""Checkpoints: what is in the folder, and that it is whole or absent."""

import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from factories import make_updater
from run_folders import config_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from offline_grpo.checkpoint import checkpointer as module
from offline_grpo.checkpoint.checkpointer import Checkpointer
from offline_grpo.checkpoint.files import MANIFEST, list_checkpoints, newest_sound
from offline_grpo.errors import DiskFull
from offline_grpo.history.folder import RunDir
from offline_grpo.run import shortage
from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.schedule import Milestones


class NoTokenizer:
    def save_pretrained(self, folder):
        return None


def checkpointer_of(updater, folder, *, keep_last_k=1, keep_best=None):
    return Checkpointer(
        folder=folder,
        policy=updater.passes.policy,
        updater=updater,
        source=SimpleNamespace(state_dict=lambda: {"queue": [1, 2]}),
        milestones=Milestones(keep_best, StopWhenConfig("pass@1", None, None)),
        ranks=updater.passes.ranks,
        config=config_of(),
        keep_last_k=keep_last_k,
        format="full",
    )


def save(checkpointer, iteration):
    checkpointer.write(iteration)
    checkpointer.commit(iteration)


@pytest.fixture
def saved(tmp_path, token_batch):
    """A checkpointer on a policy after one update."""

    def make(dtype=torch.float32, keep_last_k=3, keep_best=None):
        updater = make_updater(tmp_path, dtype=dtype, precision="bf16" if dtype == torch.bfloat16 else "fp32")
        updater.passes.policy.tokenizer = NoTokenizer()
        updater.run(token_batch, iteration=0)
        return checkpointer_of(updater, tmp_path / "checkpoints", keep_last_k=keep_last_k, keep_best=keep_best), updater

    return make


def test_folder_is_a_plain_hugging_face_model(saved, tmp_path, token_batch):
    checkpointer, updater = saved()
    save(checkpointer, 0)
    folder = tmp_path / "checkpoints" / "iter_000"
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = token_batch.token_ids[None, :10]
    assert torch.equal(model(ids).logits, updater.passes.policy.model.eval()(ids).logits)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied to the embedding: stored once
    num_bytes = sum(p.numel() * 4 for p in updater.passes.policy.model.parameters())
    assert (folder / "model.safetensors").stat().st_size < num_bytes * 1.02 + 5000
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert json.loads((folder / MANIFEST).read_text())["files"].keys() == files - {MANIFEST}
    assert len({os.stat(folder / name).st_mode for name in files}) == 1  # whoever may read some may read all


def test_only_the_newest_are_kept_beside_those_of_another_history(saved, tmp_path):
    """A run that continues from an earlier checkpoint neither counts nor deletes later ones."""
    checkpointer, _ = saved(keep_last_k=2)
    (tmp_path / "checkpoints" / "iter_1001").mkdir(parents=True)
    for iteration in (8, 9, 10, 1000):
        save(checkpointer, iteration)
    names = [path.name for path in list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["iter_010", "iter_1000", "iter_1001"]


def test_killed_while_a_checkpoint_is_replaced_there_is_a_whole_one(saved, tmp_path, monkeypatch):
    """As after an evaluation with which a resumed run begins."""
    checkpointer, updater = saved(keep_last_k=1)
    save(checkpointer, 3)
    updater.counters.num_refused = 1
    checkpointer.write(3)

    def killed(path, **kwargs):
        (path / "config.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.commit(3)
    checkpoint, state = newest_sound(tmp_path / "checkpoints")
    assert (checkpoint.name, state.counters.num_refused) == ("iter_003", 1)


@pytest.mark.parametrize("function", ["torch.save", "write_manifest"])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(saved, tmp_path, monkeypatch, function):
    checkpointer, _ = saved()
    save(checkpointer, 0)
    torch_save = torch.save

    def on_a_full_disk(content, *_):
        if function == "torch.save":
            torch_save(content, "/dev/full")
        with open("/dev/full", "w") as file:
            file.write("text")

    monkeypatch.setattr(module if function == "write_manifest" else torch, function.split(".")[-1], on_a_full_disk)
    line = rf"no room on the disk of {tmp_path} .*; iter_000 is whole; go on with: .*resume={tmp_path}$"
    with pytest.raises((OSError, RuntimeError)) as caught:
        checkpointer.write(1)
    told = shortage(caught.value, RunDir(tmp_path))
    assert isinstance(told, DiskFull)
    assert re.match(line, str(told))
    assert newest_sound(tmp_path / "checkpoints")[0].name == "iter_000"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_state_makes_the_same_next_update(saved, tmp_path, token_batch, dtype):
    checkpointer, updater = saved(dtype)
    save(checkpointer, 4)
    folder = tmp_path / "checkpoints" / "iter_004"
    has_masters = (folder / "trainer" / "masters.safetensors").exists()
    assert has_masters == (dtype == torch.bfloat16)

    other = make_updater(tmp_path, dtype=dtype, precision=updater.passes.config.precision)
    other.passes.policy.model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())
    restored = checkpointer_of(other, tmp_path).restore(folder)
    assert (restored.iteration, restored.source) == (4, {"queue": [1, 2]})
    assert other.run(token_batch, iteration=5) == updater.run(token_batch, iteration=5)
    for name, master in updater.passes.policy.masters.parameters.items():
        assert torch.equal(master, other.passes.policy.masters.parameters[name]), name


def test_the_best_is_kept_beside_the_newest_and_has_a_link(saved, tmp_path):
    checkpointer, _ = saved(keep_last_k=1, keep_best="pass@1")
    folder = tmp_path / "checkpoints"
    seen = []
    for iteration, value in enumerate([0.1, 0.3, 0.2, 0.4]):
        checkpointer.milestones.see({"pass@1": value}, iteration)
        save(checkpointer, iteration)
        seen.append(([path.name for path in list_checkpoints(folder)], os.readlink(folder / "best")))
    assert seen == [
        (["iter_000"], "iter_000"),
        (["iter_001"], "iter_001"),
        (["iter_001", "iter_002"], "iter_001"),
        (["iter_003"], "iter_003"),
    ]
    AutoModelForCausalLM.from_pretrained(folder / "best")
