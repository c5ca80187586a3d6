"""Checkpoints: what is in the folder, that it is whole or absent, and what happens when the disk says no."""

import json
import os
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch
from checkpoints import config_of
from factories import make_policy, make_qwen2, make_updater
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offline_grpo.checkpoint import checkpointer as module
from offline_grpo.checkpoint.checkpointer import Checkpointer, Restored
from offline_grpo.checkpoint.files import latest_checkpoint, list_checkpoints, newest_sound
from offline_grpo.errors import CheckpointError
from offline_grpo.settings import StopWhenConfig
from offline_grpo.train.milestones import Milestones
from offline_grpo.train.push_schedule import PushSchedule


class NoTokenizer:
    def save_pretrained(self, folder):
        return None


def checkpointer_of(updater, folder, *, keep_last_k=1, interval=1, keep_best=None):
    return Checkpointer(
        folder=folder,
        policy=updater.policy,
        updater=updater,
        schedule=PushSchedule(interval),
        source=SimpleNamespace(state_dict=lambda: {"queue": [1, 2]}),
        milestones=Milestones(keep_best, StopWhenConfig("pass@1", None, None)),
        ranks=updater.ranks,
        config=config_of(),
        keep_last_k=keep_last_k,
        format="full",
    )


@pytest.fixture
def saved(tmp_path, token_batch):
    """A checkpointer on a policy after one update."""

    def make(dtype=torch.float32, keep_last_k=3, keep_best=None):
        updater = make_updater(tmp_path, dtype=dtype, precision="bf16" if dtype == torch.bfloat16 else "fp32")
        updater.policy.tokenizer = NoTokenizer()
        updater.run(token_batch, iteration=0)
        return checkpointer_of(updater, tmp_path / "checkpoints", keep_last_k=keep_last_k, keep_best=keep_best), updater

    return make


def test_folder_is_a_plain_hugging_face_model(saved, tmp_path, token_batch):
    checkpointer, updater = saved()
    checkpointer.write(0).commit()
    folder = tmp_path / "checkpoints" / "iter_000"
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = token_batch.token_ids[None, :10]
    assert torch.equal(model(ids).logits, updater.policy.model.eval()(ids).logits)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied to the embedding: stored once
    num_bytes = sum(p.numel() * 4 for p in updater.policy.model.parameters())
    assert (folder / "model.safetensors").stat().st_size < num_bytes * 1.02 + 5000


def test_nothing_counts_before_it_is_committed(saved, tmp_path):
    checkpointer, _ = saved()
    pending = checkpointer.write(0)
    assert list_checkpoints(tmp_path / "checkpoints") == []
    pending.commit()
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "iter_000"


def test_only_the_newest_are_kept(saved, tmp_path):
    checkpointer, _ = saved(keep_last_k=2)
    for iteration in (8, 9, 10, 1000):
        checkpointer.write(iteration).commit()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["iter_010", "iter_1000"]


def test_checkpoints_of_later_iterations_are_neither_counted_nor_deleted(saved, tmp_path):
    """They are of another history: the run went on from an earlier checkpoint."""
    checkpointer, _ = saved(keep_last_k=1)
    (tmp_path / "checkpoints" / "iter_011").mkdir(parents=True)
    for iteration in (7, 8):
        checkpointer.write(iteration).commit()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["iter_008", "iter_011"]


