"""Samples from the module that is being trained, through transformers' own `generate`: no server, no second copy of the
weights.

Rows of one prompt share its prefill, a turn of an episode goes on from the keys and values of those before it, and
rows that have ended are dropped from the batch, so the work is that of new tokens. Each row draws from a random stream
of its own, and each token comes with its logprob.

Shapes: B rows are a batch, R <= B of them are still being generated; U prompts; N is `max_new_tokens`, V the size of
the vocabulary.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import (
    DynamicCache,
    DynamicLayer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from offline_grpo import progress
from offline_grpo.engine.engine import LocalEngine
from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.generation.decoding_graph import graphed_steps, has_graphs, shared_heads, with_fixed_size
from offline_grpo.generation.prefixes import Prefixes, fill, num_equal
from offline_grpo.model.adapters import LanguageModel, unwrapped
from offline_grpo.model.layers import STAND_INS, decoder_of, not_compiled
from offline_grpo.model.load import context_length
from offline_grpo.model.pictures import Vision
from offline_grpo.model.scoring import eval_mode
from offline_grpo.model.text import end_ids
from offline_grpo.types import (
    Completion,
    CompletionStream,
    FinishReason,
    Picture,
    SamplingParams,
    SamplingRequest,
    ServedWeights,
)

LOW_BITS = 2**64 - 1
REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's attention: on an H100 it rounds the same decoding step differently each time from 65 keys on."""

WORTH_TOKENS = 32
"""So many more tokens are worth a forward pass, or a batch, of their own."""

