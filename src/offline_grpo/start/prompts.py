"""Checks the model's files against the plan, and the prompts in the model's tokens, before weights are read."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from offline_grpo.config.parts import Plan
from offline_grpo.config.problems import PREFIX
from offline_grpo.errors import ConfigError, require
from offline_grpo.generation.teacher import KEY, TeacherServer
from offline_grpo.model.load import context_length, generation_config_of, load_tokenizer, read_model_config
from offline_grpo.model.pictures import FAMILIES, Vision, vision_of
from offline_grpo.model.text import TokenizerCodec, end_ids
from offline_grpo.model.ulysses import check_shareable
from offline_grpo.settings import DataConfig, RunConfig
from offline_grpo.start.memory import check_memory
from offline_grpo.state import Run
from offline_grpo.task.problems import MANY
from offline_grpo.train.advantage import is_url
from offline_grpo.types import Problem, Split, text_of

MAX_LOOKED_AT = 10_000
"""Of more problems, so many are encoded; of the others those that may be too long."""

MAX_TOKENS = 10_000_000
"""Of a task without end, whose problems are alike: after so many tokens, texts longer than all before are encoded."""

FIRST_PROBLEMS = 100

log = logging.getLogger(__name__)


def codec_of(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None = None,
    vision: Vision | None = None,
) -> TokenizerCodec:
    """What turns a run's conversations into tokens, and completions into what its task judges."""
    prefix = config.task.get(PREFIX) or ""
    if not isinstance(prefix, str):
        raise ConfigError(f"task.{PREFIX}", prefix, "must be text; quote a number twice: '\"1\"'")
    kwargs = config.model.chat_template_kwargs or {}
    return TokenizerCodec(tokenizer, end_ids(generation_config, tokenizer), kwargs, prefix, vision)


def check_model(run: Run) -> None:
    """Config and tokenizer of the model against the settings, the prompts in its tokens, the teacher, and the memory
    plan, before any weight is read. Takes the problems out of the plan that `data.max_prompt_tokens` skips.
    """
    plan, model_id = run.plan, run.model_id
    config, settings, data = plan.config.model, plan.config.data, plan.data
    if config.trust_remote_code:
        log.warning("model.trust_remote_code=true: Python code that comes with %s is executed", model_id)
    how: Any = {"trust_remote_code": config.trust_remote_code}
    if plan.loss.kl_coef > 0 and config.ref_id is not None:
        read_model_config(config.ref_id, "model.ref_id", **how)
    model_config = read_model_config(model_id, "model.train_id", **how)
    if config.router_replay != "none" and not re.search("expert|moe|rout", str(model_config)):
        fix = f"model.train_id={model_id} has no experts, by its config; use none"
        raise ConfigError("model.router_replay", config.router_replay, fix)
    tokenizer = load_tokenizer(model_id, **how, chat_template=config.chat_template)
    if tokenizer.chat_template is None:
        without = "has no chat template, so a prompt is the plain contents of its messages, line by line"
        log.warning("model.train_id=%s: %s", model_id, without)

    # As many tokens as there are is no filter.
    sampling, vocab_size = plan.sampling, model_config.get_text_config().vocab_size
    if sampling.top_k >= vocab_size and (sampling.top_p, sampling.min_p) == (1, 0):
        plan.sampling = replace(sampling, top_k=0, needs_alternatives=False)

    # The problems, in tokens.
    run.vision = vision_for(plan, model_id, model_config)
    if (size := plan.config.train.sequence_parallel) > 1:
        check_shareable(model_config, size, has_pictures=run.vision is not None)
    codec = codec_of(plan.config, tokenizer, generation_config_of(model_id), run.vision)
    train = None if data.train is None else without_long(data.train, codec, settings, "training")
    plan.data = replace(data, train=train, held_out=without_long(data.held_out, codec, settings, "held-out"))
    check_episodes(codec, [*(train or ()), *plan.data.held_out])
    run.prompt_tokens = check_prompts(plan, model_id, codec, model_config)
    check_teacher(plan, model_config, tokenizer, run.prompt_tokens[1])

    # Whether all of it fits, and how much of the activations is computed again so that it does.
    needs = check_memory(plan, model_id, prompt_tokens=run.prompt_tokens, devices=run.devices)
    run.recompute, run.offloads_activations = needs


def have_pictures(problems: Sequence[Problem]) -> bool:
    """Whether any has; of those that are made one by one, the first ones tell."""
    known = problems if isinstance(problems, (list, tuple)) else problems[:FIRST_PROBLEMS]
    return any(problem.pictures for problem in known)


