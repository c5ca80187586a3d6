"""Samples from the module that is being trained, through transformers' own `generate`: no server, no second copy of the
weights.

Rows of one prompt share its prefill, and rows that have ended are dropped from the batch, so the work is that of the
tokens returned.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from offline_grpo.engine.engine import LocalEngine
from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.generation.decoding_graph import graphed_steps, has_graphs, shared_heads, with_fixed_size
from offline_grpo.generation.sampler import Draws, RowEnds, SeededSampler, filters, uniforms
from offline_grpo.model.adapters import LanguageModel, unwrapped
from offline_grpo.model.layers import decoder_of, not_compiled
from offline_grpo.model.load import context_length
from offline_grpo.model.scoring import eval_mode
from offline_grpo.model.text import end_ids
from offline_grpo.types import Completion, CompletionStream, SamplingParams, SamplingRequest, ServedWeights

REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's attention: on an H100 it rounds the same decoding step differently each time from 65 keys on."""

CACHE_NAMES = {"cache", "past_key_values"}
"""What models call the argument: the former since transformers 5.24."""

STAND_INS = ("image_token_id", "video_token_id", "audio_token_id")
"""Of composites: tokens in whose place features of a tower come."""


@dataclass
class TransformersClient(LocalEngine):
    """Samples from a transformers causal language model, or a peft model around one.

    A completion's logprobs are those of the distribution that it was sampled from (temperature, penalty and filters
    included); greedy completions have those of temperature 1. The same seeds give the same tokens, on the CPU whatever
    the batch size.

    Args:
        model: shared with the trainer; its mode and generation config are restored after each call.
        tokenizer: knows EOS, besides the model's generation config, and spells tokens for stop strings.
        batch_size: sequences decoded together.
    """

    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    weights: ServedWeights = field(default_factory=ServedWeights, init=False)

    def __post_init__(self) -> None:
        lacks = None if self._cache_name else "does not use a cache of keys and values"
        try:
            self._new_cache().get_seq_length()
        except ValueError:
            lacks = lacks or "has no layer with attention"
        if lacks is not None:
            fix = "so it cannot be sampled in process; use generation=vllm_server"
            raise ConfigError(f"generation=transformers: {type(self._lm).__name__} {lacks}, {fix}")

    @property
    def _lm(self) -> Any:
        """The transformers model, free of peft's wrapper; LoRA layers sit inside it."""
        return unwrapped(self.model)

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._lm.config.get_text_config(decoder=True))

    @cached_property
    def _cache_name(self) -> str:
        """What this model's forward calls its cache of keys and values; empty if it has none."""
        return next(iter(CACHE_NAMES & inspect.signature(self._lm.forward).parameters.keys()), "")

    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        """See `RolloutClient.generate`. All requests that are there are taken at once; prompts of like length are
        decoded together.

        Raises:
            ConfigError: an empty prompt, or one that with `max_new_tokens` exceeds the model's context.
            EngineError: the model's logits were not finite.
        """
        coming, num_before, is_over = iter(requests), 0, False
        while not is_over:
            taken: list[SamplingRequest] = []
            for request in coming:
                if request is None:
                    break
                taken.append(request)
            else:
                is_over = True
            for index, completions in self._generate(taken, sampling):
                yield num_before + index, completions
            num_before += len(taken)

    def _generate(self, requests: Sequence[SamplingRequest], sampling: SamplingParams) -> CompletionStream:
        self._check(requests, sampling)
        by_length = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
        rows = [(index, replicate) for index in by_length for replicate in range(requests[index].num_completions)]
        done: dict[int, list[Completion]] = defaultdict(list)
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            for (index, _), completion in zip(batch, self._complete(requests, batch, sampling), strict=True):
                done[index].append(completion)
                if len(done[index]) == requests[index].num_completions:
                    yield index, done.pop(index)

    def close(self) -> None:
        """The model is the trainer's."""

    @torch.no_grad()  # not inference_mode: tensors that the model caches while it samples must stay usable in training
    def _complete(
        self, requests: Sequence[SamplingRequest], batch: Sequence[tuple[int, int]], sampling: SamplingParams
    ) -> list[Completion]:
        """Decode B rows together, each a (request, replicate)."""
        place = {index: i for i, index in enumerate(dict.fromkeys(index for index, _ in batch))}
        prompts, prompt_of_row = [requests[index].prompt_ids for index in place], [place[index] for index, _ in batch]
        seeds = [requests[index].seed + replicate for index, replicate in batch]
        limits = [requests[index].max_new_tokens or sampling.max_new_tokens for index, _ in batch]
        eos_ids = end_ids(self._lm.generation_config, self.tokenizer)  # before a neutral one takes its place
        with sampling_state(self._lm), not_compiled(self._lm), sdpa_kernel(REPEATABLE), shared_heads():
            draws = self._sample(prompts, prompt_of_row, seeds, limits, sampling, eos_ids)
        if (bad := draws.first_non_finite()) is not None:
            row, step = bad
            where = f"token {step} after prompt {batch[row][0]}"
            raise EngineError(f"logits of {where} are not finite (weights version {self.weights.version})")
        return draws.completions(self.weights.version)

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        prompt_of_row: list[int],
        seeds: list[int],
        limits: list[int],
        sampling: SamplingParams,
        eos_ids: list[int],
    ) -> Draws:
        """A batch: completions of U distinct prompts, in B >= U rows, each of at most so many tokens."""
        lm, longest = self._lm, max(limits)
        index = torch.tensor(prompt_of_row, device=lm.device)  # [B]
        token_ids, mask = left_pad(prompts, lm.device)  # [U, P]
        cache = self._new_cache()
        if len(prompt_of_row) > len(prompts) and token_ids.shape[1] > 1:
            position_ids = (mask[:, :-1].cumsum(-1) - 1).clamp(min=0)
            inputs = {"input_ids": token_ids[:, :-1], "attention_mask": mask[:, :-1], "position_ids": position_ids}
            decoder_of(lm)(**inputs, use_cache=True, **{self._cache_name: cache})  # without logits
            _keep_rows(cache, index)
        cache = with_fixed_size(cache, lm, token_ids.shape[1] + longest) if has_graphs(lm) else cache
        token_ids, mask = token_ids[index], mask[index]  # [B, P]
        draws = Draws(limits, lm.device)
        noise = None if sampling.temperature == 0 else uniforms(seeds, longest).to(lm.device)  # [B, N]
        processors = LogitsProcessorList([*filters(sampling), SeededSampler(draws, noise)])
        ends = StoppingCriteriaList([RowEnds(draws, eos_ids, sampling.stop, self.tokenizer)])
        while True:
            if hasattr(lm.base_model, "rope_deltas"):  # Qwen-VL's and its like keep what images did to the rows before
                lm.base_model.rope_deltas = None
            config = GenerationConfig(max_new_tokens=draws.num_steps_left, do_sample=False, use_cache=True)
            with graphed_steps(lm):
                token_ids = lm.generate(
                    token_ids,
                    attention_mask=mask,
                    **{self._cache_name: cache},
                    generation_config=config,
                    logits_processor=processors,
                    stopping_criteria=ends,
                    synced_gpus=False,  # of sharded weights this process has all while it samples
                )  # [R, P + step]
            kept = draws.keep_unended()  # [R']
            if len(kept) == 0 or draws.num_steps_left == 0:
                return draws
            token_ids, mask = token_ids[kept], pad(mask[kept], (0, token_ids.shape[1] - mask.shape[1]), value=1)
            _keep_rows(cache, kept)

    def _check(self, requests: Sequence[SamplingRequest], sampling: SamplingParams) -> None:
        context = context_length(self._lm.config)
        for index, request in enumerate(requests):
            prompt, limit = request.prompt_ids, request.max_new_tokens or sampling.max_new_tokens
            if len(prompt) == 0:
                raise ConfigError(f"prompt {index} has no tokens; check the task's messages and the chat template")
            if context is not None and len(prompt) + limit > context:
                has = f"prompt {index} has {len(prompt)} tokens and the model's context is {context}"
                fix = f"use {max(context - len(prompt), 0)} or less, or leave out problems with longer prompts"
                raise ConfigError(f"generation.max_new_tokens={limit}: {has}; {fix}")


