"""Routers that follow routes, against transformers' own forward with routers that are written out here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from architectures import COMPOSITES, ZOO, Architecture, build_composite, long_batch
from factories import make_completion, make_rollout
from torch import Tensor
from torch._dynamo.utils import counters

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Layout
from offline_grpo.model import proof
from offline_grpo.model.adapters import with_lora
from offline_grpo.model.layers import blocks_of
from offline_grpo.model.layouts import Padded, Tree, Varlen, prefix_trees
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.proof import settle_compile, settle_layout, settle_routes
from offline_grpo.model.routes import Rows, differing
from offline_grpo.model.scoring import BaseScoring, Scoring, measure_logit_transform, prepare_for_gradients
from offline_grpo.rollouts.rows import groups_of, parquet, table_of
from offline_grpo.settings import LoraConfig
from offline_grpo.train.batch import build_batch
from offline_grpo.types import Picture, RolloutGroup, TokenBatch, joined_routes

CPU = torch.device("cpu")
GROUPS: Any = {"num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "n_group": 4, "topk_group": 2}
OTHERS = {
    "olmoe": Architecture.of("olmoe", **ZOO["qwen3_moe"].settings),
    "granitemoe": Architecture.of("granitemoe", **ZOO["mixtral"].settings, num_experts_per_tok=2),
    "glm4_moe": Architecture.of("glm4_moe", **{**ZOO["deepseek_v3"].settings, **GROUPS, "head_dim": 8}),
    "ernie4_5_moe": Architecture.of("ernie4_5_moe", **ZOO["qwen3_moe"].settings, moe_num_experts=4, moe_k=2),
    "deepseek_v2": Architecture.of(
        "deepseek_v2", **{**ZOO["deepseek_v3"].settings, **GROUPS, "topk_method": "group_limited_greedy"}
    ),
}
FAMILIES: dict[str, Callable[[], Any]] = {name: each.build for name, each in OTHERS.items()}
FAMILIES |= {
    name: ZOO[name].build
    for name in ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "minimax")
    if name in ZOO
}
FAMILIES |= {name: functools.partial(build_composite, name) for name in COMPOSITES if name.endswith("_moe")}


def scoring_of(model: Any, layout: Layout | None = None) -> Scoring:
    return Scoring(model, layout or Padded(), TiledHead(tile_width=None), logits=measure_logit_transform(model))


def following(name: str, layout: Layout | None = None) -> Scoring:
    scoring = scoring_of(FAMILIES[name](), layout)
    settle_routes(scoring, CPU, replay="old")
    return scoring


def own_routes(scoring: Scoring, batch: TokenBatch) -> Tensor:
    assert scoring.routers is not None
    return scoring.logprobs_and_routes(batch)[:, 1:].to(torch.int16).unflatten(1, scoring.routers.shape)


def other_routes(scoring: Scoring, batch: TokenBatch) -> Tensor:
    """Random ones, the same for what sequences share, in blocks that have a router; a token in seven has none."""
    own, num_experts = own_routes(scoring, batch), 4
    generator = torch.Generator().manual_seed(3)
    table = torch.rand(97, 512, own.shape[1], num_experts, generator=generator).argsort(-1)[..., : own.shape[2]]
    routes = table[batch.token_ids, batch.position_ids].to(torch.int16)
    routes[(batch.token_ids % 7 == 0) | (own[:, -1, 0] < 0)] = -1
    return routes.where(own >= 0, own)


def gradients(scoring: Scoring, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    scoring.model.zero_grad()
    prepare_for_gradients(scoring.model)
    logprobs = scoring(batch).logprobs
    with scoring.attention(batch):
        (logprobs @ torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)).backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in scoring.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_its_own_routes_change_nothing_and_others_something(name: str) -> None:
    """To the last bit, in every family that has routers."""
    scoring, batch = following(name), long_batch()
    before, own = scoring.logprobs(batch), own_routes(scoring, batch)
    assert own.shape == (len(before), 2, scoring.routers.shape[1] if scoring.routers else 0)
    assert torch.equal(scoring.logprobs(replace(batch, routes=own)), before)
    followed = replace(batch, routes=other_routes(scoring, batch))
    assert (scoring.logprobs(followed) - before).abs().max() > 1e-3
    assert torch.equal(scoring.logprobs(batch), before), "nothing is left of it"
    scoring.logprobs(followed)
    assert followed.routes is not None
    counts = differing(followed.routes, scoring.seen_routes(followed))
    assert counts[1].max() > counts[0].max() > 0


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (ZOO["llama"].build, "LlamaForCausalLM has no router in its blocks that returns logits, weights and experts"),
        (ZOO["phimoe"].build, "PhimoeForCausalLM follows no others than its own routes"),
    ],
)
def test_what_is_no_router_is_refused(build: Callable[[], Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.router_replay=rollout: {why}.*; use none$"):
        settle_routes(scoring_of(build()), CPU, replay="rollout")


def softmax_then_chosen(gate: Any, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ gate.weight.T
    weights = logits.float().softmax(-1).gather(1, chosen)
    return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype)


def masked_softmax(gate: Any, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ gate.weight.T + gate.bias
    mask = torch.full_like(logits, -torch.inf).scatter(1, chosen, 0.0)
    return logits, (logits + mask).softmax(-1).gather(1, chosen)


def sigmoids(gate: Any, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    logits = x.float() @ gate.weight.float().T
    weights = logits.sigmoid().gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor


def softmax_times_scale(gate: Any, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Of DeepSeek-V2 with groups, whose masked experts have no weight."""
    logits = x.float() @ gate.weight.float().T
    return logits, logits.softmax(-1).gather(1, chosen) * gate.routed_scaling_factor