def vision_for(plan: Plan, model_id: str, model_config: PretrainedConfig) -> Vision | None:
    """What the model sees with, where problems have pictures, or episodes may show it some. Raises ConfigError where
    problems have some that the model, or another part of the run, does not see.
    """
    data, trust = plan.data, plan.config.model.trust_remote_code
    engines = [engine for engine in (plan.engine, plan.eval_engine) if engine is not None]
    has_pictures = any(map(have_pictures, (data.train or (), data.held_out)))
    has_pictures |= any(rollout.pictures for group in data.recorded for rollout in group.rollouts)
    if not has_pictures:
        # A tool or an agent may send some, where model and engines can show them: what cannot plays on without.
        is_played = any(problem.rules is not None for problem in (data.train or data.held_out)[:FIRST_PROBLEMS])
        if (
            is_played
            and model_config.model_type in FAMILIES
            and all(engine.engine_class.shows_pictures and not engine.base_urls for engine in engines)
        ):
            try:
                return vision_of(model_id, model_config, trust_remote_code=trust)
            except ConfigError as error:
                log.info("pictures that tools or agents may send are refused: %s", error)
        return None

    fix = "the problems have pictures, which are shown by generation=transformers and generation=vllm_server alone"
    for engine in engines:
        require(engine.engine_class.shows_pictures, engine.key, engine.engine_class.name, fix)
    fix = "the problems have pictures, and such a server is asked about tokens alone; name a folder of a model"
    require(plan.advantage.teacher is None or not is_url(plan.advantage.teacher), KEY, plan.advantage.teacher, fix)
    return vision_of(model_id, model_config, trust_remote_code=trust)


def check_episodes(codec: TokenizerCodec, problems: Sequence[Problem]) -> None:
    """Raise ConfigError if the model's chat template cannot do what playing these problems takes."""
    rules = [problem.rules for problem in problems if problem.rules is not None]
    if rules:
        codec.chat.check(has_tools=any(each.tools for each in rules))


def encoded(codec: TokenizerCodec, problem: Problem) -> list[int]:
    """The prompt of a problem. Raises ConfigError where the chat template refuses it, or leaves out tools that the row
    offers, calls of tools, or messages of a role that it does not know.
    """
    # What the template might leave out without a word, to be looked for in what it made.
    known = ("system", "user", "assistant", "tool")
    said = [("content", text_of(each)) for each in problem.messages if each["role"] not in known]
    said += [
        ("tool_calls", call["function"]["name"]) for each in problem.messages for call in each.get("tool_calls") or ()
    ]
    said += [("tools", each["function"]["name"]) for each in problem.tools]
    try:
        ids = codec.encode_with(problem.messages, problem.pictures, problem.tools).ids
        text = "".join(codec.decode(ids).split()) if said else ""
        if lost := [f"{name} ({each!r:.60})" for name, each in said if "".join(each.split()) not in text]:
            fix = "take another template (model.chat_template=FILE), or leave it out of the rows"
            raise ConfigError(f"the model's chat template leaves out {lost[0]}; {fix}")
    except ConfigError as error:
        fields = ", ".join(dict.fromkeys(chain(*problem.messages)))
        raise ConfigError(f"problem {problem.problem_id}, whose messages have {fields}: {error}") from error
    return ids


def without_long(
    problems: Sequence[Problem], codec: TokenizerCodec, settings: DataConfig, what: str
) -> Sequence[Problem]:
    """The problems that `data.max_prompt_tokens` does not skip; logs how many it does. Raises ConfigError if all."""
    limit = settings.max_prompt_tokens
    long = {} if limit is None else longer_prompts(problems, codec, limit)
    if not long:
        return problems
    if len(long) == len(problems):
        fix = f"every {what} prompt is longer; the shortest has {min(long.values())} tokens"
        raise ConfigError("data.max_prompt_tokens", limit, fix)
    told = f"{len(long):,} of {len(problems):,} {what} problems, whose prompts are longer"
    log.info("data.max_prompt_tokens=%s: skipped %s", limit, told)
    return [problem for index, problem in enumerate(problems) if index not in long]


def longer_prompts(problems: Sequence[Problem], codec: TokenizerCodec, limit: float) -> dict[int, int]:
    """Index -> number of tokens of each prompt that has more than `limit`.

    A prompt of fewer bytes has no more tokens, and is not encoded, which takes a hundred times as long as to count
    them. What a chat template adds to each message is less than a whole short prompt.
    """
    added = min((len(encoded(codec, problem)) for problem in problems[:20]), default=0)
    found = {}
    for index, problem in enumerate(problems):
        # templates write these longer than their texts
        more = problem.tools or problem.pictures or any("tool_calls" in each for each in problem.messages)
        if more or sum(added + len(text_of(each).encode(errors="replace")) for each in problem.messages) > limit:
            num_tokens = len(encoded(codec, problem))
            if num_tokens > limit:
                found[index] = num_tokens
    return found


