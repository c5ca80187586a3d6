"""After every push the server must name its version, have the trainer's bits, and sample like the trainer.

The last is the probe's: fixed prompts and seeds. Updates may change less than the tolerance, so the server must follow:

1. A server with old weights draws the old tokens again. Those, each after the same tokens as before, the trainer has
   scored under both weights. Where fewer than `FEWEST_SHARED` are left, the server has other weights than it had.
2. Noise is the median |trainer - server| under the old weights. Where the trainer's median |new - old| is not above
   `NOISES` times that, there is no verdict, and the next push is compared with the same old weights: updates add up.
3. Otherwise the server must be nearer to the new weights than to the old ones, by the median too: single tokens may be
   far off. The first push of an adapter is compared with the base model, and noise is |base - server|.

Where a run has pictures, so have two of the prompts, and their tokens alone must be near enough too: a server that
shows the model something else is wrong in nothing but these.

Where training has filters (top_p, top_k, min_p), so has the probe: the trainer scores a token among those that the
server's filters left. A server with old weights also leaves the old ones, so it is found in the same way. A token that
was left alone has logprob 0 under all weights, and says nothing.

A server that quantises to FP8 has no bits of its linear layers to compare, and samples from other logprobs than the
trainer's. How far they may be apart is derived from the format: the trainer scores the probe once more with its linear
layers rounded to e4m3, and `FP8_ERRORS` times the mean difference is added to the tolerance.

Base weights in 4 bits under adapters need no more tolerance than 16-bit arithmetic: both sides multiply by the same
dequantised numbers, which `prove_base` compares. Had one side alone rounded them to NF4, whose error is 9.2 % of the
deviation of normal weights, where bf16 has 0.17 %, logprobs would be some fifty times that noise apart.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from itertools import islice, takewhile
from statistics import median
from typing import Any, NamedTuple

import torch
from PIL import Image

from offline_grpo import progress
from offline_grpo.engine.engine import ServedBits
from offline_grpo.engine.inside_vllm.offline_grpo_weights import plain_name, sums
from offline_grpo.engine.server_engine import ServerEngine
from offline_grpo.engine.streaming import Streaming, at_once, started
from offline_grpo.errors import EngineError, require
from offline_grpo.model.adapters import adapters_off
from offline_grpo.model.policy import Policy
from offline_grpo.model.proof import draw_ids
from offline_grpo.model.quantization import fp8_linears
from offline_grpo.train.batch import build_batch
from offline_grpo.types import Picture, Rollout, SamplingParams, SamplingRequest, Score
from offline_grpo.weight_sync.snapshot import Snapshot

log = logging.getLogger(__name__)

PROBE_PROMPTS = 8
PROBE_TOKENS = 8
PROBE_PROMPT_TOKENS = 160
"""More than a block of the prefix cache (16 tokens on GPUs, 128 on CPUs), so that a stale cache shows."""
PICTURE_COLOURS, PICTURE_SIZE = ("red", "blue"), (64, 48)
"""If the model sees, the first prompts show a picture each; a model says different things of these two."""
FEWEST_SHARED = 32  # tokens, see point 1 above
NOISES = 4.0  # see point 2
LEAST_NOISE_NATS = 1e-4  # in fp32 noise is a few roundings, and a tiny update changes no more
FP8_ERRORS = 2.0
"""Server and trainer round differently, each by about as much; the mean over 64 tokens varies by a third."""


class Probed(NamedTuple):
    """A token of the probe, with its logprobs in nats."""

    token: int
    trainer: float
    server: float


Probe = Sequence[Sequence[Probed]]
"""What was sampled after each prompt."""


@dataclass(frozen=True)
class Proof:
    """How far the weights that an engine serves are from those that are trained. Differences are trainer - server, in
    nats, over the probe's tokens."""

    num_equal: int  # tensors that are equal bit for bit; 0 where none could be compared
    diff_mean: float
    diff_abs_mean: float
    diff_max: float

    def metrics(self) -> dict[str, float]:
        """For the iteration's metrics file."""
        return {
            "sync/probe_diff_mean": self.diff_mean,
            "sync/probe_diff_abs_mean": self.diff_abs_mean,
            "sync/probe_diff_max": self.diff_max,
            "sync/num_tensors_proven": float(self.num_equal),
        }


