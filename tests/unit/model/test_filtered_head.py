"""The loss head on the tokens that a sampler's filters left, against the logits of the whole vocabulary, -inf outside
of the set, and against slime's formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from factories import LOSS, make_batch, make_llama, make_qwen2, make_rollout, make_scoring
from torch import Tensor

from offline_grpo.loss.cispo import CISPO
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.dppo import DPPO
from offline_grpo.loss.dr_grpo import DrGRPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.loss.gspo import GSPO
from offline_grpo.loss.sapo import SAPO
from offline_grpo.model import filtered_head as module
from offline_grpo.model.filtered_head import GATHERED, TILED, Way, filtered_head
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.scoring import LogitTransform
from offline_grpo.train.batch import build_batch
from offline_grpo.types import BatchTotals, TokenStats

NUM_TOKENS, HIDDEN, VOCAB = 13, 8, 50
Sets = list[list[int]]
LEAVES = ("hidden", "weight", "bias")


@pytest.fixture(params=[GATHERED, TILED], ids=["gathered", "tiled"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Each way, with several chunks and tiles."""
    monkeypatch.setattr(module, "way_for", lambda *args: request.param)
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 7 * HIDDEN * 8)
    monkeypatch.setitem(module.TILE_SIDE, "cpu", 6)
    return request.param


