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
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed

from offline_grpo.errors import ConfigError, require
from offline_grpo.interfaces import Layout
from offline_grpo.model.adapters import has_adapters
from offline_grpo.model.layers import STAND_INS, compile_blocks, is_compiled, not_compiled, num_blocks
from offline_grpo.model.layouts import Flash4, flash4_interface, layouts_for
from offline_grpo.model.routes import Routers
from offline_grpo.model.scoring import Scoring, eval_mode, prepare_for_gradients
from offline_grpo.model.tiles import tiles_of
from offline_grpo.model.ulysses import Ulysses
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


def import_ahead(layout: Layout | None, compiles: bool | str, device: torch.device, dtype: torch.dtype) -> None:
    """Import what `settle_layout` and `settle_compile` need on `device`, which takes seconds, while a server starts."""
    if any(isinstance(each, Flash4) for each in layouts_for(layout, device, dtype)):
        with suppress(Exception):  # `settle_layout` says why, and goes on without it
            flash4_interface()
    if is_compiled(compiles, device):
        import_module("torch._inductor.compile_fx")


class Proof:
    """A few short sequences, and what transformers' own forward says of them, from token ids to logits, with one at a
    time: logprobs of their completion tokens [N], and the gradients of a weighted sum of those in the first trained
    tensors.
    """

    def __init__(self, scoring: Scoring, device: torch.device) -> None:
        self.scoring, self.batch = scoring, batch_for(scoring, device)
        self.mask, ids = self.batch.completion_mask, self.batch.token_ids
        self.weights = torch.linspace(-1, 1, len(ids), device=device)[self.mask]  # [N], so that errors do not cancel
        # without embeddings, whose gradients are large
        embeddings = {id(scoring.output.weight), id(scoring.causal_lm.get_input_embeddings().weight)}
        trained = [p for p in scoring.model.parameters() if p.requires_grad and id(p) not in embeddings]
        self.parameters = trained[:NUM_GRADIENTS]

        # What is right: one sequence at a time, in transformers' own forward, where nothing can leak from a neighbour.
        self.logprobs = torch.zeros(0, device=device)
        self.gradients = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        with eval_mode(scoring.model):
            for sequence, mask in zip(*(t.split(self.batch.sequence_lengths) for t in (ids, self.mask)), strict=True):
                logits = scoring.causal_lm(input_ids=sequence[None], use_cache=False).logits[0]  # [L, V]
                found = logits[:-1].float().log_softmax(-1).gather(1, sequence[1:, None]).squeeze(1)[mask[1:]]
                own = self.weights[len(self.logprobs) : len(self.logprobs) + len(found)]
                for total, gradient in zip(self.gradients, self._gradients(found @ own), strict=True):
                    total += gradient
                self.logprobs = torch.cat([self.logprobs, found.detach()])

    def fault(self) -> str | None:
        """What is wrong with the logprobs and gradients of the code that trains; None if nothing is."""
        scoring, batch = self.scoring, self.batch
        try:
            # In the mode in which it trains, but without dropout on adapters.
            prepare_for_gradients(scoring.model, adapter_dropout=False)
            found = scoring(batch).logprobs[self.mask]
            with scoring.attention(batch):
                gradients = self._gradients(found @ self.weights)
            if isinstance(scoring.layout, Ulysses):
                for gradient in gradients:  # of a slice
                    distributed.all_reduce(gradient, group=scoring.layout.group)
            scoring.model.eval()
            scored = scoring.logprobs(batch)[self.mask]  # compiled blocks have code of their own for it
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever an architecture raises when it is called in a way that it does not know
            return f"{type(error).__name__}: {' '.join(str(error).split())}"

        # Logprobs, with gradients and without.
        for logprobs in (found.detach(), scored):
            if not _agree(scoring, logprobs, self.logprobs):
                difference = (logprobs - self.logprobs).abs().mean()
                return f"logprobs differ from those of one sequence at a time by {difference:.2g} nats on average"

        # Gradients: the root mean square of the error, relative to the gradient. Where nothing is trained, or all of it
        # is behind a zero, what is there must be zero too.
        wrong = sum(float((a - b).square().sum()) for a, b in zip(gradients, self.gradients, strict=True))
        size = sum(float(b.square().sum()) for b in self.gradients)
        error = 0.0 if wrong == 0 else math.inf
        if size != 0:
            error = math.sqrt(wrong / size)
        if not error <= GRADIENT_TOLERANCE[scoring.causal_lm.dtype] * _growth(scoring):
            return f"gradients differ from those of one sequence at a time by {error:.0%}"
        return None

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        if not self.parameters:
            return []
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        return [gradient.float() for gradient in found]


