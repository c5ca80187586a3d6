"""Proves a layout, and compiled blocks, on the model itself: a few short sequences must get the logprobs and gradients
that they get one at a time.

Layouts put sequences side by side, and not every architecture keeps them apart: convolutions and recurrences continue
from one to the next, and some attention ignores masks. The ratio of a loss would hide it: old and new are wrong alike.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Layout
from offline_grpo.model.adapters import has_adapters
from offline_grpo.model.layers import (
    compile_blocks,
    is_compiled,
    not_compiled,
    num_blocks,
    uncompile_blocks,
)
from offline_grpo.model.layouts import layouts_for
from offline_grpo.model.layouts.varlen import Flash4, flash4_interface
from offline_grpo.model.scoring import Scoring, eval_mode, prepare_for_gradients
from offline_grpo.types import TokenBatch

log = logging.getLogger(__name__)

Group = tuple[int, tuple[int, ...]]
GROUPS: Sequence[Group] = ((12, (3, 5, 2, 4)), (2, (7, 1, 6, 4)), (5, (2, 9)))
"""Tokens of each prompt, and of its completions. Short ones: what leaks from a neighbour fades with the distance."""
LONG_GROUP = (150, (4,))
"""Besides, on GPUs: attention kernels walk blocks of up to 128 tokens, with code of their own where one is enough. Its
completion is short, so that errors of the others still show in the mean."""
LONGEST = {"cpu": 512, "cuda": 4096}
"""Tokens of the sequences that causality and sampling are proven with, at most: 0.1 s for the default model."""
NUM_GRADIENTS = 4
LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
GRADIENT_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.2, torch.float16: 0.2}
"""Relative errors. Right layouts of small models stay below 1e-6 in fp32, and below 0.006 (logprobs) and 0.03
(gradients) in 16 bit. Wrong ones begin at 0.08."""
SHALLOW_BLOCKS = 8
"""Of models with more blocks, errors may be larger, by the square root of their number: so rounding grows. Right
layouts of 4 and 12 blocks of Llama-3.1-8B's shape have 0.015 and 0.025 in bf16."""


class _Result(NamedTuple):
    logprobs: Tensor  # [N], of the completion tokens
    gradients: list[Tensor]  # of a weighted sum of them, in the first trained tensors


def import_ahead(layout: Layout | None, compiles: bool | str, device: torch.device, dtype: torch.dtype) -> None:
    """Import what `settle_layout` and `settle_compile` need on `device`, which takes seconds, while a server starts."""
    if any(isinstance(each, Flash4) for each in layouts_for(layout, device, dtype)):
        with suppress(Exception):  # `settle_layout` says why, and goes on without it
            flash4_interface()
    if is_compiled(compiles, device):
        import_module("torch._inductor.compile_fx")


def settle_layout(
    scoring: Scoring, requested: Layout | None, device: torch.device, *, key: str = "model.train_id"
) -> None:
    """Set `scoring.layout`: to `requested`, or for None (`auto`) to the fastest that is right, padded rows in the end.

    Args:
        key: the setting that named the model, for messages.

    Raises:
        ConfigError: `requested` is wrong for this model, or no layout is right.
    """
    model = scoring.causal_lm
    batch = _batch(scoring, device)
    expected = _alone(scoring, batch)
    if has_adapters(scoring.model):  # now, so that the passes of the layouts prove it too
        from offline_grpo.model.lora_layer import share_inputs  # which imports peft

        first = batch.token_ids[None, : batch.sequence_lengths[0]]
        with torch.no_grad(), eval_mode(scoring.model):
            share_inputs(scoring.model, lambda: model(input_ids=first, use_cache=False))
    faults: list[str] = []
    fault = None
    for scoring.layout in layouts_for(requested, device, model.dtype):
        fault = _fault(scoring, batch, expected)
        name = type(scoring.layout).__name__.lower()
        if fault is None:
            if requested is None and (faults or device.type == "cuda"):  # on a CPU it is nearly always `tree`
                log.info("model.layout=auto: %s%s", name, f", because {'; '.join(faults)}" if faults else "")
            return
        faults.append(f"{name} is wrong for {type(model).__name__}: {fault}")
        if requested is not None and name != "padded":
            raise ConfigError(f"model.layout={name}: wrong for {type(model).__name__}, {fault}; use model.layout=auto")
    raise ConfigError(
        f"{key}={model.name_or_path}: {type(model).__name__} cannot be scored in batches: {fault}; choose another model"
    )


