"""Whole runs in process whose prompts have pictures, from rows of a data set to the record of rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from architectures import ZOO
from cameras import picture
from factories import compose_config
from pyarrow import parquet
from runs import SMALL, assert_alike, metrics_of, printed, run_in_child, run_in_children
from seeing import TEMPLATE, save_seeing

from offline_grpo.errors import ConfigError
from offline_grpo.model.pictures import size_of
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.rollouts import __main__ as rollouts
from offline_grpo.rollouts.store import Shard
from offline_grpo.run import train

HOW = ("train.loss.kl_coef=0.1", "train.schedule=constant", "train.iterations=4")
FEW = [o for o in SMALL if not o.startswith(("model.tiny", "task."))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and with rows, of which each has one picture more than the one before, or none."""
    folder = tmp_path_factory.mktemp("pictures")
    save_seeing("qwen2_5_vl", folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    rows = []
    for number in range(40):
        images = [picture(10 * number + i, 16 + 8 * i, 24).data for i in range(number % 4)]
        says = f"{number}<|image_pad|>: " + "and <image>" * len(images)
        rows.append({"prompt": says, "images": [{"bytes": data, "path": None} for data in images], "answer": "[a-m]"})
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder


def overrides_for(place: Path, *overrides: str, task: Sequence[str] = ()) -> list[str]:
    rows = ("task=dataset", f"task.path={place}/rows.parquet", "task.image_field=images", "task.answer_kind=regex")
    return [
        *FEW,
        "model=hf",
        f"model.train_id={place}/model",
        *(task or rows),
        "task.eval_frac=0.2",
        "data.num_train_seeds=null",
        "generation.max_new_tokens=30",
        "train.iterations=2",
        f"cache_dir={place}/cache",
        *overrides,
    ]


def run(place: Path, out: Path, *overrides: str, task: Sequence[str] = ()) -> Path:
    train(compose_config(*overrides_for(place, *overrides, task=task)), out)
    return out


def test_what_was_sampled_is_scored_recorded_and_replayed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(place, tmp_path / "run")
    metrics = metrics_of(folder)
    for name in ("train_iter_000.json", "train_iter_001.json"):
        assert metrics[name]["alignment/diff_abs_mean"] < 1e-5

    # Each picture is stored once, under the SHA-256 of its bytes, and belongs to its rollouts again.
    shard = Shard(folder / "rollouts/iter_000.parquet")
    groups = shard.groups(shard.table(), [range(4 * i, 4 * i + 4) for i in range(4)])
    seen = set()
    for group in groups:
        assert group.problem is not None
        number = int(group.problem.problem_id.partition("-")[2])
        expected = tuple(picture(10 * number + i, 16 + 8 * i, 24) for i in range(number % 4))
        assert group.problem.pictures == expected
        assert all(rollout.pictures == ((expected,) if expected else ()) for rollout in group.rollouts)
        assert "images" not in group.problem.fields
        seen |= {each.key for each in expected}
    assert seen
    assert seen <= {file.name for file in (folder / "rollouts/images").iterdir()}

    # What is trained on them later is the same.
    again = metrics_of(
        run(place, tmp_path / "again", "rollouts=replay", f"rollouts.path={folder}", "eval.enabled=false")
    )
    for name in ("loss_total", "grad_norm"):
        assert again["train_iter_000.json"][name] == metrics["train_iter_000.json"][name]

    # People see of a picture its place, and which one it is.
    rollouts.run(["show", str(folder), "--full", "--groups", "9"])
    text = capsys.readouterr().out
    assert "<|image_pad|> x 6<|vision_end|>" in text
    assert json.loads((folder / "samples/iter_000.jsonl").read_text().splitlines()[0])["images"] is not None


def test_an_environment_shows_pictures(place: Path, tmp_path: Path) -> None:
    rows = [
        {"number": n, "prompt": "look ", "shot": {"bytes": picture(n, 16, 16).data, "path": None}} for n in range(30)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    episodes = ("task=environment", "task.environment=cameras:Camera", "task.image_field=shot")
    limits = ("task.max_environment_tokens=200", "generation.stop=[a,e,i,o,u,t,n,A,E,I,O,U,T,N]")
    folder = run(place, tmp_path / "run", *limits, task=(*episodes, f"task.path={tmp_path}/rows.parquet"))
    assert metrics_of(folder)["train_iter_001.json"]["alignment/diff_abs_mean"] < 1e-5
    shard = Shard(folder / "rollouts/iter_001.parquet")
    groups = shard.groups(shard.table(), [range(4 * i, 4 * i + 4) for i in range(4)])
    assert max(len(rollout.pictures[0]) for group in groups for rollout in group.rollouts) == 4
    for problem, rollout in ((group.problem, rollout) for group in groups for rollout in group.rollouts):
        assert problem is not None
        number = problem.fields["number"]
        shown = [picture(number, 16, 16), *(picture(100 * number + turn, 16 * turn or 24, 24) for turn in range(3))]
        sizes = [size_of(each) for each in rollout.pictures[0]]
        assert sizes == [size_of(each) for each in shown[: len(sizes)]]


@pytest.mark.slow
def test_a_resumed_run_and_an_evaluation_see_them_too(place: Path, tmp_path: Path) -> None:
    whole = metrics_of(run(place, tmp_path / "whole", *HOW))
    first = run(place, tmp_path / "first", *HOW, "train.iterations=2")
    second = run(place, first, f"resume={first}", *HOW)
    found = metrics_of(second)
    for name in ("loss_total", "loss_kl", "grad_norm", "reward_mean"):
        assert found["train_iter_003.json"][name] == whole["train_iter_003.json"][name]


def test_pictures_without_a_model_that_sees_them_are_refused(place: Path, tmp_path: Path) -> None:
    ZOO["llama"].build(vocab_size=128).save_pretrained(tmp_path / "blind")
    build_char_tokenizer(128).save_pretrained(tmp_path / "blind")
    with pytest.raises(ConfigError, match="reads no pictures"):
        run(place, tmp_path / "run", f"model.train_id={tmp_path}/blind")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_two_processes_see_as_one(sharding: str, place: Path, tmp_path: Path) -> None:
    """One has a microbatch with pictures while the other has none."""
    how = overrides_for(place, "train.batch_size=1", "train.loss.kl_coef=0.1", "model.ref_id=" + str(place / "model"))
    alone, two = tmp_path / "alone", tmp_path / "two"
    assert run_in_child(alone, *how) == 0, printed(alone)
    assert run_in_children(2, two, *how, f"train.sharding={sharding}") == [0, 0], printed(two)
    assert_alike(two, alone)
