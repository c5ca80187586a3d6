"""The store of rollouts: what a file holds, and what is done about files that no run has written."""

from __future__ import annotations

import json
import re
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from factories import CONF
from run_folders import ORIGIN, made_groups, make_replay, replayed, write_store

from offline_grpo.disk import write_whole
from offline_grpo.errors import ConfigError
from offline_grpo.rollouts import recorder as recording
from offline_grpo.rollouts.recorder import Recorder
from offline_grpo.rollouts.rows import group_rows, groups_of, parquet, plain_rows, table_of
from offline_grpo.rollouts.store import shards_of
from offline_grpo.types import Picture, Rollout, RolloutGroup, Score, Turn


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "run")


def test_a_row_says_everything_about_a_completion(store: Path) -> None:
    table = pq.read_table(store / "rollouts" / "iter_002.parquet")
    assert table.num_rows == 6
    page = (CONF.parent / "docs" / "read_your_run.md").read_text()
    assert [name for name in table.column_names if f"`{name}`" not in page] == []
    row = table.to_pylist()[4]
    [message] = row.pop("messages")
    assert {name: value for name, value in message.items() if value is not None} == {"role": "user", "content": "2+2="}
    assert row.pop("logprobs") == [-0.5, struct.unpack("f", struct.pack("f", -0.1))[0]]
    whole = {"temperature": 0.5, "reward": 0.3, "is_correct": True, "advantage": -0.2, "zero_advantage": False}
    whole |= {"iteration": 2, "phase": "train", "group": 1, "version": 2, "finish_reason": "stop", "text": "2.1.1"}
    whole |= {"problem_id": "p1", "answer": "4", "fields": '{"level": 1}', "parts": [("correct", 0.3)]}
    whole |= {"prompt_ids": [1, 2, 1], "completion_ids": [12, 21]}
    nulls = "is_sampled versions ref_logprobs teacher_logprobs failure measured advantages"
    nulls += " turn_starts turn_rewards conversation sequence_starts alternatives images routes"
    assert row == {**dict.fromkeys(nulls.split()), **whole}
    about = json.loads(pq.read_metadata(store / "rollouts" / "iter_002.parquet").metadata[b"offline_grpo"])
    assert about.pop("weights") not in ("", ORIGIN.weights)
    hashes = {"architecture": "a" * 64, "tokenizer": "b" * 64}
    assert about == {"model": "first/model", **hashes, "config": {"seed": 0}, "version": 3, "format": 1}
    assert pq.read_table(store / "rollouts" / "eval_iter_003.parquet")["advantage"].null_count == 6


def test_a_file_is_written_beside_the_updates_and_says_the_weights_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free = threading.Event()

    def on_a_slow_disk(path: Path, content: bytes) -> None:
        assert is_free.wait(20)
        write_whole(path, content)

    def hashes(folder: Path) -> str:
        metadata = pq.read_metadata(folder / "rollouts" / "iter_000.parquet").metadata
        return json.loads(metadata[b"offline_grpo"])["weights"]

    monkeypatch.setattr(recording, "write_whole", on_a_slow_disk)
    weights = torch.ones(8)
    recorder = Recorder(tmp_path, ORIGIN, lambda: (3, [weights]))
    recorder.rollouts("train", made_groups(0), advantages=[[0.1, -0.2, 0.3]] * 2, iteration=0)
    weights += 1
    assert not (tmp_path / "rollouts" / "iter_000.parquet").exists()
    threading.Timer(0.2, is_free.set).start()
    recorder.log("train", {}, iteration=0)
    recorder.close()
    assert hashes(tmp_path) == hashes(write_store(tmp_path / "ones", iterations=1))


PICTURES = (Picture(b"one"), Picture(b"two"), Picture(b"one"))


def two_turns() -> RolloutGroup:
    """An environment's turn between two of the policy's, weights that changed in between, a reference, advantages per
    token, no problem.
    """
    turns = Rollout(
        token_ids=(5, 6, 7, 8, 9),
        is_sampled=(False, True, False, False, True),
        logprobs=(0.0, -0.25, 1.0, 1.0, -0.5),
        versions=(0, 3, -1, -1, 4),
        temperature=1.5,
        finish_reason=None,
        text="half a pair \ud800",
        score=Score(0.5, False, {}, None, {"speed": 2.5}),
        ref_logprobs=(0.0, -0.5, 0.0, 0.0, -0.75),
        teacher_logprobs=(0.0, -0.25, 0.0, 0.0, -1.5),
        alternatives=((), (7, 2**31 - 1), (), (), ()),
        pictures=(PICTURES,),
        zero_advantage=True,
        turns=(Turn(1, 2), Turn(4, 5, 0.5)),
        conversation=(
            {"role": "user", "content": [{"type": "text", "text": "x"}], "weight": 0},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        ),
    )
    zeros = dict.fromkeys(("logprobs", "ref_logprobs", "teacher_logprobs"), (0.0,) * 5)
    none = {"is_sampled": (False,) * 5, "turns": (), "conversation": (), "alternatives": ((),) * 5}
    blank = replace(turns, versions=(0,) * 5, **none, **zeros)
    return RolloutGroup(None, (turns, blank), ((0.0, 0.5, 0.0, 0.0, -0.125), (0.0,) * 5))


