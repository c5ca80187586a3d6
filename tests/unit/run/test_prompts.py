"""What is refused because of the prompts: before weights are read, with what would help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offline_grpo.errors import ConfigError
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.run.prompts import check_prompts
from offline_grpo.types import Problem, SamplingParams

TOKENIZER = build_char_tokenizer(256)


def problems(*texts: str) -> list[Problem]:
    return [Problem(f"p-{i}", ({"role": "user", "content": text},), "2") for i, text in enumerate(texts)]


def lengths(
    train: list[Problem], *, context: int = 20, vocab_size: int | None = None, max_new_tokens: int = 4
) -> tuple[int, int]:
    data = SimpleNamespace(train=train, held_out=[])
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(rollouts={}), data=data, sampling=sampling, eval_sampling=sampling
    )
    text = SimpleNamespace(max_position_embeddings=context, vocab_size=vocab_size or len(TOKENIZER))
    model_config: Any = SimpleNamespace(get_text_config=lambda: text)
    return check_prompts(plan, "a/model", TokenizerCodec(TOKENIZER), model_config)


def test_the_shortest_and_the_longest_prompt_are_found() -> None:
    texts = problems("1+1=", "10+10=", "2+2=")
    (short, same), (long, _) = lengths(texts[:1]), lengths(texts[1:2])
    assert same == short < long
    assert lengths(texts) == (short, long)
    assert lengths([]) == (0, 0)


def test_prompts_that_leave_too_little_room_say_what_fits() -> None:
    length, _ = lengths(problems("10+10="))
    message = (
        rf"^generation.max_new_tokens=15: .*longest prompt of {length} tokens .*context of 20; use .*={20 - length} "
    )
    with pytest.raises(ConfigError, match=message):
        lengths(problems("1+1=", "10+10="), max_new_tokens=15)
    with pytest.raises(ConfigError, match=r"^generation.max_new_tokens=4: .* leave out the 2 of 3 problems "):
        lengths(problems("1+1=", "1+" * 10 + "1=", "1+" * 20 + "1="))


def test_a_tokenizer_of_another_model_is_refused() -> None:
    message = r"^model.train_id=a/model: its tokenizer gives token \d+ for problem p-0, and the model has 3 "
    with pytest.raises(ConfigError, match=message):
        lengths(problems("1+1="), vocab_size=3)