def prove(
    engines: Sequence[ServerEngine],
    snapshot: Snapshot,
    version: int,
    *,
    tag: str | None,
    tolerance_nats: float,
    before: dict[ServerEngine, Probe],
) -> list[Proof]:
    """Compare what engines serve with what is trained, and log each verdict.

    Args:
        tag: that the push has left in the servers; None where they note none, and hold no bits to compare.
        tolerance_nats: for the mean |trainer - server| over the probe's logprobs.
        before: the probe that each engine is compared with, if it has had a push before; updated.

    Raises:
        EngineError: another version, a tensor with other bits, logprobs further apart than `tolerance_nats` on average,
            or nearer to those of the weights before.
    """
    # 1. All servers sample at the same time. Meanwhile their bits are compared. Then the policy scores all samples.
    policy, requests = snapshot.policy, probe_requests(snapshot.policy)
    probing = started(lambda one: sample_probe(one, requests, one.sampling), engines)
    bits: list[tuple[str | None, list[str], int]] = [(None, [], 0)] * len(engines)
    try:
        if tag is not None:
            served = at_once(lambda one: (one.served_tag(), one.served_bits()), engines)
            bits = [(found, *compare_bits(snapshot, theirs)) for found, theirs in served]
    finally:
        wait(probing)
    sampled = [one.result() for one in probing]
    probes = iter(scored(policy, [rollout for rollouts in sampled for rollout in rollouts]))

    proofs = []
    for engine, rollouts, (found, unequal, num_compared) in zip(engines, sampled, bits, strict=True):
        # 2. The differences. FP8 gets a wider tolerance, by what the same rounding moves the trainer's own logprobs.
        probe = list(islice(probes, len(rollouts)))
        difference, num_equal = probe_difference(probe), num_compared - len(unequal)
        diff_abs_mean, diff_max = difference.abs().mean().item(), difference.abs().max().item()
        says = f"version {version}: |trainer - server| {diff_abs_mean:.2g} nats on average, {diff_max:.2g} at most"
        says += f"; {num_equal} of {num_compared} tensors equal bit for bit" if num_compared else ""
        allowed, of_format, quantization = tolerance_nats, "", engine.describe().get("quantization")
        if "fp8" in (quantization or ""):
            with fp8_linears(policy.causal_lm):
                rounded = probe_difference(scored(policy, rollouts))
            moved = (rounded - difference).abs().mean().item()
            allowed, of_format = tolerance_nats + FP8_ERRORS * moved, f" and {FP8_ERRORS:g} times FP8's {moved:.2g}"
            says += f"; the server computes in {quantization}, which moves the trainer's own by {moved:.2g}"
        mismatch = f"[MISMATCH] {engine.base_url}: {says}"

        # 3. It must name the version that was pushed, and have its bits.
        if found != tag:
            why = f"the server has version {found}: another run pushes to it, or it was restarted"
            raise EngineError(f"{mismatch}; {why}")
        if unequal:
            raise EngineError(f"{mismatch}; others are not what was pushed: {', '.join(unequal[:5])}")

        # 4. It must sample with the trainer's logprobs, up to rounding; after pictures, too.
        seeing = [tokens for tokens, rollout in zip(probe, rollouts, strict=True) if rollout.pictures]
        of_pictures = probe_difference(seeing).abs().mean().item() if seeing else 0.0
        if diff_abs_mean <= allowed < of_pictures:
            raise EngineError(
                f"{mismatch}; {of_pictures:.2g} after pictures: the server shows the model something else than the "
                "trainer (settings of the processor, dtype or weights of the tower)"
            )
        if not diff_abs_mean <= allowed:
            group = "eval" if engine.url_key.startswith("eval.") else "weight_sync"
            raise EngineError(
                f"{mismatch}; above {group}.tolerance_nats={tolerance_nats:g}{of_format}: stale weights or caches, or "
                "a server that computes something else (dtype, rope scaling, quantisation, logprobs returned without "
                "--logprobs-mode processed_logprobs); see docs/troubleshooting.md"
            )

        # 5. It must be nearer to the new weights than to the old ones; an adapter's first push, than to the base model.
        old, name = before.get(engine), "before the push"
        if old is None and policy.lora_rank is not None:
            with adapters_off(policy.model):
                old, name = scored(policy, rollouts), "of the base model"
        follows = None if old is None else has_followed(probe, old)
        if follows is False:
            raise EngineError(
                f"{mismatch}; nearer to the weights {name} than to those that were pushed: the server does not use "
                "them (does its --lora-target-modules lack some of model.lora.target_modules?); "
                "see docs/troubleshooting.md"
            )
        log.info("[OK] %s", says, extra=progress.LOG_ALONE if engine in before else {})
        if follows is not None or engine not in before:
            before[engine] = probe
        proofs.append(Proof(num_equal, difference.mean().item(), diff_abs_mean, diff_max))
    return proofs


