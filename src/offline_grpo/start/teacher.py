"""The teacher of `train/advantage=distill`: checked against the model to train, then loaded or asked."""

from __future__ import annotations

import logging
from math import inf

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from offline_grpo import progress
from offline_grpo.config.parts import Plan
from offline_grpo.errors import require
from offline_grpo.generation.teacher import KEY, TeacherServer
from offline_grpo.interfaces import Scorer, Sharding
from offline_grpo.model.load import context_length, load_frozen, load_tokenizer, read_model_config
from offline_grpo.model.policy import Policy
from offline_grpo.train.advantage.distill import is_url

log = logging.getLogger(__name__)


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


def load_teacher(plan: Plan, policy: Policy, sharding: Sharding) -> Scorer | None:
    """The teacher, spread as the reference is; None for a run without one."""
    name = plan.advantage.teacher
    if name is None or is_url(name):
        return None if name is None else TeacherServer(name)
    with progress.phase("load teacher"):
        precision = plan.config.train.precision
        teacher = load_frozen(plan.config.model, name, policy, key=KEY, layout=plan.layout, precision=precision)
        sharding.prepare_reference(teacher)
        return teacher