def settle_layout(
    scoring: Scoring, requested: Layout | None, device: torch.device, *, key: str = "model.train_id"
) -> None:
    """Set `scoring.layout`: to `requested`, or for None (`auto`) to the fastest that is right, padded rows in the end.
    Raises ConfigError if `requested` is wrong for this model, or none is right; `key` named the model.
    """
    model, proof = scoring.causal_lm, Proof(scoring, device)
    if has_adapters(scoring.model):  # now, so that the passes of the layouts prove it too
        from offline_grpo.model.lora_layer import share_inputs  # which imports peft

        first = proof.batch.token_ids[None, : proof.batch.sequence_lengths[0]]
        with torch.no_grad(), eval_mode(scoring.model):
            share_inputs(scoring.model, lambda: model(input_ids=first, use_cache=False))

    # The fastest layout first; what is wrong with the faster ones is said once one is right.
    kind, fault, faults = type(model).__name__, None, []
    for scoring.layout in layouts_for(requested, device, model.dtype):
        name, fault = type(scoring.layout).__name__.lower(), proof.fault()
        if fault is None:
            if requested is None and (faults or device.type == "cuda"):  # on a CPU it is nearly always `tree`
                log.info("model.layout=auto: %s%s", name, f", because {'; '.join(faults)}" if faults else "")
            return
        faults.append(f"{name} is wrong for {kind}: {fault}")
        if requested is not None and name != "padded":
            raise ConfigError(f"model.layout={name}: wrong for {kind}, {fault}; use model.layout=auto")
    raise ConfigError(f"{key}={model.name_or_path}: {kind} cannot be scored in batches: {fault}; choose another model")


def settle_routes(scoring: Scoring, device: torch.device, *, replay: str) -> None:
    """Let the policy's routers follow routes, for `model.router_replay=REPLAY`; once the layout is settled, and before
    blocks are compiled, which would not notice. Raises ConfigError for a model whose routers are not found, or do not
    do as they are told: their own routes must change nothing, and others something.
    """
    model, batch, fault = scoring.causal_lm, batch_for(scoring, device), None
    before = scoring.logprobs(batch)
    try:
        scoring.routers = Routers(model, batch.token_ids[None, : batch.sequence_lengths[0]])
        noise = (scoring.logprobs(batch) - before).abs().max()  # 0, unless its kernels add up in any order
        own = scoring.seen_routes(batch)
        others = torch.where(own < 0, own, (own + 1) % (1 + own.max()))
        by_own, by_others = (scoring.logprobs(replace(batch, routes=routes)) for routes in (own, others))
        if (by_own - before).abs().max() > noise:
            fault = "computes something else if it follows its own routes"
        elif (by_others - before).abs().max() <= noise:
            fault = "follows no others than its own routes"
    except (ConfigError, ValueError, TypeError, AttributeError) as error:  # of blocks and routers of another kind
        fault = str(error)
    require(fault is None, "model.router_replay", replay, f"{type(model).__name__} {fault}; use none")


def share_sequences(scoring: Scoring, group: distributed.ProcessGroup, device: torch.device) -> None:
    """Let the processes of `group` share every sequence that `scoring` scores, by the layout that was settled. Raises
    ConfigError, on all of them, where that is wrong for this model.
    """
    scoring.layout = Ulysses(scoring.layout, group)
    if (fault := Proof(scoring, device).fault()) is not None:
        name = type(scoring.causal_lm).__name__
        raise ConfigError("train.sequence_parallel", group.size(), f"wrong for {name}, {fault}; use 1")