CACHE_NAMES = {"cache", "past_key_values"}  # what models call the argument: the former since transformers 5.24


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
        vision: of a run with pictures.
    """

    tells_alternatives: ClassVar[bool] = True
    shows_pictures: ClassVar[bool] = True
    model: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    vision: Vision | None = None
    weights: ServedWeights = field(default_factory=ServedWeights, init=False)
    _lm: Any = field(init=False)  # the transformers model, free of peft's wrapper; LoRA layers sit inside it
    _cache_name: str = field(init=False)  # of its forward's argument
    _keeps_all: bool = field(init=False)  # whether its cache has every token: no sliding window, no recurrent state

    def __post_init__(self) -> None:
        self._lm = unwrapped(self.model)
        self._cache_name = next(iter(CACHE_NAMES & inspect.signature(self._lm.forward).parameters.keys()), "")
        lacks = None if self._cache_name else "does not use a cache of keys and values"
        cache = self._empty_cache()
        self._keeps_all = all(type(layer) is DynamicLayer for layer in cache.layers)
        try:
            cache.get_seq_length()
        except ValueError:
            lacks = lacks or "has no layer with attention"
        if lacks is not None:
            fix = "so it cannot be sampled in process; use generation=vllm_server"
            raise ConfigError(f"generation=transformers: {type(self._lm).__name__} {lacks}, {fix}")

    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        """See `RolloutClient.generate`. All requests that are there are taken at once; prompts of like length are
        decoded together.
        """
        coming, num_before, is_over = iter(requests), 0, False
        kept = Prefixes(capacity=self.batch_size)
        context = context_length(self._lm.config)
        while not is_over:
            taken: list[SamplingRequest] = []
            for request in coming:
                if request is None:
                    break
                taken.append(replace(request, episode=None) if request.pictures else request)
            else:
                is_over = True
            # 1. What does not fit into the model's context is refused before anything is computed.
            for index, request in enumerate(taken):
                prompt, limit = request.prompt_ids, request.max_new_tokens or sampling.max_new_tokens
                if len(prompt) == 0:
                    raise ConfigError(f"prompt {index} has no tokens; check the task's messages and the chat template")
                if context is not None and len(prompt) + limit > context:
                    has = f"prompt {index} has {len(prompt)} tokens and the model's context is {context}"
                    fix = f"use {context - len(prompt)} or less, or " if len(prompt) < context else ""
                    fix += "leave out longer prompts (data.max_prompt_tokens)"
                    raise ConfigError(f"generation.max_new_tokens={limit}: {has}; {fix}")
            # 2. Rows are (request, replicate), those with the fewest new tokens first; a batch may have parts of
            #    several requests. Its rows all compute as many tokens, so a new prompt does not join further turns.
            known = [0 if each.episode is None else kept.longest(each.episode, each.prompt_ids)[0] for each in taken]
            num_new = [len(request.prompt_ids) - own for request, own in zip(taken, known, strict=True)]
            by_work = sorted(range(len(taken)), key=lambda index: (num_new[index], len(taken[index].prompt_ids)))
            rows = [(index, replicate) for index in by_work for replicate in range(taken[index].num_completions)]
            done: dict[int, list[Completion]] = defaultdict(list)
            while rows:
                first = rows[0][0]
                most = 2 * num_new[first] + WORTH_TOKENS if known[first] else max(num_new)
                size = sum(num_new[index] <= most for index, _ in rows[: self.batch_size])
                batch, rows = rows[:size], rows[size:]
                draws = self._decode(taken, batch, sampling, kept)
                if (bad := draws.first_non_finite()) is not None:
                    where = f"token {bad[1]} after prompt {batch[bad[0]][0]}"
                    raise EngineError(f"logits of {where} are not finite (weights version {self.weights.version})")
                for (index, _), completion in zip(batch, draws.completions(self.weights.version), strict=True):
                    done[index].append(completion)
                    if len(done[index]) == taken[index].num_completions:
                        yield num_before + index, done.pop(index)
            num_before += len(taken)

    @torch.no_grad()  # not inference_mode: tensors that the model caches while it samples must stay usable in training
    def _decode(
        self,
        requests: Sequence[SamplingRequest],
        batch: Sequence[tuple[int, int]],
        sampling: SamplingParams,
        kept: Prefixes,
    ) -> Draws:
        """Completions of U distinct prompts, in B >= U rows, each a (request, replicate)."""
        lm = self._lm
        eos_ids = end_ids(lm.generation_config, self.tokenizer)  # before a neutral one takes its place
        asked = [requests[index] for index, _ in batch]  # [B]
        episodes = {(request.prompt_ids, request.pictures): request.episode for request in asked}  # of the U prompts
        prompts = [prompt for prompt, _ in episodes]
        pictures = [*chain.from_iterable(own for _, own in episodes)]
        limits = [request.max_new_tokens or sampling.max_new_tokens for request in asked]
        never = () if self.vision is None else self.vision.stand_ins
        with sampling_state(lm, has_pictures=bool(pictures)), not_compiled(lm), sdpa_kernel(REPEATABLE), shared_heads():
            # 1. Prompts are padded at the left, each with its own first token that no feature comes in place of: a
            #    repetition penalty sees none that it lacks.
            place = {prompt: i for i, prompt in enumerate(episodes)}
            rows = torch.tensor([place[each.prompt_ids, each.pictures] for each in asked], device=lm.device)  # [B]
            width = max(map(len, prompts))
            blanks = [width - len(prompt) for prompt in prompts]
            firsts = [next(token for token in prompt if token not in never) for prompt in prompts]
            padded = [[x] * blank + [*own] for x, blank, own in zip(firsts, blanks, prompts, strict=True)]
            masks = [[0] * blank + [1] * len(prompt) for prompt, blank in zip(prompts, blanks, strict=True)]
            token_ids, mask = torch.tensor(padded, device=lm.device), torch.tensor(masks, device=lm.device)  # [U, P]

            # 2. Those of episodes begin with what is kept. What all begin with, such as instructions, is computed once.
            cache, num_new = self._empty_cache(), width
            is_played = self._keeps_all and None not in episodes.values()
            if is_played:
                first, last = min(prompts), max(prompts)  # in this order, which differ soonest
                beginning = first[: num_equal(first, last)]
                known = kept.longest(None, beginning)
                if len(prompts) > 1 and len(beginning) - known[0] > WORTH_TOKENS:
                    own, ids = self._empty_cache(), torch.tensor([beginning], device=lm.device)
                    fill(own, [known])
                    self._prefill(own, ids, torch.ones_like(ids), known[0])
                    kept.keep(beginning, beginning, own, row=0, start=0)
                found = [kept.longest(episode, prompt) for (prompt, _), episode in episodes.items()]
                num_new = max(len(prompt) - length for prompt, (length, _) in zip(prompts, found, strict=True))
                pairs = zip(prompts, found, strict=True)
                fill(cache, [(max(len(prompt) - num_new, 0), prefix) for prompt, (_, prefix) in pairs])

            # 3. Rows of one prompt share the prefill, but for its last token, with which `generate` begins. Only here
            #    pictures are looked at.
            deltas = None
            if (len(batch) > len(prompts) or pictures) and width > 1:
                if num_new > 1:
                    self._prefill(cache, token_ids[:, :-1], mask[:, :-1], width - num_new, pictures)
                if pictures and self._has_deltas:
                    deltas = lm.base_model.rope_deltas[rows]
                cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]  # a row may come several times
            if has_graphs(lm) or is_played:  # a growing cache is copied at each step, long histories too
                cache = with_fixed_size(cache, lm, width + max(limits))
            token_ids, mask = token_ids[rows], mask[rows]  # [B, P]

            # 4. The last logits processor draws the tokens, from random numbers of each row's own.
            draws = Draws(limits, lm.device, with_alternatives=sampling.needs_alternatives)
            seeds = [requests[index].seed + replicate for index, replicate in batch]
            noise = None if sampling.temperature == 0 else uniforms(seeds, max(limits)).to(lm.device)  # [B, N]
            suppressed = [SuppressTokensLogitsProcessor(never, device=lm.device)] if never else []
            processors = LogitsProcessorList([*suppressed, *filters(sampling), SeededSampler(draws, noise)])
            ends = StoppingCriteriaList([RowEnds(draws, eos_ids, sampling.stop, self.tokenizer)])
            # 5. Whenever half of the rows have ended, the others go on without them.
            while True:
                if self._has_deltas:
                    lm.base_model.rope_deltas = deltas
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
                goes_on = draws.goes_on() & (draws.num_steps_left > 0)  # [R]
                # What an episode said stays for its next turn, but for the last token, which has not been computed.
                for row in (~goes_on).nonzero().squeeze(-1).tolist() if self._keeps_all else ():
                    number = int(draws.rows[row])
                    request, start = asked[number], width - len(asked[number].prompt_ids)
                    if request.episode is not None:
                        ids = token_ids[row, start : width + int(draws.num_tokens[number]) - 1].tolist()
                        kept.keep(request.episode, ids, cache, row=row, start=start)
                left = goes_on.nonzero().squeeze(-1)  # [R'], positions in the former rows
                draws.rows = draws.rows[left]
                if len(left) == 0:
                    return draws
                deltas = None if deltas is None else deltas[left]
                token_ids, mask = token_ids[left], pad(mask[left], (0, token_ids.shape[1] - mask.shape[1]), value=1)
                cache.reorder_cache(left)  # pyright: ignore[reportArgumentType]  # an int64 tensor by another name

    def _empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self._lm.config.get_text_config(decoder=True))

    @property
    def _has_deltas(self) -> bool:
        """Whether the model, as Qwen-VL's, keeps how far a picture moves the positions behind it, of each row."""
        return hasattr(self._lm.base_model, "rope_deltas")

    def _prefill(
        self, cache: DynamicCache, token_ids: Tensor, mask: Tensor, num_cached: int, pictures: Sequence[Picture] = ()
    ) -> None:
        """Compute keys and values of tokens [U, P] behind the first `num_cached` columns, without logits."""
        inputs = {"input_ids": token_ids[:, num_cached:], "attention_mask": mask, self._cache_name: cache}
        if not (pictures and self._has_deltas):
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, num_cached:]
        forward: Any = decoder_of(self._lm)
        if pictures:
            assert self.vision is not None
            forward = partial(self.vision.forward, self._lm, pictures)
        forward(**inputs, use_cache=True)


