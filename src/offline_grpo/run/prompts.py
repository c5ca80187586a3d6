"""Checks the prompts of a run in the model's tokens, before weights are read."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from offline_grpo.errors import ConfigError, require
from offline_grpo.model.load import context_length
from offline_grpo.model.text import encode
from offline_grpo.run.plan import Plan
from offline_grpo.types import Problem

MAX_LOOKED_AT = 10_000
"""Of more problems, so many: a client checks every prompt again when it is sampled."""

log = logging.getLogger(__name__)


def check_prompts(
    plan: Plan, model_id: str, tokenizer: PreTrainedTokenizerBase, model_config: PretrainedConfig
) -> tuple[int, int]:
    """How many tokens the shortest and the longest prompt of training and evaluation have. Of a source that limits
    prompt and completion: 0 and what the limit leaves.

    Raises:
        ConfigError: a prompt has a token that the model does not have; or prompt and `max_new_tokens` do not fit into
        its context.
    """
    context, vocab_size = context_length(model_config), model_config.get_text_config().vocab_size
    found: list[int] = []
    unreadable: list[str] = []
    limit = plan.config.rollouts.get("max_token_len")  # of rollouts that others have sampled
    if limit is not None:
        found = [0, max(0, min(limit, context or limit) - plan.sampling.max_new_tokens)]
    for key, problems, sampling in (
        ("generation", plan.data.train, plan.sampling),
        ("eval", plan.data.held_out, plan.eval_sampling),
    ):
        chosen = (problems or [])[:MAX_LOOKED_AT]
        prompts = [encode(tokenizer, problem.messages) for problem in chosen]
        lengths = list(map(len, prompts))
        if context is not None:
            _check_lengths(key, chosen, lengths, sampling.max_new_tokens, context)
        for problem, prompt in zip(chosen, prompts, strict=True):
            found_token = f"its tokenizer gives token {max(prompt, default=0)} for problem {problem.problem_id}"
            fix = f"{found_token}, and the model has {vocab_size} (config.json: vocab_size); take another copy of it"
            require(max(prompt, default=0) < vocab_size, "model.train_id", model_id, fix)
            if tokenizer.unk_token_id in prompt:
                unreadable.append(problem.messages[-1]["content"])
        found += lengths
    if unreadable:
        log.warning(
            "model.train_id=%s: its tokenizer lacks characters of %d prompts, such as %r; use another model",
            model_id,
            len(unreadable),
            unreadable[0][:60],
        )
    return min(found, default=0), max(found, default=0)


def _check_lengths(
    key: str, problems: Sequence[Problem], lengths: Sequence[int], max_new_tokens: int, context: int
) -> None:
    longest = max(lengths, default=0)
    if longest + max_new_tokens <= context:
        return
    name = f"{key}.max_new_tokens"
    excess = f"with the longest prompt of {longest} tokens that is beyond the model's context of {context}"
    require(longest >= context, name, max_new_tokens, f"{excess}; use {name}={context - longest} or less")
    num_too_long, named = sum(length >= context for length in lengths), problems[lengths.index(longest)].problem_id
    fix = f"leave out the {num_too_long} of {len(lengths)} problems that are as long, or use a model with more"
    excess = f"the prompt of problem {named} has {longest} tokens, and the model's context is {context}"
    raise ConfigError(f"model.train_id: {excess}; {fix}")
