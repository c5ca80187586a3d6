"""The tokens and the mask of an episode are those that TRL's loop of tool calls makes of the same replies."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialogues import Scripted, call_text, codec_of, model_of
from factories import compose_config
from worlds import Shop, environment

from offline_grpo.config.compose import typed
from offline_grpo.config.problems import build_task
from offline_grpo.generation.sample import sample_in_order
from offline_grpo.task.environment import Environment
from offline_grpo.task.games import Calculator
from offline_grpo.task.rows import Row
from offline_grpo.types import Rollout, SamplingParams, Split

NAMES = ("glm4moe", "gptoss", "llama3_1", "qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_instruct_2507", "smollm2_tools")
SAMPLING = SamplingParams(max_new_tokens=1000)


def ours(name: str, replies: list[list[int]], task: Environment) -> Rollout:
    problem = task.problem_of("train-0", Row("row 1", 0, {"prompt": "What will you buy? ", "coins": 5}))
    [group] = sample_in_order(Scripted(replies), task, codec_of(name), [(problem, 0)], SAMPLING, group_size=1)
    return group.rollouts[0]


def theirs(name: str, replies: list[list[int]], tools: list[Any], shop: Shop) -> tuple[list[int], list[int], list[int]]:
    """Prompt and completion ids, and the mask."""
    from trl.chat_template_utils import (
        add_response_schema,
        get_training_chat_template,
        is_chat_template_prefix_preserving,
        parse_response,
        qwen3_template,
    )
    from trl.trainer.grpo_trainer import GRPOTrainer  # takes seconds

    tokenizer: Any = codec_of(name).tokenizer
    with suppress(ValueError):
        tokenizer = add_response_schema(tokenizer)
    if name == "smollm2_tools":
        tokenizer.response_template = qwen3_template  # which writes calls alike
    template = None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)
    messages = [{"role": "user", "content": "What will you buy? " + shop.reset(5)}]
    prompt_ids = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, chat_template=template
    )
    left = iter(replies)
    trainer: Any = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        chat_template=template,
        chat_template_kwargs={},
        _is_vlm=False,
        tools=tools,
        environment_factories=None,
        _sync_tool_dicts=[{"buy": lambda **arguments: asyncio.run(shop.buy(**arguments))}],
        _async_tool_dicts=[{}],
        max_tool_calling_iterations=10,
        max_completion_length=10000,
        use_vllm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10000)),
        _generate_single_turn=lambda *args, **kwargs: ([next(left)], None),
    )
    trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    first = next(left)
    completions = [[parse_response(tokenizer, first, prefix=prompt_ids, tools=tools)]]
    arguments = [messages], [prompt_ids], [first], completions, None, None, {}
    mask, _, completion_ids, *_ = GRPOTrainer._tool_call_loop(trainer, *arguments)
    return prompt_ids, completion_ids[0], mask[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ids_and_masks_are_those_of_trl(name: str) -> None:
    """Ends of turns are those that both expect: where GLM draws the header of the next turn as one, TRL writes it
    twice.
    """
    codec, task = codec_of(name), environment("worlds:Shop", max_environment_tokens=5000)
    assert codec.chat._call_closing is not None
    end = codec.tokenizer.convert_tokens_to_ids(codec.chat._call_closing[1])
    end = codec.tokenizer.eos_token_id if name == "glm4moe" else end
    counts = (1, 1, 1) if name in ("llama3_1", "gptoss") else (1, 2)
    calls = [codec.tokenizer.encode(call_text(codec, count) or "", add_special_tokens=False) for count in counts]
    replies = [*([*each, end] for each in calls), [*codec.tokenizer.encode("Done."), codec.tokenizer.eos_token_id]]
    rollout = ours(name, replies, task)
    prompt_ids, completion_ids, mask = theirs(name, replies, list(task.tools), Shop())
    assert list(rollout.token_ids[: len(prompt_ids)]) == prompt_ids
    assert list(rollout.token_ids[len(prompt_ids) :]) == completion_ids
    assert list(rollout.is_sampled[len(prompt_ids) :]) == [bool(number) for number in mask]
    assert (rollout.score.reward, rollout.score.measured["tool_errors"]) == (3.0, 1.0)


@pytest.mark.slow
def test_trl_trains_on_the_calculator(tmp_path: Path) -> None:
    """The class as it is, by its `environment_factory`; what it samples is scripted."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    codec, task = codec_of("smollm2_tools"), build_task(typed(compose_config("task=calculator")).task)
    problem = task.problems(Split.TRAIN)[0]
    encode, end = partial(codec.tokenizer.encode, add_special_tokens=False), codec.tokenizer.eos_token_id
    call = '<tool_call>{{"name": "calculate", "arguments": {{"expression": "{}"}}}}</tool_call>'
    calls = [call.format(expression) for expression in (problem.fields["prompt"][8:-1], "1+1")]
    first, then = ([[*encode(text), end] for text in texts] for texts in (calls, ("Done.", "2")))
    codec.tokenizer.response_template = qwen3_template
    asked: list[Any] = []

    def sample(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        asked.append(prompt_ids)
        return [[*ids] for ids in (first if len(asked) == 1 else then)], None  # TRL appends to them

    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_steps": 1, "max_completion_length": 2000}
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], logging_steps=1, **sizes)
    rows = Dataset.from_list([{**problem.fields, "prompt": [dict(each) for each in problem.messages]}])
    trainer = GRPOTrainer(
        model_of(codec), args=args, train_dataset=rows, processing_class=codec.tokenizer, environment_factory=Calculator
    )
    trainer._generate_single_turn = sample
    trainer.train()
    found = next(each for each in trainer.state.log_history if "reward" in each)
    assert (found["rewards/Calculator/mean"], found["rewards/Calculator/std"] > 0) == (0.5, True)
    for i, reward in enumerate((1.0, 0.0)):
        client = Scripted([first[i], then[i]])
        [group] = sample_in_order(client, task, codec, [(problem, 0)], SamplingParams(2000), group_size=1)
        [own] = group.rollouts
        assert own.score.reward == reward
        assert [list(own.token_ids[: turn.start]) for turn in own.turns] == [ids[i] for ids in asked]
