"""`offline_grpo.play`: one problem, by replies or by a model."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialogues import codec_of
from factories import make_llama

from offline_grpo import play
from offline_grpo.errors import ConfigError
from offline_grpo.types import Rollout

TALK = ["task=environment", "task.environment=worlds:Talk", "task.path=rows.jsonl", "generation.max_new_tokens=60"]
SHOP = ["task=environment", "task.environment=worlds:Shop", "task.path=rows.jsonl", "generation.max_new_tokens=400"]
CALL = '<tool_call>\n{"name": "buy", "arguments": {"name": "pear", "price": 1}}\n</tool_call>'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "turns": 2, "coins": 3, "answer": "2"}) + "\n")
    return tmp_path


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A random model with the chat template of Qwen 3."""
    place, codec = str(tmp_path_factory.mktemp("qwen")), codec_of("qwen3")
    size = {"vocab_size": len(codec.tokenizer), "max_position_embeddings": 2048}
    model = make_llama(
        seed=0, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, **size
    )
    model.save_pretrained(place)
    codec.tokenizer.save_pretrained(place)
    return ["model=hf", f"model.train_id={place}", "model.device=cpu", "train.precision=fp32"]


def blocks(out: str) -> list[str]:
    """What stands beside the ids: who and text, a line each."""
    return [line.rstrip() for line in out.splitlines() if line.startswith("  ")]


def test_typed_replies_become_ids_of_the_tiny_models_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    """One turn; no model is built, which takes a minute. <bos> is 1, <eos> 2, and "1" the 18th printable
    character after a newline, which is 4.
    """
    rollout = play.play(["task=arithmetic", "cache_dir=none"], 3, ["12"])
    assert rollout.token_ids[0] == 1
    assert rollout.token_ids[-3:] == (22, 23, 2)
    assert rollout.is_sampled[-4:] == (False, True, True, True)
    assert not Path("none").exists()
    out = capsys.readouterr().out
    assert "  policy     12<eos>" in blocks(out)
    assert "  3 ids      22 23 2" in blocks(out)
    assert "format" in out


def test_a_typed_end_token_ends_the_reply() -> None:
    assert play.play(["task=arithmetic", "cache_dir=none"], 3, ["1<eos>2"]).token_ids[-2:] == (22, 2)


def test_a_game_is_played_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Paid 1 for a reply of more than one character; the second is half a character."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"12\n\xf0"), isatty=lambda: False))
    play.run([*TALK, "--typed"])
    out = blocks(capsys.readouterr().out)
    assert out[:2] == ["  prompt     <bos>1+1=", "  5 ids      1 22 16 22 34"]
    assert out[2] == "  policy     12<eos>"
    assert out[4] == "  inserted   1+1="
    assert ["turns", "1"] in [line.split() for line in out]


def test_an_episode_is_cut_where_the_replies_end(capsys: pytest.CaptureFixture[str]) -> None:
    rollout = play.play(TALK, 0, ["12"])
    assert rollout.finish_reason == "length"
    assert rollout.score.parts["turns"] == 1.0
    assert "at a limit, or the last reply" in capsys.readouterr().out


def test_tools_are_called_by_hand_as_the_chat_template_writes_it(qwen: list[str]) -> None:
    """The ids are those of the text that the template makes of the whole conversation."""
    rollout = play.play([*SHOP, *qwen], 0, [CALL, "Done."])
    assert rollout.score.reward == 1.0
    codec = codec_of("qwen3")
    assert codec.tokenizer.decode(list(rollout.token_ids)) == rewritten(rollout)
    assert [message["role"] for message in rollout.conversation] == ["user", "assistant", "tool", "assistant"]


def rewritten(rollout: Rollout) -> str:
    from worlds import environment

    messages: list[Any] = [dict(message) for message in rollout.conversation]
    tools: list[Any] = [*environment("worlds:Shop").tools]
    text = codec_of("qwen3").tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return str(text).removesuffix("\n").replace("<think>\n\n</think>\n\n", "")  # which it writes before the last reply


def test_a_model_plays(qwen: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed gives the same episode."""
    short = ["generation.max_new_tokens=20", "task.max_environment_tokens=2000"]
    first, again = (play.play([*TALK, *short, *qwen]) for _ in range(2))
    assert first == again
    assert first.num_sampled > 0
    assert "of the policy" in capsys.readouterr().out


def test_an_episode_that_fails_ends_with_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TALK, "task.environment=worlds:Bad"]
    row = {"prompt": "1+1=", "turns": 1, "how": "raise"}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    rollout = play.play(words, 0, ["12", "3"])
    assert not rollout.score.is_scored
    assert "no reward: raised: RuntimeError: no (worlds.py, line" in capsys.readouterr().out


def test_what_cannot_be_played_is_refused(qwen: list[str]) -> None:
    for words, said in (
        ([*TALK, "--row", "1"], "--row=1: the task has 1 problems, 0 to 0"),
        (["model=hf", "model.train_id=none/none/none"], "model.train_id=none/none/none: no such folder"),
        ([*SHOP, "--typed"], "task: it has tools, and the model's chat template"),
    ):
        with pytest.raises(ConfigError) as error:
            play.run(words)
        assert said in str(error.value)