ORACLES = {
    "deepseek_v2": softmax_times_scale,
    "qwen3_moe": softmax_then_chosen,
    "mixtral": softmax_then_chosen,
    "gpt_oss": masked_softmax,
}
ORACLES |= {"deepseek_v3": sigmoids, "glm4_moe": sigmoids}


def fix_experts(model: Any, formula: Callable[..., tuple[Tensor, Tensor]], chosen: Tensor) -> None:
    """Replace the routers by ones that know the experts [L, B, K] of one sequence, and call no topk."""

    def forward(gate: Any, own: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights = formula(gate, x.reshape(len(own), -1), own)
        return logits, weights, own

    for block, own in zip(blocks_of(model), chosen.long(), strict=True):
        for gate in block.modules():
            if hasattr(gate, "offline_grpo_slot"):
                gate.forward = functools.partial(forward, gate, own)


@pytest.mark.parametrize("layout", [Padded(), Tree()], ids=["padded", "tree"])
@pytest.mark.parametrize("name", ORACLES)
def test_logprobs_and_gradients_are_those_of_fixed_experts(name: str, layout: Layout) -> None:
    """In float64, one sequence at a time."""
    scoring, batch = following(name, layout), long_batch()
    scoring.model.double()
    scoring.causal_lm.set_experts_implementation("eager")
    for module in scoring.model.modules():
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = True  # type: ignore[assignment]
    routes = other_routes(scoring, batch)
    routes = torch.where(routes < 0, own_routes(scoring, batch), routes)  # a choice of its own is none of the oracle
    found, got = gradients(scoring, replace(batch, routes=routes))

    scoring.model.zero_grad()
    expected, lengths = [], batch.sequence_lengths
    for ids, chosen in zip(batch.token_ids.split(lengths), routes.split(lengths), strict=True):
        fix_experts(scoring.causal_lm, ORACLES[name], chosen.transpose(0, 1))
        logs = scoring.causal_lm(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        expected.append(torch.cat([logs.new_zeros(1), logs.gather(1, ids[1:, None]).squeeze(1)]))
    wanted = torch.cat(expected) * batch.completion_mask
    (wanted @ torch.linspace(-1, 1, len(wanted)).double()).backward()
    torch.testing.assert_close(found.double(), wanted.detach(), atol=2e-6, rtol=2e-6)
    of_routers = []
    for parameter, gradient in got.items():
        right = scoring.model.get_parameter(parameter).grad
        assert right is not None, parameter
        torch.testing.assert_close(gradient, right, atol=2e-6 * max(1.0, float(right.abs().max())), rtol=1e-5)
        if parameter.endswith(("gate.weight", "router.weight")):
            of_routers.append(float(gradient.abs().max()))
    assert min(of_routers) > 1e-4, "routers learn"


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_block_that_is_computed_again_follows_the_same_routes(name: str) -> None:
    kept = following(name)
    batch = long_batch()
    batch = replace(batch, routes=other_routes(kept, batch))
    logprobs, expected = gradients(kept, batch)
    again = following(name)
    again.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    same, found = gradients(again, batch)
    assert torch.equal(logprobs, same)
    assert all(torch.equal(found[key], gradient) for key, gradient in expected.items())


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("qwen3_moe", False),
        pytest.param("glm4_moe", True, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", True, marks=pytest.mark.slow),
        pytest.param("glm4_moe", False, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_follow_them_in_one_graph(name: str, checkpointing: bool) -> None:
    plain, scoring = following(name), following(name)
    if checkpointing:
        scoring.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    settle_compile(scoring, True, CPU)
    first = long_batch()
    followed = [replace(first, routes=other_routes(plain, first))]
    for groups in (((20, (8, 3)),), ((7, (30, 2, 5)), (4, (9, 9)))):
        batch = proof.batch_for(scoring, CPU, groups)
        followed.append(replace(batch, routes=other_routes(plain, batch)))
    warm = 0
    for batch in followed:
        expected, wanted = gradients(plain, batch)
        found, got = gradients(scoring, batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for key, gradient in wanted.items():
            torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-5 * max(1.0, float(gradient.abs().max())))
        torch.testing.assert_close(own_routes(scoring, batch), own_routes(plain, batch))
        warm = warm or counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == warm > 0, "other lengths compile nothing anew"
    assert not counters["graph_break"]


def test_adapters_on_routers_and_a_reference_without_them() -> None:
    """peft wraps the router's weight; the reference, which is the model without adapters, has routes of its own."""
    model = FAMILIES["qwen3_moe"]()
    plain = scoring_of(FAMILIES["qwen3_moe"]())
    lora = LoraConfig(4, 8, 0.0, ["all-linear"], None)
    scoring = scoring_of(model)
    scoring.model = with_lora(model, lora, adapter=None)
    settle_layout(scoring, Padded(), CPU)
    settle_routes(scoring, CPU, replay="old")
    batch = long_batch()
    followed = replace(batch, routes=other_routes(scoring, batch))
    adapters = [p for name, p in scoring.model.named_parameters() if "lora_B" in name]
    with torch.no_grad():
        for parameter in adapters:
            parameter.normal_(std=0.3)
    assert (scoring.logprobs(followed) - scoring.logprobs(batch)).abs().max() > 1e-3
    _, found = gradients(scoring, followed)
    assert any("gate" in key and bool(value.any()) for key, value in found.items() if "lora_B" in key)
    torch.testing.assert_close(BaseScoring(scoring).logprobs(followed), plain.logprobs(batch), rtol=1e-5, atol=1e-5)


def test_tokens_are_found_in_every_layout() -> None:
    scoring, batch = scoring_of(FAMILIES["mixtral"]()), long_batch()
    decoder = scoring.causal_lm.model
    rows = Rows(Padded(), decoder, batch)
    assert rows.size == batch.num_sequences * max(batch.sequence_lengths)
    assert torch.equal(rows.places, batch.sequence_ids * max(batch.sequence_lengths) + batch.position_ids)
    trees = prefix_trees(batch)
    assert trees is not None
    rows = Rows(Tree(), decoder, batch)
    assert rows.size == trees.token_ids.numel() < batch.num_sequences * max(batch.sequence_lengths)
    assert torch.equal(trees.token_ids.flatten()[rows.places], batch.token_ids)
    rows = Rows(Varlen(), decoder, batch)
    assert rows.places.tolist() == [*range(rows.size)]


def test_decisions_that_differ_are_counted_by_hand() -> None:
    """Of three tokens in two blocks; the order is none of the decision, and what nobody knows is no decision."""
    given = torch.tensor([[[0, 1], [2, 3]], [[2, 0], [-1, -1]], [[1, 3], [0, 3]]], dtype=torch.int16)
    seen = torch.tensor([[[1, 0], [2, 1]], [[2, 1], [0, 1]], [[3, 1], [3, 0]]], dtype=torch.int16)
    assert differing(given, seen).tolist() == [[1, 1], [3, 2]]


def test_routes_of_several_turns_are_those_of_who_computed_first() -> None:
    """By hand: a prompt of 2 tokens and a completion of 2; an environment's token, and a completion of 1 more."""
    first, second = np.arange(3).reshape(3, 1, 1), np.arange(10, 15).reshape(5, 1, 1)
    joined = joined_routes(7, [(0, 0, first), (0, 3, second), (6, 0, None)])
    assert joined is not None
    assert joined.ravel().tolist() == [0, 1, 2, 13, 14, -1, -1]
    assert joined.dtype == np.int16
    assert joined_routes(7, [(0, 0, None)]) is None


def test_a_rollout_brings_its_routes_into_the_batch_or_is_refused() -> None:
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    rollouts = [make_rollout([5, 6], replace(make_completion([7, 8]), routes=routes)), make_rollout([8], [9])]
    batch = build_batch(rollouts[:1] * 2, routes_shape=(2, 2))
    assert batch.routes is not None
    assert batch.routes.tolist()[4:] == [*routes.tolist(), [[-1, -1], [-1, -1]]]
    assert torch.equal(replace(batch).select([1]).routes, batch.routes[4:])  # type: ignore[arg-type]
    assert build_batch(rollouts).routes is None, "unless they are asked for"
    with pytest.raises(ConfigError, match=r"^rollouts: 1 of 2 have no routes of 2 experts in 2 blocks; "):
        build_batch(rollouts, routes_shape=(2, 2))
    with pytest.raises(ConfigError, match=r"^rollouts: 2 of 2 have no routes of 2 experts in 3 blocks; "):
        build_batch(rollouts, routes_shape=(3, 2))


@pytest.mark.parametrize("most", [3, 254, 255, 300])
def test_routes_are_read_as_they_were_recorded(most: int) -> None:
    routes = np.array([[[0, most]], [[1, 2]], [[-1, -1]]], np.int16)
    rollout = replace(make_rollout([5], [6, 7]), routes=routes)
    table = pq.read_table(pa.BufferReader(parquet(table_of("train", [RolloutGroup(None, (rollout,))], None, 0), {})))
    [group] = groups_of(table, [[0]], Picture)  # type: ignore[arg-type]
    assert np.array_equal(group.rollouts[0].routes, routes)  # type: ignore[arg-type]
    assert np.load(BytesIO(table["routes"][0].as_py())).dtype == (np.uint8 if most < 255 else np.uint16)
