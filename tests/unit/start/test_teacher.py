"""Which teachers know the tokens of the model to train."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_qwen2

from offline_grpo.errors import ConfigError
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.start.prompts import check_teacher


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