def settle_compile(
    scoring: Scoring, requested: bool | str, device: torch.device, *, key: str = "model.train_id"
) -> None:
    """Compile the model's blocks, where `requested` (`model.compile`) is true, or `auto` and `device` has a default for
    it. Blocks that cannot be compiled, or compute something else then, stay as they are under `auto`.

    Called once the layout is settled.

    Raises:
        ConfigError: they cannot be compiled, or are wrong then, and `requested` is true.
    """
    if not is_compiled(requested, device):
        return
    model = scoring.causal_lm
    batch = _batch(scoring, device)
    expected = _alone(scoring, batch)
    started, name, setting = time.monotonic(), type(model).__name__, f"model.compile={str(requested).lower()}"
    try:
        compile_blocks(model)
        fault = _fault(scoring, batch, expected)
    except ConfigError as error:  # no list of blocks
        fault = str(error)
    if fault is None:
        log.info("%s: compiled the blocks of %s in %.0f s", setting, key, time.monotonic() - started)
        return
    uncompile_blocks(model)
    if requested is True:
        raise ConfigError(f"{setting}: does not work with {name} ({key}), {fault}; use auto or false")
    fix = "if memory runs out, set model.compile=false, which the memory plan counts with"
    log.warning("%s: not compiled, because %s does not work then: %s; %s", setting, name, fault, fix)


def check_causality(scoring: Scoring, num_tokens: int, device: torch.device, *, key: str = "model.train_id") -> None:
    """See that no logprob depends on what follows, in a sequence as long as the run's: the most of it must score alike
    alone. Sparse attention (DeepSeek-V3.2, Doge) may choose other tokens in longer sequences, once it cannot keep all.

    Raises:
        ConfigError: one does.
    """
    model, most = scoring.causal_lm, num_tokens * 7 // 8
    token_ids = draw_ids(len(scoring.output.weight), num_tokens, torch.Generator().manual_seed(0))

    def scored(length: int) -> Tensor:
        batch = _flat([token_ids[:length]], [torch.arange(length) > 0]).to(device)
        return scoring.logprobs(batch)[1:most]

    with not_compiled(model):
        whole, alone = scored(num_tokens), scored(most)
    if not _logprob_error(whole, alone) <= _logprob_tolerance(scoring):
        by = f"{(whole - alone).abs().mean():.2g} nats on average in sequences of {num_tokens} tokens"
        fault = f"is not causal: what follows a token changes its logprob, by {by}"
        fix = "use shorter prompts and a lower generation.max_new_tokens, or choose another model"
        raise ConfigError(f"{key}={model.name_or_path}: {type(model).__name__} {fault}; {fix}")


def _batch(scoring: Scoring, device: torch.device, groups: Sequence[Group] = GROUPS) -> TokenBatch:
    vocab_size = len(scoring.output.weight)
    longest = getattr(scoring.causal_lm.config.get_text_config(), "max_position_embeddings", None)
    prompt, completions = LONG_GROUP
    if device.type == "cuda" and (longest is None or prompt + max(completions) <= longest):
        groups = (*groups, LONG_GROUP)
    generator = torch.Generator().manual_seed(0)
    sequences: list[Tensor] = []
    is_completion: list[Tensor] = []
    for prompt_length, completion_lengths in groups:
        prompt = draw_ids(vocab_size, prompt_length, generator)
        sequences += [torch.cat([prompt, draw_ids(vocab_size, n, generator)]) for n in completion_lengths]
        is_completion += [torch.arange(prompt_length + length) >= prompt_length for length in completion_lengths]
    return _flat(sequences, is_completion).to(device)


