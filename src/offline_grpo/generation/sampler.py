"""Draws tokens inside transformers' `generate`: each row from a random stream of its own, each token with its logprob.

B rows are a batch, R <= B of them are still being generated, N is `max_new_tokens`, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from offline_grpo import progress
from offline_grpo.types import Completion, FinishReason, SamplingParams

_LOW_BITS = 2**64 - 1


class Draws:
    """What the rows of a batch have drawn so far, all at the same step. A row's tokens after `ended`, or beyond its own
    limit, mean nothing.
    """

    def __init__(self, limits: Sequence[int], device: torch.device) -> None:
        num_rows, max_new_tokens = len(limits), max(limits)
        self.limits = None if min(limits) == max_new_tokens else torch.tensor(limits, device=device)  # [B]
        self.token_ids = torch.zeros(num_rows, max_new_tokens, dtype=torch.int64, device=device)  # [B, N]
        self.logprobs = torch.zeros(num_rows, max_new_tokens, dtype=torch.float32, device=device)  # [B, N], nats
        self.num_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)  # [B]
        self.ended = torch.zeros(num_rows, dtype=torch.bool, device=device)  # [B]: by EOS or a stop string
        self.rows = torch.arange(num_rows, device=device)  # [R]: those of the B rows that `generate` still has
        self.step = 0

    @property
    def num_steps_left(self) -> int:
        return self.token_ids.shape[1] - self.step

    def keep_unended(self) -> Tensor:
        """Narrow `rows` to those that go on; their positions among the former ones."""
        kept = self.goes_on().nonzero().squeeze(-1)  # [R']
        self.rows = self.rows[kept]
        return kept

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
        return [
            Completion(
                token_ids=tuple(token_ids[:length]),
                logprobs=tuple(logprobs[:length]),
                finish_reason=FinishReason.STOP if has_ended else FinishReason.LENGTH,
                versions=(version,) * length,
            )
            for token_ids, logprobs, length, has_ended in zip(*columns, strict=True)
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
        at_its_start["state"]["key"][:] = seed & _LOW_BITS, seed >> 64
        generator.bit_generator.state = at_its_start
        generator.random(out=row, dtype=np.float32)
    return torch.from_numpy(rows)


class SeededSampler(LogitsProcessor):
    """The last logits processor: picks each row's token, writes it into `draws`, and makes it the only choice.

    A token is picked by inverting the cumulative distribution at the row's own random number, so that a completion does
    not depend on its batch or on torch's random state. With `uniforms` None the most probable token is picked.
    """

    def __init__(self, draws: Draws, uniforms: Tensor | None) -> None:
        self._draws = draws
        self._uniforms = uniforms  # [B, N]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        draws = self._draws
        probs = scores.softmax(-1)  # [R, V]
        if self._uniforms is None:
            tokens = probs.argmax(-1)  # [R]
        else:
            tokens = invert_cdf(probs, self._uniforms[draws.rows, draws.step])
        draws.token_ids[draws.rows, draws.step] = tokens
        draws.logprobs[draws.rows, draws.step] = probs.gather(1, tokens[:, None]).squeeze(1).log()
        draws.step += 1
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
            ends |= self._spells_stop()
        draws.ended[draws.rows] |= ends & goes_on
        over = ~draws.goes_on()
        return over | (2 * over.sum() >= len(over))  # type: ignore[return-value]

    def _spells_stop(self) -> Tensor:
        draws = self._draws
        newest = draws.token_ids[draws.rows, max(0, draws.step - self._window) : draws.step]  # [R, <= window]
        texts = self._tokenizer.batch_decode(newest, skip_special_tokens=False)
        return torch.tensor([any(string in text for string in self._stop) for text in texts], device=newest.device)