@contextmanager
def sampling_state(lm: Any, *, has_pictures: bool) -> Iterator[None]:
    """Inside: dropout off, a neutral generation config, because `generate` takes defaults from the model's own, and
    without pictures no token that stands for one: Gemma 4 would read such a one that was sampled as padding, and
    training does not.
    """
    own_config = lm.generation_config
    lm.generation_config = GenerationConfig()
    names = () if has_pictures else STAND_INS
    stand_ins = {name: number for name in names if (number := getattr(lm.config, name, None)) is not None}
    for name in stand_ins:
        setattr(lm.config, name, -1)
    try:
        with eval_mode(lm):
            yield
    finally:
        lm.generation_config = own_config
        for name, number in stand_ins.items():
            setattr(lm.config, name, number)


class Draws:
    """What the rows of a batch have drawn so far, all at the same step. A row's tokens after `ended`, or beyond its own
    limit, mean nothing.
    """

    def __init__(self, limits: Sequence[int], device: torch.device, *, with_alternatives: bool = False) -> None:
        num_rows, max_new_tokens = len(limits), max(limits)
        self.limits = None if min(limits) == max_new_tokens else torch.tensor(limits, device=device)  # [B]
        self.token_ids = torch.zeros(num_rows, max_new_tokens, dtype=torch.int64, device=device)  # [B, N]
        self.logprobs = torch.zeros(num_rows, max_new_tokens, dtype=torch.float32, device=device)  # [B, N], nats
        self.num_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)  # [B]
        self.ended = torch.zeros(num_rows, dtype=torch.bool, device=device)  # [B]: by EOS or a stop string
        self.rows = torch.arange(num_rows, device=device)  # [R]: those of the B rows that `generate` still has
        self.alternatives: list[tuple[Tensor, Tensor]] | None = [] if with_alternatives else None
        """Of each step rows of B and tokens, [pairs] each: what filters have left beside what was drawn."""
        self.step = 0

    @property
    def num_steps_left(self) -> int:
        return self.token_ids.shape[1] - self.step

    def goes_on(self) -> Tensor:
        """Whether each of `rows` [R] has neither ended nor reached a limit before that of the others."""
        goes_on = ~self.ended[self.rows]
        if self.limits is not None:  # eight kernels a step, which most batches do not need
            goes_on &= self.num_tokens[self.rows] < self.limits[self.rows]
        return goes_on

    def first_non_finite(self) -> tuple[int, int] | None:
        """Row and step of the first token whose logprob is not a finite number: the model's logits were not."""
        steps = torch.arange(self.logprobs.shape[1], device=self.logprobs.device)
        is_drawn = steps < self.num_tokens[:, None]  # [B, N]
        bad = (is_drawn & ~self.logprobs.isfinite()).nonzero()
        return (int(bad[0, 0]), int(bad[0, 1])) if len(bad) else None

    def completions(self, version: int) -> list[Completion]:
        """One completion for each of the B rows."""
        columns = (x.tolist() for x in (self.token_ids, self.logprobs, self.num_tokens, self.ended))
        sets: list[list[list[int]]] = [[[] for _ in self.alternatives or ()] for _ in self.ended]  # [B][step]
        for step, pairs in enumerate(self.alternatives or ()):
            for row, token in zip(*(x.tolist() for x in pairs), strict=True):
                sets[row][step].append(token)
        return [
            Completion(
                token_ids=tuple(token_ids[:length]),
                logprobs=tuple(logprobs[:length]),
                finish_reason=FinishReason.STOP if has_ended else FinishReason.LENGTH,
                versions=(version,) * length,
                alternatives=None if self.alternatives is None else tuple(map(tuple, own[:length])),
            )
            for token_ids, logprobs, length, has_ended, own in zip(*columns, sets, strict=True)
        ]


