"""What is refused because of the prompts: before weights are read, with what would help."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialogues import codec_of
from factories import make_qwen2

from offline_grpo.errors import ConfigError
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.start import prompts
from offline_grpo.start.prompts import check_prompts, check_teacher
from offline_grpo.task.problems import MANY
from offline_grpo.types import Encoded, Problem, Rules, SamplingParams

TOKENIZER = build_char_tokenizer(256)
CODEC = TokenizerCodec(TOKENIZER)


def problems(*texts: str) -> list[Problem]:
    return [Problem(f"p-{i}", ({"role": "user", "content": text},), "2") for i, text in enumerate(texts)]


def lengths(
    train: list[Problem], *, context: int = 20, vocab_size: int | None = None, max_new_tokens: int = 4, of: int = 0
) -> tuple[int, int]:
    """`of`: how many problems the task has."""
    task = SimpleNamespace(problems=lambda split: range(of))
    data = SimpleNamespace(task=task, train=train, held_out=[])
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(rollouts={}), data=data, sampling=sampling, eval_sampling=sampling
    )
    text = SimpleNamespace(max_position_embeddings=context, vocab_size=vocab_size or len(TOKENIZER))
    model_config: Any = SimpleNamespace(get_text_config=lambda: text)
    return check_prompts(plan, "a/model", TokenizerCodec(TOKENIZER), model_config)


def test_the_shortest_and_the_longest_prompt_are_found_and_what_does_not_fit_says_what_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = problems("1+1=", "10+10=", "2+2=")
    (short, same), (long, _) = lengths(texts[:1]), lengths(texts[1:2])
    assert same == short < long
    assert (lengths(texts), lengths([])) == ((short, long), (0, 0))
    with pytest.raises(ConfigError, match=rf"^generation.max_new_tokens=15: .* context of 20; use .*={20 - long} "):
        lengths(texts, max_new_tokens=15)
    talk = Rules(max_turns=1, max_turn_tokens=None, max_environment_tokens=20, timeout_s=1)
    with pytest.raises(
        ConfigError, match=rf"=20 that is .*; use task.max_environment_tokens={16 - short} or less, or use"
    ):
        lengths([replace(texts[0], rules=talk)])
    with pytest.raises(ConfigError, match=r"^generation.max_new_tokens=4: .*=16 skips the 2 of 3 problems"):
        lengths(problems("1+1=", "1+" * 10 + "1=", "1+" * 20 + "1="))
    with pytest.raises(ConfigError, match=r"^model.train_id=a/model: its tokenizer gives token \d+ for problem p-0"):
        lengths(texts, vocab_size=3)
    monkeypatch.setattr(prompts, "MAX_LOOKED_AT", 3)
    for place in (0, 2, 3, 6):  # whichever row it is in
        rows = ["1+1="] * 7
        rows[place] = "1+" * 9 + "1="
        with pytest.raises(ConfigError, match="skips the 1 of 7 problems"):
            lengths(problems(*rows))


def test_of_a_task_without_end_a_part_is_encoded_and_longer_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = problems(*["1+1="] * 20, "10+10=", *["2+2="] * 20)
    all_of_them = lengths(rows)
    seen: list[str] = []
    encode = prompts.encoded
    monkeypatch.setattr(prompts, "encoded", lambda codec, each: seen.append(each.problem_id) or encode(codec, each))
    monkeypatch.setattr(prompts, "MAX_TOKENS", 3 * all_of_them[0] - 1)
    assert lengths(rows, of=MANY) == all_of_them
    assert seen == ["p-0", "p-1", "p-2", "p-20"]
    assert lengths(rows, of=len(rows)) == all_of_them
    assert len(seen) == 4 + len(rows)


def test_only_prompts_of_more_bytes_are_encoded_and_their_tokens_count() -> None:
    """A tokenizer that makes words of several characters: the long text fits, the shorter one of rare characters
    does not.
    """
    encoded: list[str] = []

    def encode(messages: Any, pictures: Any, tools: Any) -> Encoded:
        encoded.append(messages[-1]["content"])
        return Encoded([1] * (3 + len(re.findall(r"[a-z]+|[^a-z]", messages[-1]["content"]))), [])

    codec: Any = SimpleNamespace(encode_with=encode)
    rows = problems(*["a"] * 20, "a" * 90, "?" * 40, "?" * 20)
    assert prompts.longer_prompts(rows, codec, 30) == {21: 43}
    assert encoded[20:] == ["a" * 90, "?" * 40]


def test_long_prompts_are_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rows = problems("1+1=", "1+" * 10 + "1=", "2+2=")
    settings: Any = SimpleNamespace(max_prompt_tokens=16)
    kept = prompts.without_long(rows, CODEC, settings, "training")
    assert kept == [rows[0], rows[2]]
    assert caplog.messages == ["data.max_prompt_tokens=16: skipped 1 of 3 training problems, whose prompts are longer"]
    with pytest.raises(ConfigError, match=r"^data.max_prompt_tokens=16: every training prompt .* has 2\d tokens$"):
        prompts.without_long(rows[1:2], CODEC, settings, "training")


CALL = {"id": "000000000", "type": "function", "function": {"name": "add_up", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add_up", "description": "Add.", "parameters": {"type": "object"}}}
ASK = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize(
    ("name", "messages", "tools", "lost"),
    [
        ("qwen3", [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, ASK], (), None),
        ("qwen3", [{"role": "system", "content": "Be brief."}, ASK], (TOOL,), None),
        ("qwen3", [{"role": "developer", "content": "Be brief."}, ASK], (), r"content .'Be brief\.'"),
        ("phi3", [ASK], (TOOL,), "tools .'add_up'"),
        ("llama3", [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, ASK], (), "tool_calls"),
        ("gemma", [{"role": "system", "content": "Be brief."}, ASK], (), "refuses messages of system, user"),
    ],
)
def test_what_the_chat_template_leaves_out_is_refused(
    name: str, messages: list[Any], tools: tuple[Any, ...], lost: str | None
) -> None:
    codec, problem = codec_of(name), Problem("train-7", tuple(messages), "2", tools=tools)
    if lost is None:
        assert prompts.encoded(codec, problem) == codec.encode(messages, tools)
        return
    with pytest.raises(ConfigError, match=rf"^problem train-7, whose messages have role, content.*{lost}"):
        prompts.encoded(codec, problem)


# A teacher knows the tokens of the model to train.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_qwen2(vocab_size=64).save_pretrained(tmp_path)
    build_char_tokenizer(128).save_pretrained(tmp_path)
    return tmp_path


def check(folder: Path, *, prompt_tokens: int = 8, vocab_size: int = 64) -> None:
    plan: Any = SimpleNamespace(
        advantage=SimpleNamespace(teacher=str(folder)),
        sampling=SimpleNamespace(max_new_tokens=8),
        config=SimpleNamespace(model=SimpleNamespace(trust_remote_code=False)),
    )
    check_teacher(plan, make_qwen2(vocab_size=vocab_size).config, build_char_tokenizer(128), prompt_tokens)


def test_one_of_the_same_family_may_teach(folder: Path) -> None:
    check(folder)
    with pytest.raises(ConfigError, match=r"has 64 tokens, and the model to train has 65"):
        check(folder, vocab_size=65)
    with pytest.raises(ConfigError, match=r"has a context of 64, and prompt and completion may have 65 tokens"):
        check(folder, prompt_tokens=57)


def test_one_whose_ids_mean_something_else_is_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"^train.advantage.teacher=.*: 2 tokens, such as '1', have other ids there"):
        check(folder)
