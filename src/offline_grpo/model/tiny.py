"""A model of a few hundred thousand weights, built and warm-started on this machine: no download, no GPU.

It is saved as any other transformers model, so that whatever loads or serves a real one takes it too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from offline_grpo import progress as run_progress
from offline_grpo.disk import OwnFolder, remove_left_behind
from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import Task
from offline_grpo.model.char_tokenizer import build_char_tokenizer
from offline_grpo.model.text import encode
from offline_grpo.model.warm_start import Progress, warm_start
from offline_grpo.types import Problem, Split

SCRATCH = ".tiny-"
FORMAT_VERSION = 1
"""Raise it when the same settings would give another model: folders built before are then no longer found."""


@dataclass(frozen=True)
class TinyModel:
    """A Llama of this shape in fp32 with tied embeddings and a tokenizer of characters, and how it is warm-started.

    Raises:
        ConfigError: a value is out of range, or the sizes do not divide each other.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rope_theta: float
    initializer_range: float
    warm_start_steps: int
    warm_start_batch_size: int
    warm_start_lr: float
    noise_frac: float
    seed: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in ("warm_start_steps", "noise_frac", "seed"):
                require(value > 0, f"model.tiny.{name}", value, "must be above 0")
        fix = f"must be a multiple of 2 * num_heads = {2 * self.num_heads}: rotary embeddings turn pairs of dimensions"
        require(self.hidden_size % (2 * self.num_heads) == 0, "model.tiny.hidden_size", self.hidden_size, fix)
        fix = f"must divide num_heads = {self.num_heads}"
        divides = self.num_heads % self.num_key_value_heads == 0
        require(divides, "model.tiny.num_key_value_heads", self.num_key_value_heads, fix)
        require(self.warm_start_steps >= 0, "model.tiny.warm_start_steps", self.warm_start_steps, "must be at least 0")
        fix = "a share of the demonstrations, from 0 to 1"
        require(0 <= self.noise_frac <= 1, "model.tiny.noise_frac", self.noise_frac, fix)

    def prepare(self, task: Task, cache_dir: Path, *, show_progress: bool = False) -> Path:
        """See `prepare_tiny_model`; with `show_progress`, the run's display says how far it is."""
        return prepare_tiny_model(self, task, cache_dir, progress=_show_progress if show_progress else None)


def prepare_tiny_model(settings: TinyModel, task: Task, cache_dir: Path, *, progress: Progress | None = None) -> Path:
    """Build the model, warm-start it on the task's training problems and save it, unless `cache_dir` has it already.

    The folder's name is a hash of everything that decides the result. It appears complete or not at all, also when
    several processes build it at the same time. The caller's random state is left as it was.

    Args:
        progress: called after every step of the warm start; never where the cache has the model.

    Raises:
        ConfigError: the task's answers are no integers, or its prompts are longer than the model's context.
    """
    problems = task.problems(Split.TRAIN)
    if any(re.fullmatch(r"-?[0-9]+", problem.answer) is None for problem in problems):
        raise ConfigError(
            "model=tiny: learns integer answers alone; use task=arithmetic, or model=hf model.train_id=..."
        )
    remove_left_behind(cache_dir, SCRATCH)
    folder = cache_dir / f"tiny-{_content_hash(settings, problems)}"
    if folder.exists():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with OwnFolder(cache_dir, SCRATCH) as scratch:
        built = scratch / "model"
        with run_progress.step(
            "warm start", f"building the tiny model (once): warm start of {settings.warm_start_steps} steps"
        ):
            _build(settings, problems, built, progress)
        try:
            built.rename(folder)
        except OSError:
            # Another process was faster. Ours is thrown away: the folder that may already be in use stays.
            if not folder.exists():
                raise
    return folder


def _content_hash(settings: TinyModel, problems: Sequence[Problem]) -> str:
    examples = [[[dict(message) for message in problem.messages], problem.answer] for problem in problems]
    content = json.dumps([FORMAT_VERSION, asdict(settings), examples], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _build(settings: TinyModel, problems: Sequence[Problem], folder: Path, progress: Progress | None) -> None:
    tokenizer = build_char_tokenizer(settings.max_position_embeddings)
    _check_lengths(settings, tokenizer, problems)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the caller's GPUs, which are not forked here.
        torch.default_generator.manual_seed(settings.seed)
        model = LlamaForCausalLM(_llama_config(settings, tokenizer))
    model.generation_config = GenerationConfig(**_special_ids(tokenizer))
    warm_start(
        model,
        tokenizer,
        problems,
        steps=settings.warm_start_steps,
        batch_size=settings.warm_start_batch_size,
        lr=settings.warm_start_lr,
        noise_frac=settings.noise_frac,
        seed=settings.seed,
        progress=progress,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _llama_config(settings: TinyModel, tokenizer: PreTrainedTokenizerBase) -> LlamaConfig:
    """Llama rather than Qwen2: for a Qwen2, AutoTokenizer ignores the tokenizer saved beside the model and makes one of
    Qwen2's own.
    """
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_key_value_heads,
        max_position_embeddings=settings.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        initializer_range=settings.initializer_range,
        tie_word_embeddings=True,
        dtype="float32",
        **_special_ids(tokenizer),
    )


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _check_lengths(settings: TinyModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> None:
    """A prompt, its answer, the digit that a wrong answer may have more, and EOS must fit the context."""
    lengths = {
        problem.problem_id: len(encode(tokenizer, problem.messages)) + len(problem.answer) + 2 for problem in problems
    }
    name = max(lengths, key=lengths.__getitem__)
    longest = lengths[name]
    fix = f"problem {name} has {longest} tokens with its answer; use {longest} or more, or leave that problem out"
    require(
        longest <= settings.max_position_embeddings,
        "model.tiny.max_position_embeddings",
        settings.max_position_embeddings,
        fix,
    )


def _show_progress(step: int, total: int, loss: float) -> None:
    run_progress.report(step, total, "steps")