def test_what_was_recorded_is_read_again() -> None:
    """But for half a surrogate pair, which UTF-8 has no bytes for."""
    groups = [*made_groups(1), two_turns()]
    table = table_of("train", groups, None, 7)
    sink = pa.BufferReader(parquet(table, {}))
    again = pq.read_table(sink)
    read = groups_of(again, group_rows(again).values(), {each.key: each for each in PICTURES}.__getitem__)
    expected = tuple(replace(r, text=r"half a pair \ud800") for r in two_turns().rollouts)
    assert read[2] == replace(two_turns(), rollouts=expected)
    for found, group in zip(read[:2], groups, strict=False):
        assert found.problem == group.problem
        for one, other in zip(found.rollouts, group.rollouts, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, rel=1e-7)
            assert replace(one, logprobs=other.logprobs) == other
    assert parquet(table, {}) == parquet(table_of("train", groups, None, 7), {})


def test_files_that_have_json_for_nested_columns_are_read_alike(tmp_path: Path) -> None:
    """As every file had before."""
    table = earlier = table_of("train", [*made_groups(1), two_turns()], None, 7)
    for name in ("messages", "parts", "measured", "conversation"):
        texts = [None if row[name] is None else json.dumps(row[name]) for row in plain_rows(table)]
        earlier = earlier.set_column(earlier.schema.get_field_index(name), name, pa.array(texts, pa.string()))
    pq.write_table(earlier, tmp_path / "iter_007.parquet")
    [shard] = shards_of(tmp_path, key="PATH")
    assert shard.table().schema.types == table.schema.types
    assert shard.table().to_pylist() == table.to_pylist()


def test_what_could_not_be_scored_is_null_and_read_again_as_unscored() -> None:
    """Whatever reward scoring.on_failure gave it."""
    [group] = made_groups(1)[:1]
    scores = (Score.unscored("timeout"), Score(0.0, False, {}, "raised"), group.rollouts[2].score)
    rollouts = tuple(replace(r, score=score) for r, score in zip(group.rollouts, scores, strict=True))
    table = table_of("train", [replace(group, rollouts=rollouts)], [[None, None, 0.0]], 7)
    assert table["reward"].to_pylist() == [None, None, 0.3]
    [read] = groups_of(table, group_rows(table).values(), {}.__getitem__)
    found = [(rollout.score.is_scored, rollout.score.failure) for rollout in read.rollouts]
    assert found == [(False, "timeout"), (False, "raised"), (True, None)]
    read.check(vocab_size=100, max_tokens=None)


def test_half_a_character_in_a_problem_can_be_read_again() -> None:
    """As of a cut emoji in scraped text: the escape that JSON has for it is refused by its readers."""
    [group] = made_groups(1)[:1]
    assert group.problem is not None
    messages = ({"role": "user", "content": "cut \ud83d, whole \U0001f600"},)
    problem = replace(group.problem, messages=messages, fields={"note": "\udc00"})
    scored = tuple(replace(rollout, score=Score(10**20, True, {"\ud800": 1.0})) for rollout in group.rollouts)
    table = table_of("train", [RolloutGroup(problem, scored)], None, 7)
    [read] = groups_of(table, group_rows(table).values(), {}.__getitem__)
    escaped = ({"role": "user", "content": "cut \\ud83d, whole \U0001f600"},)
    assert read.problem == replace(problem, messages=escaped, fields={"note": "\\udc00"})
    assert read.rollouts[0].score == Score(1e20, True, {"\\ud800": 1.0})


def test_a_store_is_found_by_any_of_its_names(store: Path) -> None:
    names = [shard.path.name for shard in shards_of(store, key="PATH")]
    assert names == [*(f"iter_00{i}.parquet" for i in range(4)), "eval_iter_003.parquet"]
    [evaluation] = shards_of(store / "rollouts", key="PATH", phase="eval")
    assert evaluation.path == store / "rollouts" / "eval_iter_003.parquet"
    [single] = shards_of(store / "rollouts" / "iter_001.parquet", key="PATH")
    assert single.table(["reward"])["reward"].to_pylist() == [0.1, 0.2, 0.3] * 2
    with pytest.raises(ConfigError, match=r"^PATH=.*: has no rollouts; name one of its runs: run$"):
        shards_of(store.parent, key="PATH")


def test_a_damaged_file_is_named_and_the_rest_used_if_asked(tmp_path: Path, store: Path) -> None:
    path = write_store(tmp_path / "run", iterations=2) / "rollouts" / "iter_000.parquet"
    content = bytearray(path.read_bytes())
    content[40] ^= 4
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        replayed(make_replay(tmp_path / "run"), 2)
    kept = replayed(make_replay(tmp_path / "run", "rollouts.skip_damaged=true"), 1)
    assert kept == [replayed(make_replay(store), 2)[1]]