def prove_base(engine: ServerEngine, snapshot: Snapshot) -> str:
    """Prove that a server has the base model under the adapters, bit for bit where it can be compared. Returns its tag,
    which it keeps as long as it keeps that base. Raises ConfigError for another base.
    """
    # The tag is set before the bits are read, so that a client that loads other weights meanwhile is noticed. Runs that
    # share a server may begin at the same time: for one base they make the same tag.
    tag = engine.served_tag()
    if not tag:
        base = sorted(item for item in snapshot.fingerprints.items() if ".lora_" not in item[0])
        tag = f"base {sha256(repr(base).encode()).hexdigest()[:16]}"
        engine.set_tag(tag)

    # Other bits may be the same numbers in another order: some architectures are served so.
    unequal, num_compared = compare_bits(snapshot, engine.served_bits())
    if unequal:
        ours = {plain_name(name): tensor for name, tensor in snapshot.text_weights() if plain_name(name) in unequal}
        unequal = engine.other_numbers(dict(zip(ours, sums(list(ours.values())), strict=True)))
    differ = f"{len(unequal)} of {num_compared} tensors differ, {', '.join(unequal[:3])}"
    is_4_bit = getattr(snapshot.policy.causal_lm, "is_loaded_in_4bit", False)
    fix = f"start the server from {snapshot.policy.causal_lm.name_or_path}" + is_4_bit * " --quantization bitsandbytes"
    problem = f"the adapters are for another base model than the server has: {differ}; {fix}"
    require(not unequal, engine.url_key, engine.base_url, problem)
    if num_compared:
        log.info("[OK] base model: %d of %d tensors equal bit for bit", num_compared, num_compared)
    return tag


def probe_prompts(policy: Policy, lengths: Sequence[int] | None = None) -> list[list[int]]:
    """Random tokens, the same in every push: a prefix cache that was not flushed answers from old weights, and shows.
    `lengths`: of the prompts, in tokens.
    """
    from offline_grpo.model.load import context_length  # which imports transformers

    config, vision = policy.causal_lm.config, policy.scoring.vision
    context = context_length(config) or PROBE_PROMPT_TOKENS + PROBE_TOKENS
    lengths = lengths or [min(PROBE_PROMPT_TOKENS, context - PROBE_TOKENS)] * PROBE_PROMPTS
    draw, num_ids = torch.Generator().manual_seed(0), min(config.get_text_config().vocab_size, 1000)
    ids = [token for token in range(num_ids) if vision is None or token not in vision.stand_ins]
    return [[ids[at] for at in draw_ids(len(ids), length, draw).tolist()] for length in lengths]


