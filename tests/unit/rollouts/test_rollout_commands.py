"""`python -m offline_grpo.rollouts`: what it prints, and what other tools make of what it writes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
from atroposlib.api.server import ScoredData
from rich.console import Console
from run_folders import CONTEXT, ORIGIN, VOCAB, byte_tokenizer, made_groups, make_replay, replayed, write_store
from tokenizers import Tokenizer, models

from offline_grpo.errors import ConfigError, exit_status
from offline_grpo.rollouts import __main__ as command
from offline_grpo.rollouts.__main__ import scored_data, show_groups
from offline_grpo.rollouts.atropos_groups import GroupReader
from offline_grpo.rollouts.recorder import tokenizer_hash
from offline_grpo.rollouts.rows import parquet, table_of
from offline_grpo.rollouts.store import Shard
from offline_grpo.types import RolloutGroup, Score


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store") / "run")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)

    def printed(*words: object) -> str:
        command.run([str(word) for word in words])
        text = capsys.readouterr().out
        assert words[0] == "export" or max(map(len, text.splitlines())) <= 80
        return text

    return printed


def test_show_has_the_best_and_the_worst_of_each_group(store: Path, printed) -> None:
    text = printed("show", store)
    assert "train, iteration 4, group 2, problem p1: 3 completions" in text
    assert text.count("2+2=") == 2
    first, second = text.partition("group 2")[::2]
    assert [first.count(completion) for completion in ("3.0.2", "3.0.1", "3.0.0")] == [1, 0, 1]
    assert first.index("3.0.2") < first.index("3.0.0") < len(first)
    assert "reward 0.5  advantage +0.30  2 tokens  length  version 3" in second
    assert "0.0.1" in printed("show", store, "--iteration", 1, "--full", "--groups", 1)
    assert "eval, iteration 4, group 1" in printed("show", store, "--phase", "eval")


def test_show_has_what_the_tokens_say_where_their_tokenizer_is_at_hand(tmp_path: Path, printed) -> None:
    """In the newest checkpoint, or in the folder of the model; another one is of no use."""
    run, model = tmp_path / "run", tmp_path / "model"
    checkpoint = run / "checkpoints" / "iter_000"
    for folder in (checkpoint, model):
        folder.mkdir(parents=True)
    tokenizer = byte_tokenizer(model)
    write_store(run, origin=replace(ORIGIN, model=str(model), tokenizer=tokenizer_hash(tokenizer)))
    prompt, wrote = (repr(tokenizer.decode(ids)).strip("'") for ids in ([1, 2, 0], [13, 22]))

    def rows(text: str) -> list[list[str]]:
        return [line.split() for line in text.splitlines() if line.split()[:1] in (["prompt"], ["policy"])]

    Tokenizer(models.BPE({"x": 0}, [])).save(str(checkpoint / "tokenizer.json"))
    assert rows(printed("show", run, "--groups", 1))[:2] == [["prompt", prompt], ["policy", wrote]]
    (model / "tokenizer.json").rename(checkpoint / "tokenizer.json")
    assert rows(printed("show", run, "--groups", 1))[:2] == [["prompt", prompt], ["policy", wrote]]
    (checkpoint / "tokenizer.json").unlink()
    assert rows(printed("show", run, "--groups", 1))[:1] == [["policy", "3.0.2"]], "what was judged"


def test_completions_are_coloured_and_nothing_else_reaches_the_terminal(tmp_path: Path) -> None:
    [first, second, third] = made_groups(0)[0].rollouts
    group = RolloutGroup(None, (replace(first, text="\x1b]0;gone\x07"), second, replace(third, text="good")))
    console = Console(force_terminal=True, color_system="truecolor", width=80)
    with console.capture() as captured:
        show_groups(console, Shard(tmp_path), table_of("train", [group], [[-1.0, 0.0, 2.0]], 0), 1, full=False)
    assert "38;2;90;255;90mgood" in captured.get()
    assert "38;2;180;90;90m" in captured.get()
    assert "x1b]0;gone" in captured.get()
    assert "\x1b]0" not in captured.get()


def test_stats_count_what_was_recorded(store: Path, tmp_path: Path, printed) -> None:
    text = printed("stats", store)
    assert "24 completions in 8 groups, 48 tokens" in text
    assert [line.split()[0] for line in text.splitlines() if "cut off" in line] == ["length", "iteration"]
    assert "ended: stop 66.7%, length 33.3%" in text
    assert "repeated within their group: 0.0%; groups whose rewards are all equal: 0.0%" in text
    assert "reward against length: one of them does not vary" in text
    rows = [line.split() for line in text.splitlines() if line.strip()[:2] in ("1 ", "2 ", "3 ", "4 ")]
    assert rows[-4:] == [[str(i + 1), "6", f"{(i + 1) / 10:.3f}", "33.3%", "2.0", "33.3%", "0.0%"] for i in range(4)]

    def recorded(*groups: RolloutGroup, advantages: list[list[float | None]] | None = None) -> Path:
        (tmp_path / "one.parquet").write_bytes(parquet(table_of("train", groups, advantages, 0), {}))
        return tmp_path / "one.parquet"

    # lengths 2 2 2 3 3, rewards 0 0 .2 .1 .1: r = 0.04 / sqrt(1.2 * 0.028)
    [first, second, third] = made_groups(0)[0].rollouts
    names = ("token_ids", "is_sampled", "logprobs", "versions")
    longer = replace(second, **{name: (*getattr(second, name), getattr(second, name)[-1]) for name in names})
    equal = RolloutGroup(None, (first, first, third))
    text = printed("stats", recorded(equal, RolloutGroup(None, (longer, longer))))
    assert "repeated within their group: 40.0%; groups whose rewards are all equal: 50.0%" in text
    assert "reward against length: correlation +0.22" in text
    assert text.index("2 to 2") < text.index("3 to 3")

    inserted = replace(longer, is_sampled=(False, False, False, True, False, True))
    text = printed("stats", recorded(RolloutGroup(None, (inserted, longer))))
    assert "2 completions in 1 groups, 5 tokens" in text, "that were sampled"

    group = RolloutGroup(None, (first, third, replace(longer, score=Score.unscored("timeout"))))
    failed = recorded(group, advantages=[[0.0, 1.0, None]])
    text = printed("stats", failed)
    assert "not scored: 1 timeout" in text
    assert [line.split()[3:5] for line in text.splitlines() if "to" in line[:6]] == [["2", "0.100"], ["1", "-"]]
    text = printed("show", failed)
    assert text.index("reward 0.2 ") < text.index("no reward  3 tokens")
    assert scored_data(equal).keys() == scored_data(group.scored() or group).keys()


def test_lines_of_json_hold_every_column(store: Path, tmp_path: Path, printed) -> None:
    assert printed("export", store, tmp_path / "out.jsonl") == f"wrote 24 completions to {tmp_path}/out.jsonl\n"
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rows = pq.read_table(store / "rollouts" / "iter_003.parquet").to_pylist()
    for line, row in zip(lines[-6:], rows, strict=True):
        row |= {"messages": [{"role": "user", "content": "2+2="}], "parts": dict(row["parts"])}
        del row["routes"]
        assert line == row | {"fields": json.loads(row["fields"])}


def test_datasets_and_replay_read_what_is_exported_for_them(store: Path, tmp_path: Path, printed) -> None:
    printed("export", store, tmp_path / "saved", "--format", "datasets")
    found = datasets.load_from_disk(str(tmp_path / "saved"))
    assert found["text"][:4] == ["0.0.0", "0.0.1", "0.0.2", "0.1.0"]
    assert replayed(make_replay(tmp_path / "saved")) == replayed(make_replay(store))  # the same model and tokenizer
    assert "24 completions in 8 groups" in printed("stats", tmp_path / "saved")
    assert "train, iteration 4, group 1" in printed("show", tmp_path / "saved")
    # a group has its number in the record alone, so completions of two runs would be compared with each other
    datasets.concatenate_datasets([found, found]).save_to_disk(tmp_path / "joined")
    with pytest.raises(ConfigError, match=r"iteration 1, group 1 are apart.*rollouts.path=\[A,B\]"):
        replayed(make_replay(tmp_path / "joined", "rollouts.any_model=true"))


def test_atropos_takes_what_is_exported_for_it(store: Path, tmp_path: Path, printed) -> None:
    printed("export", store, tmp_path / "groups.jsonl", "--format", "atropos", "--iteration", 3)
    lines = (tmp_path / "groups.jsonl").read_text().splitlines()
    read = GroupReader(decode=str, vocab_size=VOCAB, max_members=3, max_token_len=CONTEXT)
    for line, group in zip(lines, made_groups(2), strict=True):
        sent = ScoredData.model_validate_json(line)
        assert sent.masks[0] == [-100, -100, -100, 12, 20]
        assert sent.messages is not None
        assert sent.messages[1][-1] == {"role": "assistant", "content": str(group.rollouts[1].text)}
        found = read(json.loads(line))
        assert [(r.token_ids, r.is_sampled, r.score.reward, r.temperature) for r in found.rollouts] == [
            (r.token_ids, r.is_sampled, r.score.reward, r.temperature) for r in group.rollouts
        ]
    rollouts = [
        replace(r, ref_logprobs=r.logprobs, teacher_logprobs=r.logprobs, zero_advantage=True, temperature=1.0)
        for r in made_groups(0)[0].rollouts
    ]
    whole = scored_data(RolloutGroup(None, tuple(rollouts), ((0.0, 0.0, 0.0, 0.5, -0.5),) * 3))
    found = read(json.loads(ScoredData.model_validate(whole).model_dump_json()))
    assert found.advantages == ((0.0, 0.0, 0.0, 0.5, -0.5),) * 3
    assert [r.ref_logprobs for r in found.rollouts] == [r.logprobs for r in rollouts]
    assert [r.teacher_logprobs for r in found.rollouts] == [r.logprobs for r in rollouts]
    assert all(r.zero_advantage for r in found.rollouts)


def test_a_damaged_file_is_one_line(tmp_path: Path, capsys, monkeypatch) -> None:
    store = write_store(tmp_path / "run", iterations=2)
    (store / "rollouts" / "iter_000.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(sys, "argv", ["rollouts", "stats", str(store)])
    assert exit_status(command.run) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {store}/rollouts/iter_000.parquet: cannot be read (")
    assert told.endswith("; --skip-damaged skips this file\n")
    command.run(["stats", str(store), "--skip-damaged"])
    assert "6 completions in 2 groups" in capsys.readouterr().out
    (store / "rollouts" / "iter_000.parquet").rename(store / "rollouts" / "iter_002.parquet")
    command.run(["show", str(store), "--skip-damaged"])
    assert "train, iteration 2, group 1" in capsys.readouterr().out, "the newest that can be read"


def test_what_cannot_be_done_names_what_was_typed(store: Path, tmp_path: Path, printed) -> None:
    (tmp_path / "text").write_text("{}")
    for words, key in (
        (("show", tmp_path / "none"), f"PATH={tmp_path}/none: "),
        (("show", store, "--iteration", 9), f"PATH={store}: has no rollouts of phase train of iteration 9"),
        (("export", store, tmp_path / "text"), f"OUT={tmp_path}/text: "),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(key)}"):
            printed(*words)