def check_prompts(plan: Plan, model_id: str, codec: TokenizerCodec, model_config: PretrainedConfig) -> tuple[int, int]:
    """How many tokens the shortest and the longest prompt of training and evaluation have. Of a source that limits
    prompt and completion: 0 and what the limit leaves. Raises ConfigError for tokens that the model does not have, and
    where prompt and `max_new_tokens` do not fit into its context.
    """
    context, vocab_size = context_length(model_config), model_config.get_text_config().vocab_size
    is_endless = bool(plan.data.train) and len(plan.data.task.problems(Split.TRAIN)) >= MANY
    limit = plan.config.rollouts.get("max_token_len")  # of rollouts that others have sampled
    found = [] if limit is None else [0, max(0, min(limit, context or limit) - plan.sampling.max_new_tokens)]
    unreadable: list[str] = []
    for key, problems, max_new_tokens in (
        ("generation.max_new_tokens", plan.data.train or [], plan.sampling.max_new_tokens),
        ("eval.max_new_tokens", plan.data.held_out, plan.eval_sampling.max_new_tokens),
    ):
        room = inf if context is None else context - max_new_tokens
        rules = [problem.rules for problem in problems if problem.rules is not None]
        added = max((each.max_environment_tokens for each in rules), default=0)
        room -= added

        # Tokens that the model has no embedding for, or its tokenizer no token.
        lengths, num_tokens, longest_text, num_passed_over = [], 0, 0, 0
        for problem in problems[:MAX_LOOKED_AT]:
            num_chars = sum(len(text_of(each)) for each in problem.messages)
            if is_endless and num_tokens > MAX_TOKENS and num_chars <= longest_text:
                num_passed_over += 1
                continue
            prompt, longest_text = encoded(codec, problem), max(num_chars, longest_text)
            lengths.append(len(prompt))
            num_tokens += len(prompt)
            largest = max(prompt, default=0)
            if largest >= vocab_size:
                fix = f"its tokenizer gives token {largest} for problem {problem.problem_id}, and the model has"
                raise ConfigError("model.train_id", model_id, f"{fix} {vocab_size} tokens; take another copy")
            if codec.tokenizer.unk_token_id in prompt:
                unreadable.append(text_of(problem.messages[-1]))

        # Prompt, completion and what an environment may add must fit into the context.
        lengths += longer_prompts(problems[MAX_LOOKED_AT:], codec, room).values()
        longest = max(lengths, default=0)
        if context is not None and longest > room:
            num_too_long = sum(length > room for length in lengths)
            known = len(problems) - num_passed_over
            fix = f"data.max_prompt_tokens={room} skips the {num_too_long} of {known} problems that do not fit"
            fix = fix if room >= min(lengths) else "use a model with more"
            left = context - longest - added
            fix = f"use {key}={left} or less, or {fix}" if left > 0 else fix
            spare = context - longest - max_new_tokens
            fix = f"use task.max_environment_tokens={spare} or less, or {fix}" if added and spare > 0 else fix
            more = f" and task.max_environment_tokens={added}" if added else ""
            excess = f"that is beyond the model's context of {context}; {fix}"
            raise ConfigError(f"{key}={max_new_tokens}: with the longest prompt of {longest} tokens{more} {excess}")
        found += [min(lengths), longest + added] if added else lengths
    if unreadable:
        lacks = f"lacks characters of {len(unreadable)} prompts, such as {unreadable[0][:60]!r}"
        log.warning("model.train_id=%s: its tokenizer %s; use another model", model_id, lacks)
    return min(found, default=0), max(found, default=0)


def check_teacher(
    plan: Plan, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int
) -> None:
    """Raise ConfigError, before weights are read, for a teacher that does not know the tokens of the model to train, or
    whose context is too short. `prompt_tokens`: of the longest prompt.
    """
    name, num_tokens = plan.advantage.teacher, prompt_tokens + plan.sampling.max_new_tokens
    if name is None:
        return
    if is_url(name):
        TeacherServer(name).check(tokenizer, num_tokens)
        return

    # Its logprobs are of token ids: the same id has to be the same token in both.
    trust = plan.config.model.trust_remote_code
    config = read_model_config(name, KEY, trust_remote_code=trust)
    theirs = load_tokenizer(name, key=KEY, trust_remote_code=trust)
    vocabulary = theirs.get_vocab()
    others = [token for token, index in tokenizer.get_vocab().items() if vocabulary.get(token) != index]
    fix = f"{len(others)} tokens, such as {min(others, default='')!r}, have other ids there than in the model to train"
    require(not others, KEY, name, f"{fix}; take a teacher of the same family")
    rows, needed = config.get_text_config().vocab_size, model_config.get_text_config().vocab_size
    require(rows >= needed, KEY, name, f"has {rows} tokens, and the model to train has {needed}")
    context = context_length(config) or inf
    fix = f"has a context of {context}, and prompt and completion may have {num_tokens} tokens"
    require(num_tokens <= context, KEY, name, f"{fix}; lower generation.max_new_tokens")
    if theirs.eos_token_id != tokenizer.eos_token_id:
        ends = f"{theirs.eos_token!r}, and the model to train with {tokenizer.eos_token!r}"
        log.warning("%s=%s: ends texts with %s: it will teach that", KEY, name, ends)