def filters(sampling: SamplingParams) -> list[LogitsProcessor]:
    """transformers' processors that turn logits into the logits of the sampling distribution, in vLLM's order.

    Greedy decoding takes the most probable token before temperature, min-p, top-k and top-p, none of which changes it.
    """
    chain: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature == 0:
        return chain
    if sampling.temperature != 1:
        chain.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.min_p > 0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    return chain


def uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """Random numbers [B, length] in [0, 1), row i from seed i alone, all of whose bits count up to the 128th.

    The seed is the key of a Philox generator (Salmon et al., SC 2011), which makes unrelated streams of related keys.
    One generator is given one key after the other: a new one for each row would take four times as long.
    """
    generator = np.random.Generator(np.random.Philox(key=0))
    at_its_start = generator.bit_generator.state
    rows = np.empty((len(seeds), length), np.float32)
    for row, seed in zip(rows, seeds, strict=True):
        at_its_start["state"]["key"][:] = seed & LOW_BITS, seed >> 64
        generator.bit_generator.state = at_its_start
        generator.random(out=row, dtype=np.float32)
    return torch.from_numpy(rows)


@dataclass(eq=False)
class SeededSampler(LogitsProcessor):
    """The last logits processor: picks each row's token, writes it into `draws`, and makes it the only choice.

    A token is picked by inverting the cumulative distribution at the row's own random number, so that a completion does
    not depend on its batch or on torch's random state. With `uniforms` None the most probable token is picked.
    """

    draws: Draws
    uniforms: Tensor | None  # [B, N]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        draws = self.draws
        probs = scores.softmax(-1)  # [R, V]
        noise = None if self.uniforms is None else self.uniforms[draws.rows, draws.step]
        tokens = probs.argmax(-1) if noise is None else invert_cdf(probs, noise)  # [R]
        draws.token_ids[draws.rows, draws.step] = tokens
        draws.logprobs[draws.rows, draws.step] = probs.gather(1, tokens[:, None]).squeeze(1).log()
        draws.step += 1
        if draws.alternatives is not None:
            left = (scores > -torch.inf).scatter_(1, tokens[:, None], False)
            rows, others = left.nonzero(as_tuple=True)
            draws.alternatives.append((draws.rows[rows], others))
        return torch.zeros_like(scores).scatter_(1, tokens[:, None], 1.0)  # type: ignore[return-value]  # [R, V], argmax = tokens


def invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The first token [R] at which the cumulative sum of `probs` [R, V] exceeds `uniforms` [R] times the total, which
    rounding moves off 1. A token of probability 0 adds nothing to the sum, so it is never the first.
    """
    # A GPU adds in changing order; in float32 the difference is as large as the probability of a rare token.
    cdf = probs.cumsum(-1, dtype=torch.float64 if probs.is_cuda else None)  # [R, V]
    # [R, 1], below the total because a random number is at most 1 - 2**-24
    thresholds = uniforms[:, None].to(cdf.dtype) * cdf[:, -1:]
    # NaN exceeds nothing: the clamp keeps the index valid until `first_non_finite` reports it
    return torch.searchsorted(cdf, thresholds, right=True).squeeze(1).clamp_(max=probs.shape[1] - 1)


class RowEnds(StoppingCriteria):
    """Marks the rows whose newest token ended them: by a token of `eos_ids`, or a string of `stop` in the text, where
    special tokens count, as for servers. Ends `generate` early once half of its rows have ended, so that they can be
    dropped.
    """

    def __init__(
        self, draws: Draws, eos_ids: Sequence[int], stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._draws = draws
        self._eos_ids = torch.tensor(eos_ids, dtype=torch.int64, device=draws.token_ids.device)
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        # A stop string has at most one token per byte; the tokens before them keep it off the text's start, where
        # decoders strip spaces
        self._window = max((len(string.encode()) for string in stop), default=0) + 4

    def __call__(self, input_ids: torch.LongTensor, scores: object, **kwargs: object) -> torch.BoolTensor:
        draws = self._draws
        progress.report(draws.step, draws.step + draws.num_steps_left, "tokens")  # of each completion of the batch
        goes_on = draws.goes_on()
        draws.num_tokens[draws.rows] += goes_on
        ends = torch.isin(input_ids[:, -1], self._eos_ids)  # [R]
        if self._stop:
            newest = draws.token_ids[draws.rows, max(0, draws.step - self._window) : draws.step]  # [R, <= window]
            texts = self._tokenizer.batch_decode(newest, skip_special_tokens=False)
            ends |= torch.tensor([any(string in text for string in self._stop) for text in texts], device=ends.device)
        draws.ended[draws.rows] |= ends & goes_on
        over = ~draws.goes_on()
        return over | (2 * over.sum() >= len(over))  # type: ignore[return-value]
