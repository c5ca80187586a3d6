"""How far trainer and engine are apart, and what an iteration costs, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import ZOO
from factories import make_batch, make_llama, make_qwen2
from torch.utils.flop_counter import FlopCounterMode

from offline_grpo.train.metrics import Alignment, cost_metrics, update_flops
from offline_grpo.types import TokenBatch


def part(
    ours: list[float], theirs: list[float], mask: list[bool] | None = None, advantages: list[float] | None = None
) -> TokenBatch:
    """A microbatch of one sequence; `mask` tells completion tokens, None: all but the first."""
    size = len(ours)
    batch = make_batch(
        [size],
        torch.tensor([i > 0 for i in range(size)] if mask is None else mask),
        torch.zeros(1),
        torch.tensor(ours, dtype=torch.float32),
        rollout_logprobs=torch.tensor(theirs, dtype=torch.float32),
    )
    return batch if advantages is None else replace(batch, advantages=torch.tensor(advantages))


def measured(
    *parts: TokenBatch, policy: list[float] | None = None, others: tuple[list[float], ...] = ()
) -> dict[str, float]:
    """`others` is what further processes tell: sums, and the largest difference last. `policy` are logprobs after the
    first update.
    """
    alignment = Alignment()
    for each in parts:
        alignment.add(each, each.old_logprobs if policy is None else torch.tensor(policy))
    told = iter([[], others])  # of routers nothing
    ranks: Any = SimpleNamespace(gather=lambda rows: [*rows, *next(told)])
    return alignment.metrics(ranks)


FIRST = part([9, -1, -2], [5, -1.5, -1])  # differences 0.5, -1
SECOND = part([0, -3], [0, -3.25])  # difference 0.25
NO_ADVANTAGES = (0.0, 0.0, 0.0, 0.0)
EXPECTED = {
    "alignment/diff_mean": -0.25 / 3,
    "alignment/diff_abs_mean": 1.75 / 3,
    "alignment/diff_max": 1.0,
    "logprobs/training_mean": -2.0,
    "logprobs/training_std": math.sqrt(2 / 3),
    "logprobs/inference_mean": -5.75 / 3,
    "logprobs/inference_std": math.sqrt((2.25 + 1 + 10.5625) / 3 - (5.75 / 3) ** 2),
    "mismatch/ess_frac": (math.exp(0.5) + math.exp(-1) + math.exp(0.25)) ** 2
    / (3 * (math.exp(1) + math.exp(-2) + math.exp(0.5))),
}


def test_means_maximum_and_spread() -> None:
    """Over tokens, wherever the microbatches end; what is no completion token does not count."""
    assert measured(FIRST, SECOND) == pytest.approx(EXPECTED)
    together = part([9, -1, 7, -2, -3], [5, -1.5, 0, -1, -3.25], [False, True, False, True, True])
    assert measured(together) == pytest.approx(EXPECTED)


def test_logprobs_by_the_sign_of_the_advantage() -> None:
    """Those of the policy that is updated, wherever the batch says that there is an advantage."""
    signs = part([9, -1, -2, -4], [9, -1, -2, -4], [False, True, True, True], advantages=[3.0, 0.5, 0.25, -2.0])
    found = measured(signs, policy=[5.0, -0.5, -1.0, -6.0])
    assert (found["pos_logp"], found["neg_logp"]) == (-0.75, -6.0)
    assert found["logprobs/training_mean"] == pytest.approx(-7 / 3), "before the updates"
    assert not {"pos_logp", "neg_logp"} & measured(FIRST).keys(), "no token with an advantage"


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.0, 0.0, 0.0, 0.0], 1.0),
        ([math.log(3), 0.0, 0.0, 0.0], 36 / (4 * 12)),
        ([1000.0, 0.0, 0.0, 0.0], 1 / 4),  # one token outweighs all others
        ([-1000.0, 0.0, 0.0, 0.0], 3 / 4),
    ],
)
def test_effective_sample_size_is_the_share_of_tokens_that_count(differences: list[float], expected: float) -> None:
    both = [part([0, *(-1 + d for d in half)], [0, -1, -1]) for half in (differences[:2], differences[2:])]
    assert measured(*both)["mismatch/ess_frac"] == pytest.approx(expected)


def test_processes_are_weighted_by_their_tokens() -> None:
    of_second = [1.0, 0.25, 0.25, -3.0, 9.0, -3.25, 10.5625, math.exp(0.25), math.exp(0.5), *NO_ADVANTAGES, 0.25]
    assert measured(FIRST, others=(of_second,)) == pytest.approx(EXPECTED)


def test_decisions_of_routers_are_counted_over_microbatches_and_processes() -> None:
    """By hand: two blocks of three, of which the second has no router; the other process has two more decisions."""
    followed = torch.tensor([[[0, 1], [-1, -1], [2, 3]], [[2, 1], [-1, -1], [0, 3]]], dtype=torch.int16)
    seen = torch.tensor([[[1, 0], [-1, -1], [2, 0]], [[2, 0], [-1, -1], [3, 0]]], dtype=torch.int16)
    alignment = Alignment()
    batch = replace(part([0, -1, -1], [0, -1, -1]), routes=followed)
    for _ in range(2):
        alignment.add(batch, batch.old_logprobs, seen)
    others = iter([[[[0, 0, 1], [1, 0, 1]]], []])
    found = alignment.metrics(SimpleNamespace(gather=lambda rows: [*rows, *next(others)]))  # type: ignore[arg-type]
    shares = {name: value for name, value in found.items() if name.startswith("routes/")}
    blocks = {"routes/block_00/differ_frac": 2 / 5, "routes/block_02/differ_frac": 3 / 5}
    assert shares == pytest.approx({"routes/differ_frac": 5 / 10, **blocks})


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_parts_of_refused_updates_are_left_out(bad: float) -> None:
    assert measured(FIRST, part([0, bad, -9], [0, -1, -1]), SECOND) == pytest.approx(EXPECTED)
    assert measured(part([0, -1, -1], [0, bad, -9])) == {}
    assert measured(others=([3.0] * 14,))["alignment/diff_mean"] == 1, "of a process without a microbatch"


ON_A_CPU = {"flops": 1.0, "device": torch.device("cpu"), "card_bytes": 0, "num_devices": 1}
BLOCK = 4 * 32 * 32 + 3 * 32 * 48  # q, k, v and o; gate, up and down


def test_throughput_is_over_its_own_phase_and_an_evaluation_does_not_lower_it() -> None:
    metrics = {"num_completion_tokens": 600.0, "num_tokens_trained": 400.0}
    plain = cost_metrics({"generate": 2.0, "train": 1.0}, metrics, **ON_A_CPU)
    assert plain == {
        "time/generate_s": 2.0,
        "time/train_s": 1.0,
        "time/iteration_s": 3.0,
        "time/sampling_s": 2.0,
        "perf/tokens_per_s": 200.0,
        "perf/generate_tokens_per_s": 300.0,
        "perf/train_tokens_per_s": 400.0,
    }
    evaluated = cost_metrics({"generate": 2.0, "train": 1.0, "eval": 9.0}, metrics, **ON_A_CPU)
    for name in ("generate", "train"):
        assert evaluated[f"perf/{name}_tokens_per_s"] == plain[f"perf/{name}_tokens_per_s"]
    assert evaluated["perf/tokens_per_s"] == 50.0


def test_operations_by_hand() -> None:
    model = make_llama()  # 2 blocks, 4 heads of 8, an output head of its own
    matrices = 2 * BLOCK + model.config.vocab_size * 32
    assert update_flops(model, [10, 3]) == 6 * matrices * 13 + 12 * 2 * 4 * 8 * (100 + 9) / 2


def test_operations_are_what_torch_counts() -> None:
    """Eager attention multiplies the whole square, of which causal attention needs half; nothing needs the gradient of
    the embeddings.
    """
    model = make_qwen2(attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, 50, dtype=torch.int64)).logits.sum().backward()
    square = 12 * 2 * 32 * 50**2
    assert update_flops(model, [50]) == pytest.approx(counter.get_total_flops() - square / 2, rel=1e-6)


def test_of_experts_those_count_that_a_token_goes_to() -> None:
    model = ZOO["qwen3_moe"].build()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and p.dim() >= 2)
    config = model.config
    chosen, before = config.num_experts_per_tok, update_flops(model, [10])
    config.num_experts_per_tok = config.num_experts
    after = update_flops(model, [10])
    assert before is not None
    assert after is not None
    assert 0 < 6 * experts * (1 - chosen / config.num_experts) * 10 == pytest.approx(after - before)


def test_heads_of_several_sizes_count_layer_by_layer() -> None:
    model = ZOO["gemma4"].build()  # 4 heads of 8 in one layer, of 16 in the other
    once, twice = update_flops(model, [10]), update_flops(model, [20])
    assert once is not None
    assert twice is not None
    assert twice - 2 * once == 12 * 4 * (8 + 16) * (20**2 - 2 * 10**2) / 2


def test_an_architecture_that_does_not_tell_its_heads_has_no_statistic() -> None:
    model = make_llama()
    model.config = SimpleNamespace(get_text_config=SimpleNamespace)  # type: ignore[assignment]
    assert update_flops(model, [10]) is None