def _keep_rows(cache: Cache, rows: Tensor) -> None:
    """Make these rows the cache's; a row may come several times."""
    # states of convolutions lack `batch_select_indices`
    cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]  # an int64 tensor by another name


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [B, P] and mask [B, P], int64. A row is padded with its own first token, so that a repetition penalty
    sees no token that is not in the prompt.

    Example: prompts 5 6 7 and 8 give 5 6 7 / 8 8 8 and 1 1 1 / 0 0 1.
    """
    width = max(map(len, prompts))
    token_ids = [[prompt[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(token_ids, device=device), torch.tensor(mask, device=device)


@contextmanager
def sampling_state(lm: Any) -> Iterator[None]:
    """Inside: dropout off, a neutral generation config, because `generate` takes defaults from the model's own, and no
    token that stands for an image: Gemma 4 would read such a one that was sampled as padding, and training does not.
    """
    own_config = lm.generation_config
    lm.generation_config = GenerationConfig()
    stand_ins = {name: number for name in STAND_INS if (number := getattr(lm.config, name, None)) is not None}
    for name in stand_ins:
        setattr(lm.config, name, -1)
    try:
        with eval_mode(lm):
            yield
    finally:
        lm.generation_config = own_config
        for name, number in stand_ins.items():
            setattr(lm.config, name, number)