def probe_requests(policy: Policy) -> list[SamplingRequest]:
    """One completion of each prompt, asked for ahead of rollouts in the queue. If the policy sees, the first prompts
    show a picture.
    """
    prompts, vision = probe_prompts(policy), policy.scoring.vision
    requests = [SamplingRequest(tuple(prompt), 1, seed, is_urgent=True) for seed, prompt in enumerate(prompts)]
    if vision is None:
        return requests
    for index, colour in enumerate(PICTURE_COLOURS):
        image, file = Image.new("RGB", PICTURE_SIZE, colour), BytesIO()
        image.paste("white", (0, 0, PICTURE_SIZE[0] // 2, PICTURE_SIZE[1] // 3))
        image.save(file, "PNG")
        pictures = (Picture(file.getvalue()),)
        ids, unexpanded = map(tuple, vision.encode(vision.placeholder + " It shows", pictures))
        requests[index] = replace(requests[index], prompt_ids=ids, pictures=pictures, unexpanded_ids=unexpanded)
    return requests


def sample_probe(client: Streaming, requests: Sequence[SamplingRequest], run: SamplingParams) -> list[Rollout]:
    """A completion of each prompt, at the run's temperature (1 if it is greedy), and with its filters if the server
    says what they leave; else from the whole softmax.
    """
    sampling = SamplingParams(PROBE_TOKENS, run.temperature or 1.0, needs_routes=run.needs_routes)
    unscored = Score(0.0, False, {})
    if run.needs_alternatives:
        filters = {"top_p": run.top_p, "top_k": run.top_k, "min_p": run.min_p}
        sampling = replace(sampling, **filters, needs_alternatives=True)
    completions = client.generate_now(requests, sampling)
    about: Any = {"temperature": sampling.temperature, "text": "", "score": unscored}
    return [
        Rollout.of_one_turn(request.prompt_ids, completion, pictures=request.pictures, **about)
        for request, [completion] in zip(requests, completions, strict=True)
    ]


def scored(policy: Policy, rollouts: Sequence[Rollout]) -> Probe:
    """What the server has sampled, with the policy's logprobs beside the server's."""
    routers = policy.scoring.routers if rollouts[0].routes is not None else None
    batch = build_batch(rollouts, routes_shape=None if routers is None else routers.shape)
    rows = batch.token_ids, policy.logprobs(batch.to(policy.device)).cpu(), batch.rollout_logprobs
    tokens = map(Probed, *(row[batch.completion_mask].tolist() for row in rows))
    return [[next(tokens) for _ in range(rollout.num_sampled)] for rollout in rollouts]


def probe_difference(probe: Probe) -> torch.Tensor:
    """Trainer minus server logprob of each token, in nats: [N]."""
    return torch.tensor([token.trainer - token.server for tokens in probe for token in tokens])


def has_followed(now: Probe, before: Probe) -> bool | None:
    """Whether a server has other weights than at the probe `before`; None where noise hides it. See the module."""
    # Tokens after the same ones as before, which the trainer has scored under both weights.
    pairs = [
        pair
        for old_tokens, tokens in zip(before, now, strict=True)
        for pair in takewhile(lambda pair: pair[0].token == pair[1].token, zip(old_tokens, tokens, strict=False))
    ]
    if len(pairs) < FEWEST_SHARED:  # because others were drawn, or because all were few: no verdict
        return len(pairs) < sum(map(len, before)) or None

    # Nothing can be said unless the trainer has moved by more than the noise. Logprob 0 is a token that was left alone.
    pairs = [(old, new) for old, new in pairs if (old.trainer, new.trainer) != (0, 0)]
    if not pairs:
        return None
    noise = median(abs(old.trainer - old.server) for old, _ in pairs)
    moved = median(abs(new.trainer - old.trainer) for old, new in pairs)
    if moved <= NOISES * max(noise, LEAST_NOISE_NATS):
        return None
    from_old = median(abs(old.trainer - new.server) for old, new in pairs)
    return median(abs(new.trainer - new.server) for _, new in pairs) < from_old


def compare_bits(snapshot: Snapshot, served: ServedBits | None) -> tuple[list[str], int]:
    """The names of parameters whose bits differ, and how many could be compared: none if the server quantises or has
    another dtype. Under adapters those of the base model are, unless it is spread over processes; adapters never are.
    """
    policy = snapshot.policy
    if served is None or served.dtype != str(policy.dtype).removeprefix("torch."):
        return [], 0
    trained = {plain_name(name): bits for name, bits in snapshot.fingerprints.items()}
    names = [name for name in trained if name in served.fingerprints]
    return [name for name in names if trained[name] != served.fingerprints[name]], len(names)