def test_killed_while_a_checkpoint_is_replaced_there_is_a_whole_one(saved, tmp_path, monkeypatch):
    """After an evaluation that was owed, the last checkpoint is written again."""
    checkpointer, _ = saved(keep_last_k=1)
    checkpointer.write(3, owes_evaluation=True).commit()
    pending = checkpointer.write(3)

    def killed(path, **kwargs):
        (path / "config.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        pending.commit()
    checkpoint, state = newest_sound(tmp_path / "checkpoints")
    assert (checkpoint.name, state.owes_evaluation) == ("iter_003", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_state_makes_the_same_next_update(saved, tmp_path, token_batch, dtype):
    checkpointer, updater = saved(dtype)
    checkpointer.write(4).commit()
    folder = tmp_path / "checkpoints" / "iter_004"
    has_masters = (folder / "trainer" / "masters.safetensors").exists()
    assert has_masters == (dtype == torch.bfloat16)

    other = make_updater(tmp_path, dtype=dtype, precision=updater.config.precision)
    other.policy.model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())
    assert checkpointer_of(other, tmp_path).restore(folder) == Restored(4, {"queue": [1, 2]}, owes_evaluation=False)
    assert other.run(token_batch, iteration=5) == updater.run(token_batch, iteration=5)
    for name, master in updater.policy.masters.parameters.items():
        assert torch.equal(master, other.policy.masters.parameters[name]), name


@pytest.mark.parametrize("broken", ["save_pretrained", "save", "fsync"])
def test_full_disk_leaves_the_last_checkpoint_and_says_so(saved, tmp_path, monkeypatch, broken):
    checkpointer, updater = saved()
    checkpointer.write(0).commit()
    before = {p: p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()}

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    owners = {"save_pretrained": updater.policy.model, "save": torch, "fsync": module.os}
    monkeypatch.setattr(owners[broken], broken, no_space)
    expected = (
        r"iteration 1 could not be written.*No space left.*the last checkpoint is intact: .*iter_000.*resume=auto"
    )
    with pytest.raises(CheckpointError, match=expected):
        checkpointer.write(1)
    assert {p: p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()} == before


def test_a_full_disk_is_what_torch_does_not_call_so(saved, tmp_path, monkeypatch):
    checkpointer, _ = saved()

    def half(*args, **kwargs):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 532288 vs 532176")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(
        CheckpointError,
        match=r": \[enforce fail .*; there is no earlier checkpoint\. Free some space .*, then start again$",
    ):
        checkpointer.write(0)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    with pytest.raises(CheckpointError, match=r": No space left on device; there is no earlier checkpoint\. "):
        checkpointer.write(0)


def test_a_folder_that_is_a_file_is_said_to_be_unwritable(saved, tmp_path):
    checkpointer, _ = saved()
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpointer.write(0)


def test_leftovers_of_a_killed_write_are_no_checkpoint_and_are_overwritten(saved, tmp_path):
    checkpointer, _ = saved()
    hidden = tmp_path / "checkpoints" / ".writing_iter_000"
    hidden.mkdir(parents=True)
    (hidden / "half").write_text("x")
    assert latest_checkpoint(tmp_path / "checkpoints") is None
    checkpointer.write(0).commit()
    assert not hidden.exists()
    assert not (tmp_path / "checkpoints" / "iter_000" / "half").exists()


def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path):
    checkpointer, _ = saved()
    checkpointer.write(0).commit()
    other = make_updater(tmp_path)
    from offline_grpo.train.optimizer import AdamW

    other.policy = make_policy(make_qwen2(num_hidden_layers=1), NoTokenizer())
    other.optimizer = AdamW(lr=1e-3, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8, offload=False).create(
        other.policy.make_masters().parameters.values()
    )
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpointer_of(other, tmp_path).restore(tmp_path / "checkpoints" / "iter_000")


def test_state_tells_format_iteration_and_configuration(saved, tmp_path):
    checkpointer, _ = saved()
    checkpointer.write(3).commit()
    state = json.loads((tmp_path / "checkpoints" / "iter_003" / "trainer" / "state.json").read_text())
    assert (state["format"], state["iteration"], state["config"]) == (4, 3, config_of())
    assert state["counters"]["num_updates"] == 1


def test_what_the_engine_serves_is_saved_where_it_is_older_than_the_model(saved, tmp_path, token_batch):
    _, updater = saved()
    checkpointer = checkpointer_of(updater, tmp_path / "checkpoints", keep_last_k=9, interval=3)
    checkpointer.schedule.pushed(updater.policy, updater.counters.version)
    checkpointer.write(0).commit()
    served = {name: p.detach().clone() for name, p in updater.policy.trained_parameters().items()}
    updater.run(token_batch, iteration=1)
    assert not checkpointer.schedule.is_due(force=False)
    checkpointer.write(1).commit()
    files = [(tmp_path / "checkpoints" / f"iter_00{i}" / "trainer" / "served.safetensors").exists() for i in (0, 1)]
    assert files == [False, True]

    own = {name: p.detach().clone() for name, p in updater.policy.trained_parameters().items()}
    other = checkpointer_of(updater, tmp_path, interval=3)
    other.restore(tmp_path / "checkpoints" / "iter_001")
    with other.schedule.served_weights(updater.policy, updater.counters.version) as version:
        assert version == updater.counters.version - 1
        assert all(torch.equal(p, served[name]) for name, p in updater.policy.trained_parameters().items())
    assert all(torch.equal(p, own[name]) for name, p in updater.policy.trained_parameters().items())
    assert not torch.equal(own["model.norm.weight"], served["model.norm.weight"])
    assert [other.schedule.is_due(force=False) for _ in range(2)] == [False, True], (
        "the second and third opportunity of three"
    )