def settle_compile(
    scoring: Scoring, requested: bool | str, device: torch.device, *, key: str = "model.train_id"
) -> None:
    """Compile the model's blocks, where `requested` (`model.compile`) is true, or `auto` and `device` has a default for
    it; once the layout is settled. Blocks that cannot be compiled, or compute something else then, stay as they are
    under `auto`, and raise ConfigError if `requested` is true.
    """
    if not is_compiled(requested, device):
        return
    model, proof = scoring.causal_lm, Proof(scoring, device)
    started, name, setting = time.monotonic(), type(model).__name__, f"model.compile={str(requested).lower()}"
    try:
        compile_blocks(model)
        fault = proof.fault()
    except ConfigError as error:  # no list of blocks
        fault = str(error)
    if fault is None:
        log.info("%s: compiled the blocks of %s in %.0f s", setting, key, time.monotonic() - started)
        return

    # Undo what `compile` has set; there is no public way back.
    for module in model.modules():
        module._compiled_call_impl = None
    for tiles in tiles_of(model):
        tiles.of_tile = tiles.forward
    if requested is True:
        raise ConfigError(f"{setting}: does not work with {name} ({key}), {fault}; use auto or false")
    fix = "if memory runs out, set model.compile=false, which the memory plan counts with"
    log.warning("%s: not compiled, because %s does not work then: %s; %s", setting, name, fault, fix)


def check_causality(scoring: Scoring, num_tokens: int, device: torch.device) -> None:
    """See that no logprob depends on what follows, in a sequence as long as the run's: the most of it must score alike
    alone. Sparse attention (DeepSeek-V3.2, Doge) may choose other tokens in longer sequences, once it cannot keep all.
    Raises ConfigError if one does.
    """
    # The same tokens, followed by others and not.
    model, most = scoring.causal_lm, num_tokens * 7 // 8
    token_ids = draw_ids(len(scoring.output.weight), num_tokens, torch.Generator().manual_seed(0))
    with not_compiled(model):
        whole, alone = (
            scoring.logprobs(_flat([token_ids[:length]], [torch.arange(length) > 0]).to(device))[1:most]
            for length in (num_tokens, most)
        )
    if not _agree(scoring, whole, alone):
        by = f"{(whole - alone).abs().mean():.2g} nats on average in sequences of {num_tokens} tokens"
        fault = f"is not causal: what follows a token changes its logprob, by {by}"
        fix = "use shorter prompts and a lower generation.max_new_tokens, or choose another model"
        raise ConfigError(f"model.train_id={model.name_or_path}: {type(model).__name__} {fault}; {fix}")


def batch_for(scoring: Scoring, device: torch.device, groups: Sequence[Group] = GROUPS) -> TokenBatch:
    """Random sequences in groups that share their prompts."""
    # Of any tokens but those that stand for pictures: Gemma 4 reads them as padding, its decoder alone does not.
    config: Any = scoring.causal_lm.config
    stand_ins = [getattr(config, name, None) for name in STAND_INS]
    known = torch.tensor([token for token in range(len(scoring.output.weight)) if token not in stand_ins])

    # The long group too, where the model takes it.
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    prompt, completions = LONG_GROUP
    if device.type == "cuda" and (longest is None or prompt + max(completions) <= longest):
        groups = (*groups, LONG_GROUP)

    # The same ones for every model and process: a prompt, and behind it each of its completions.
    generator = torch.Generator().manual_seed(0)
    sequences: list[Tensor] = []
    is_completion: list[Tensor] = []
    for prompt_length, completion_lengths in groups:
        prompt = known[draw_ids(len(known), prompt_length, generator)]
        answers = [known[draw_ids(len(known), length, generator)] for length in completion_lengths]
        sequences += [torch.cat([prompt, answer]) for answer in answers]
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
        owners=tuple(range(len(lengths))),
    )


def _agree(scoring: Scoring, found: Tensor, expected: Tensor) -> bool:
    """Whether logprobs differ by rounding alone: by the root mean square, relative to the spread among tokens, which
    grows with the logits as their rounding does.
    """
    error = ((found - expected).square().mean().sqrt() / expected.std()).item()
    return error <= LOGPROB_TOLERANCE[scoring.causal_lm.dtype] * _growth(scoring)


def _growth(scoring: Scoring) -> float:
    return math.sqrt(max(1.0, num_blocks(scoring.causal_lm) / SHALLOW_BLOCKS))