def draw_ids(vocab_size: int, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Random token ids [num_tokens], without the first ones, which are often special."""
    return torch.randint(min(8, vocab_size // 2), vocab_size, (num_tokens,), generator=generator)


def _flat(sequences: list[Tensor], is_completion: list[Tensor]) -> TokenBatch:
    lengths = tuple(map(len, sequences))
    zeros = torch.zeros(sum(lengths))
    return TokenBatch(
        token_ids=torch.cat(sequences),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        completion_mask=torch.cat(is_completion),
        advantages=zeros,
        rollout_logprobs=zeros,
        old_logprobs=zeros,
        ref_logprobs=None,
        temperature=zeros + 1,
        sequence_lengths=lengths,
    )


def _alone(scoring: Scoring, batch: TokenBatch) -> _Result:
    """By transformers' own forward, from token ids to logits, with one sequence at a time."""
    parameters = _probed(scoring)
    weights = _weights(batch)
    logprobs: list[Tensor] = []
    gradients = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    ends = torch.tensor((0, *batch.sequence_lengths)).cumsum(0).tolist()
    with eval_mode(scoring.model):
        for start, end in pairwise(ends):
            ids, mask = batch.token_ids[start:end], batch.completion_mask[start:end]
            logits = scoring.causal_lm(input_ids=ids[None], use_cache=False).logits[0]  # [L, V]
            found = logits[:-1].float().log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)[mask[1:]]
            found_gradients = _gradients(found @ weights[start:end][mask], parameters)
            gradients = [total + gradient for total, gradient in zip(gradients, found_gradients, strict=True)]
            logprobs.append(found.detach())
    return _Result(torch.cat(logprobs), gradients)


def _packed(scoring: Scoring, batch: TokenBatch) -> _Result:
    """By the code that trains, in the mode in which it trains, but without dropout on adapters."""
    prepare_for_gradients(scoring.model, adapter_dropout=False)
    found = scoring(batch).logprobs[batch.completion_mask]
    with scoring.attention(batch):
        gradients = _gradients(found @ _weights(batch)[batch.completion_mask], _probed(scoring))
    scoring.model.eval()
    return _Result(found.detach(), gradients)


def _fault(scoring: Scoring, batch: TokenBatch, expected: _Result) -> str | None:
    """The fault of `scoring.layout`, None if it has none."""
    try:
        found = _packed(scoring, batch)
        scored = scoring.logprobs(batch)[batch.completion_mask]  # compiled blocks have code of their own for it
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever an architecture raises when it is called in a way that it does not know
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    for logprobs in (found.logprobs, scored):
        if not _logprob_error(logprobs, expected.logprobs) <= _logprob_tolerance(scoring):
            difference = (logprobs - expected.logprobs).abs().mean()
            return f"logprobs differ from those of one sequence at a time by {difference:.2g} nats on average"
    error = _gradient_error(found.gradients, expected.gradients)
    if not error <= GRADIENT_TOLERANCE[scoring.causal_lm.dtype] * _growth(scoring):
        return f"gradients differ from those of one sequence at a time by {error:.0%}"
    return None


def _growth(scoring: Scoring) -> float:
    return math.sqrt(max(1.0, num_blocks(scoring.causal_lm) / SHALLOW_BLOCKS))


def _logprob_tolerance(scoring: Scoring) -> float:
    return LOGPROB_TOLERANCE[scoring.causal_lm.dtype] * _growth(scoring)


def _logprob_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square, relative to the spread among tokens, which grows with the logits as their rounding does."""
    return ((found - expected).square().mean().sqrt() / expected.std()).item()


def _gradient_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Root mean square, relative to the gradient."""
    wrong = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    size = sum(float(b.square().sum()) for b in expected)
    if size == 0:  # nothing is trained, or all of it is behind a zero: what is there must be zero too
        return 0.0 if wrong == 0 else math.inf
    return math.sqrt(wrong / size)


def _probed(scoring: Scoring) -> list[nn.Parameter]:
    """The first trained tensors; without embeddings, whose gradients are large."""
    embeddings = {id(scoring.output.weight), id(scoring.causal_lm.get_input_embeddings().weight)}
    return [p for p in scoring.model.parameters() if p.requires_grad and id(p) not in embeddings][:NUM_GRADIENTS]


def _weights(batch: TokenBatch) -> Tensor:
    """A weight for each token [T], so that errors do not cancel in the sum of logprobs."""
    return torch.linspace(-1, 1, len(batch.token_ids), device=batch.token_ids.device)


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    if not parameters:
        return []
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return [gradient.float() for gradient in found]
