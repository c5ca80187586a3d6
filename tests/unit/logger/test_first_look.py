"""What a run prints once: its first prompt and completion with their special tokens, and those that rewards miss."""

from __future__ import annotations

from typing import Any

import pytest

from offline_grpo.logger.first_look import FirstLook
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.types import Completion, FinishReason, Problem, Rollout, RolloutGroup, SamplingParams, Score

PROBLEM = Problem("p", ({"role": "user", "content": "1+2="},), "3")


@pytest.mark.parametrize("skips", [True, False])
def test_prompt_completion_and_hidden_tokens_are_told_once(skips: bool, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer: Any = build_char_tokenizer(64)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    codec = TokenizerCodec(tokenizer, [tokenizer.eos_token_id])
    look = FirstLook(tokenizer, codec.end_ids)

    def group(text: str) -> RolloutGroup:
        ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        completion = Completion(ids, (-1.0,) * len(ids), FinishReason.STOP, (0,) * len(ids))
        judged = codec.judged(ids, SamplingParams(8, skip_special_tokens=skips))
        score = Score(1.0, True, {})
        prompt = codec.encode(PROBLEM.messages)
        return RolloutGroup(
            PROBLEM, (Rollout.of_one_turn(prompt, completion, temperature=1, text=judged, score=score),)
        )

    with caplog.at_level("INFO"):
        for iteration, text in enumerate(("3", "<think>4", "<think>5")):
            look.rollouts("train", [group(text)], advantages=None, iteration=iteration)
    shown = [record.getMessage() for record in caplog.records]
    assert shown[:2] == [
        "the first prompt, as the model reads it (5 tokens):\n  <bos>1+2=",
        "and its first completion, as the model wrote it (2 tokens, reward 1):\n  3<eos>",
    ]
    hidden = "special tokens hidden from rewards (generation.skip_special_tokens): '<think>'"
    assert shown[2:] == ([hidden] if skips else [])