def test_the_best_is_kept_beside_the_newest_and_has_a_link(saved, tmp_path):
    checkpointer, _ = saved(keep_last_k=1, keep_best="pass@1")
    folder = tmp_path / "checkpoints"
    seen = []
    for iteration, value in enumerate([0.1, 0.3, 0.2, 0.3, 0.4, 0.4]):
        checkpointer.milestones.see({"pass@1": value}, iteration)
        checkpointer.write(iteration).commit()
        seen.append(([path.name for path in list_checkpoints(folder)], os.readlink(folder / "best")))
    one, three = ["iter_001"], ["iter_001", "iter_003"]
    assert [names for names, _ in seen] == [
        ["iter_000"],
        one,
        ["iter_001", "iter_002"],
        three,
        ["iter_004"],
        ["iter_004", "iter_005"],
    ]
    assert [link for _, link in seen] == ["iter_000", "iter_001", "iter_001", "iter_001", "iter_004", "iter_004"]
    AutoModelForCausalLM.from_pretrained(folder / "best")
    assert latest_checkpoint(folder) == folder / "iter_005"


def test_the_best_is_known_after_a_restore_unless_it_is_gone(saved, tmp_path):
    checkpointer, updater = saved(keep_last_k=9, keep_best="pass@1")
    for iteration, value in enumerate([0.3, 0.2]):
        checkpointer.milestones.see({"pass@1": value}, iteration)
        checkpointer.write(iteration).commit()
    folder = tmp_path / "checkpoints"
    for is_there, expected in ((True, 0), (False, None)):
        if not is_there:
            shutil.rmtree(folder / "iter_000")
        other = checkpointer_of(updater, folder, keep_best="pass@1")
        other.restore(folder / "iter_001")
        assert other.milestones.best_iteration == expected


def test_all_are_kept(saved, tmp_path):
    checkpointer, _ = saved(keep_last_k=None)
    for iteration in range(5):
        checkpointer.write(iteration).commit()
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 5


def test_state_of_other_shapes_is_refused_before_it_is_used(saved, tmp_path):
    checkpointer, _ = saved(torch.bfloat16)
    checkpointer.write(0).commit()
    trainer = tmp_path / "checkpoints" / "iter_000" / "trainer"
    masters, optimizer = (
        load_file(trainer / "masters.safetensors"),
        torch.load(trainer / "optimizer.pt", weights_only=True),
    )

    def refused(reason):
        with pytest.raises(CheckpointError, match=reason):
            checkpointer.restore(trainer.parent)

    name = next(name for name, tensor in masters.items() if tensor.dim() == 1)
    for other, reason in (
        ({**masters, name: masters[name][:1].clone()}, "masters.safetensors: .* is \\[1\\] and should be"),
        ({key: value for key, value in masters.items() if key != name}, f"masters.safetensors: {name} is missing"),
        ({**masters, "more": masters[name].clone()}, "masters.safetensors: more is unknown"),
    ):
        save_file(other, trainer / "masters.safetensors")
        refused(reason)
    (trainer / "masters.safetensors").unlink()
    refused("does not fit this configuration")
    save_file(masters, trainer / "masters.safetensors")
    optimizer["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)
    torch.save(optimizer, trainer / "optimizer.pt")
    refused(r"exp_avg is \[3\], for a parameter of")


class Executed:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps(Executed()), None], ids=["empty", "garbage", "pickle", "zip"]
)
def test_an_optimizer_state_that_is_none_is_one_line_and_runs_no_code(content, saved, tmp_path, monkeypatch):
    checkpointer, _ = saved()
    checkpointer.write(0).commit()
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoints" / "iter_000" / "trainer" / "optimizer.pt"
    path.write_bytes(content) if content is not None else torch.save({"optimizer": Executed(), "scaler": {}}, path)
    with pytest.raises(
        CheckpointError, match=r"^resume=.*iter_000: its trainer state does not fit this configuration \([^\n]*\)$"
    ):
        checkpointer.restore(path.parents[1])
    assert not (tmp_path / "executed").exists()