def make_inputs(dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0) -> tuple[dict[str, Any], Sets]:
    """Arguments of a head, and alternatives of each token: none for some, and the whole vocabulary for one."""
    generator = torch.Generator().manual_seed(seed)
    normal = {"hidden": (NUM_TOKENS, HIDDEN), "weight": (VOCAB, HIDDEN), "bias": (VOCAB,)}
    leaves = {
        name: (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
        for name, shape in normal.items()
    }
    targets = torch.randint(VOCAB, (NUM_TOKENS,), generator=generator)
    others = [torch.randperm(VOCAB, generator=generator) for _ in targets]
    sizes = [0, 1, 2, VOCAB - 1, 0, 7, 3, 1, 0, 20, 4, 1, 0]
    sets = [ids[ids != y][:size].tolist() for ids, y, size in zip(others, targets, sizes, strict=True)]
    return leaves | {"targets": targets, "temperature": torch.linspace(0.3, 3, NUM_TOKENS)}, sets


def flat(sets: Sets) -> dict[str, Tensor]:
    ids = torch.tensor([token for alternatives in sets for token in alternatives], dtype=torch.long)
    return {"num_alternatives": torch.tensor([len(own) for own in sets], dtype=torch.long), "alternatives": ids}


def masked_stats(logits: Tensor, targets: Tensor, temperature: Tensor, sets: Sets) -> tuple[Tensor, Tensor]:
    """The definition, in float64: logits [N, V] are -inf outside of target and alternatives."""
    outside = torch.ones_like(logits, dtype=torch.bool)
    for row, (target, alternatives) in enumerate(zip(targets.tolist(), sets, strict=True)):
        outside[row, [target, *alternatives]] = False
    scaled = logits.double() / temperature.double()[:, None]
    log_p = scaled.masked_fill(outside, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(outside, 0.0)).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def masked(inputs: dict[str, Any], sets: Sets, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    logits = inputs["hidden"].double() @ inputs["weight"].double().T
    logits = logits if inputs["bias"] is None else logits + inputs["bias"].double()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return masked_stats(logits, inputs["targets"], inputs["temperature"], sets)


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a weighted sum of the outputs whose weights differ from token to token, in sign too."""
    coefs = torch.linspace(-1, 2, len(outputs[0]), dtype=torch.float64)
    total = sum((coefs.roll(i) * out).sum() for i, out in enumerate(outputs) if out.requires_grad)
    return torch.autograd.grad(total, leaves, retain_graph=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("entropy_requires_grad", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_values_and_gradients_are_those_of_masked_logits(softcap, has_bias, entropy_requires_grad) -> None:
    inputs, sets = make_inputs()
    leaves = [inputs[name] for name in LEAVES[: 3 if has_bias else 2]]
    inputs |= {"bias": inputs["bias"] if has_bias else None}
    expected = masked(inputs, sets, softcap)
    found = filtered_head(**inputs, **flat(sets), softcap=softcap, entropy_requires_grad=entropy_requires_grad)
    assert found[1].requires_grad == entropy_requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    expected = expected if entropy_requires_grad else (expected[0], found[1])
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves), rtol=1e-10, atol=1e-10)


def test_logprobs_and_gradients_are_slimes() -> None:
    """Its `_build_topp_keep_mask` has the sets as ids and offsets, the sampled token among them, and fills the logits
    over the temperature with -inf elsewhere; rows without a set keep all. (Its entropy is that of the vocabulary.)
    """
    inputs, sets = make_inputs()
    leaves = [inputs[name] for name in LEAVES]
    inputs["temperature"] = torch.full((NUM_TOKENS,), 0.7)
    kept = [sorted([int(y), *own]) for y, own in zip(inputs["targets"], sets, strict=True)]
    offsets = torch.tensor([0, *(len(ids) for ids in kept)]).cumsum(0)
    token_ids = torch.tensor([token for ids in kept for token in ids])
    keep = torch.ones(NUM_TOKENS, VOCAB, dtype=torch.bool)
    for row in range(NUM_TOKENS):
        keep[row] = False
        keep[row, token_ids[offsets[row] : offsets[row + 1]]] = True
    logits = (inputs["hidden"] @ inputs["weight"].T + inputs["bias"]) / inputs["temperature"].double()[0]
    right = torch.log_softmax(torch.where(keep, logits, -torch.inf), -1)[torch.arange(NUM_TOKENS), inputs["targets"]]
    found = filtered_head(**inputs, **flat(sets), entropy_requires_grad=False)[0]
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients([found], leaves), gradients([right], leaves), rtol=1e-10, atol=1e-10)


def test_the_vocabulary_as_a_set_gives_what_the_tiled_head_does() -> None:
    inputs, _ = make_inputs()
    leaves = [inputs[name] for name in LEAVES]
    sets = [[token for token in range(VOCAB) if token != y] for y in inputs["targets"].tolist()]
    found = filtered_head(**inputs, **flat(sets), softcap=4.0, entropy_requires_grad=True)
    whole = TiledHead(tile_width=None)(**inputs, softcap=4.0, entropy_requires_grad=True)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(found, leaves), gradients(whole, leaves), rtol=1e-12, atol=1e-12)


def test_three_tokens_by_hand() -> None:
    # Logits 0, ln 3 and 5 at temperature 1 and 1/2; of the first two p = 3/4 and 9/10. Alone, a token is certain.
    weight = torch.tensor([[0.0], [1.0986122886681098], [5.0]], requires_grad=True)
    logprobs, entropy = filtered_head(
        *(torch.ones(3, 1), weight, None, torch.tensor([1, 1, 2]), torch.tensor([1.0, 0.5, 1.0])),
        **flat([[0], [0], []]),
        entropy_requires_grad=True,
    )
    torch.testing.assert_close(logprobs, torch.tensor([-0.2876821, -0.1053605, 0.0]))
    torch.testing.assert_close(entropy, torch.tensor([0.5623351, 0.3250830, 0.0]))
    (logprobs[2] + entropy[2]).backward()
    assert not weight.grad.any()  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("num_tokens", [0, NUM_TOKENS])
def test_no_tokens_and_none_that_had_a_choice(num_tokens) -> None:
    inputs, _ = make_inputs()
    leaves = [inputs[name] for name in LEAVES]
    arguments = [inputs[name] for name in ("weight", "bias")]
    of_tokens = [inputs[name][:num_tokens] for name in ("hidden", "targets", "temperature")]
    outputs = filtered_head(
        of_tokens[0], *arguments, *of_tokens[1:], **flat([[]] * num_tokens), entropy_requires_grad=True
    )
    assert [out.tolist() for out in outputs] == [[0.0] * num_tokens] * 2
    assert not any(gradient.any() for gradient in gradients(outputs, leaves))


def test_bfloat16_costs_only_the_rounding_of_gradients() -> None:
    inputs, sets = make_inputs(torch.bfloat16)
    leaves = [inputs[name] for name in LEAVES]
    found, expected = filtered_head(**inputs, **flat(sets), entropy_requires_grad=True), masked(inputs, sets)
    assert {out.dtype for out in found} == {torch.float32}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves), rtol=2**-7, atol=1e-5)


def test_large_logits_keep_their_differences() -> None:
    inputs, sets = make_inputs(torch.float32, scale=100.0)  # logits of some 30,000
    found = filtered_head(**inputs, **flat(sets), entropy_requires_grad=False)
    torch.testing.assert_close(found, masked(inputs, sets), rtol=1e-4, atol=0.05, check_dtype=False)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_no_gradient_is_computed_that_is_not_needed(frozen, way, monkeypatch) -> None:
    inputs, sets = make_inputs()
    inputs[frozen].requires_grad_(False)
    made: list[Tensor] = []

    def sums(*args: Tensor) -> Tensor:
        made.append(args[1])
        return way.sums(*args)

    monkeypatch.setattr(module, "way_for", lambda *args: Way(way.products, sums))
    filtered_head(**inputs, **flat(sets), entropy_requires_grad=False)[0].sum().backward()
    assert [len(like) for like in made] == [VOCAB if frozen == "hidden" else NUM_TOKENS]


def test_importance_weights_have_mean_one_over_the_kept_set() -> None:
    """Under the old policy: its samples, weighted, are an unbiased estimate for the new one."""
    old, sets = make_inputs()
    new, _ = make_inputs(seed=1)
    for row, (target, alternatives) in enumerate(zip(old["targets"].tolist(), sets, strict=True)):
        kept = [target, *alternatives]
        each = flat([[token for token in kept if token != y] for y in kept])
        logprobs = {}
        for name, inputs in (("old", old), ("new", new)):
            states = inputs["hidden"][row].expand(len(kept), -1)
            temperature = inputs["temperature"][row].expand(len(kept))
            arguments = (states, inputs["weight"], inputs["bias"], torch.tensor(kept), temperature)
            logprobs[name] = filtered_head(*arguments, **each, entropy_requires_grad=False)[0].double()
        weights = (logprobs["new"] - logprobs["old"]).exp()
        assert (logprobs["old"].exp() * weights).sum().item() == pytest.approx(1, abs=1e-12)


SETTINGS: dict[str, Any] = LOSS | {"kl_coef": 0.1, "kl_importance_weight": True, "entropy_coef": 0.03}
SETTINGS |= {"importance_correction": "token_truncate", "tau_pos": 1.0, "tau_neg": 1.05}
SETTINGS |= {"divergence": "tv", "ratio_cap": 1.5}


@pytest.mark.parametrize("loss_class", [GRPO, DAPO, DrGRPO, GSPO, CISPO, SAPO, DPPO])
def test_every_loss_is_that_of_masked_logprobs(loss_class: Any) -> None:
    """With a KL penalty, an entropy bonus and an importance correction: policy, old policy, reference, sampler."""
    loss = loss_class(**{each.name: SETTINGS[each.name] for each in fields(loss_class) if each.name in SETTINGS})
    inputs, sets = make_inputs()
    lengths = (4, 6, 3)
    mask = torch.ones(NUM_TOKENS, dtype=torch.bool)
    advantages = torch.tensor([1.0, -0.7, 0.4], dtype=torch.float64)

    def of(head: Callable[[dict[str, Any]], tuple[Tensor, Tensor]]) -> tuple[Tensor, tuple[Tensor, ...]]:
        others = [
            head(inputs | {"weight": inputs["weight"].detach() + shift})[0].detach() for shift in (0.1, 0.2, -0.1)
        ]
        named = dict(zip(("old_logprobs", "ref_logprobs", "rollout_logprobs"), others, strict=True))
        batch = make_batch(lengths, mask, advantages, **named)
        value = loss(TokenStats(*head(inputs)), batch, BatchTotals(NUM_TOKENS, 3, max_new_tokens=8)).loss
        return value, torch.autograd.grad(value, [inputs[name] for name in LEAVES])

    found = of(lambda given: filtered_head(**given, **flat(sets), entropy_requires_grad=True))
    torch.testing.assert_close(found, of(lambda given: masked(given, sets)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("make", [make_qwen2, make_llama], ids=["tied", "own head"])
def test_a_model_scores_and_learns_as_from_masked_logits(make: Any) -> None:
    """In one batch, and in microbatches."""
    model = make().double()
    scoring = make_scoring(model)
    scoring.logits = LogitTransform(scale=2.0)  # as if its head were followed by a factor
    generator = torch.Generator().manual_seed(0)

    def ids(number: int) -> list[int]:
        return torch.randperm(model.config.vocab_size, generator=generator)[:number].tolist()

    rollouts, sets = [], []
    for size, temperature in ((3, 0.6), (5, 1.0), (2, 1.4)):
        prompt, completion = ids(4), ids(size)
        own = [
            [token for token in ids(number) if token != y]
            for y, number in zip(completion, (9, 0, 40, 1, 4)[:size], strict=True)
        ]
        sets += own
        rollout = make_rollout(prompt, completion, temperature=temperature)
        rollouts.append(replace(rollout, alternatives=((),) * 4 + tuple(map(tuple, own))))
    batch = build_batch(rollouts)
    at, parameters = batch.completion_positions, [*model.parameters()]

    # The same of transformers' logits, one sequence after the other.
    rows = [model(input_ids=part[None]).logits[0, 3:-1] for part in batch.token_ids.split(batch.sequence_lengths)]
    right = masked_stats(2.0 * torch.cat(rows), batch.token_ids[at], batch.temperature[at], sets)
    stats = scoring(batch, entropy_requires_grad=True)
    found = stats.logprobs[at], stats.entropy[at]
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    assert not stats.logprobs[~batch.completion_mask].any()
    expected = gradients(right, parameters)
    torch.testing.assert_close(gradients(found, parameters), expected, rtol=1e-9, atol=1e-10)

    # A sequence at a time, from the last on.
    parts = [scoring(batch.select([s]), entropy_requires_grad=True) for s in (2, 1, 0)]
    masks = [batch.select([s]).completion_mask for s in (2, 1, 0)]
    pieces = [(part.logprobs[mask], part.entropy[mask]) for part, mask in zip(parts, masks, strict=True)]
    joined = [torch.cat(values[::-1]) for values in zip(*pieces, strict=True)]
    torch.testing.assert_close(gradients(joined, parameters), expected, rtol=1e-9, atol=1e-10)
