"""Every sampled token of an episode is trained once, in the context it was sampled in: against a plain loop over all
answered turns, each by itself through transformers, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.attention.varlen
from dialogues import CODEC, TOKENIZER, answer
from factories import LOSS, make_llama, make_scoring, make_updater
from torch import Tensor

from offline_grpo.generation.dialogue import Dialogue
from offline_grpo.logger.samples import record
from offline_grpo.loss.base import reward_penalty
from offline_grpo.loss.dapo import DAPO
from offline_grpo.loss.dr_grpo import DrGRPO
from offline_grpo.loss.grpo import GRPO
from offline_grpo.model.layouts import Padded, Tree, Varlen, prefix_trees
from offline_grpo.rollouts.__main__ import scored_data
from offline_grpo.rollouts.atropos_groups import NOT_TRAINED
from offline_grpo.rollouts.rows import group_rows, groups_of, parquet, table_of
from offline_grpo.train.advantage import GDPO, BatchStd, Distill, GroupStd, PerTurn, ReinforceBaseline
from offline_grpo.train.batch import build_batch, with_advantages
from offline_grpo.train.experience import prepare_batch
from offline_grpo.types import FinishReason, Message, Rollout, RolloutGroup, Rules, SamplingParams, Score

RULES = Rules(max_turns=8, max_turn_tokens=None, max_environment_tokens=200, timeout_s=60)
MAX_NEW_TOKENS = 20  # as `make_updater` has it
SIZES = (3, 2, 4)
UPDATES, LR = 3, 0.05


@dataclass(frozen=True)
class Turn:
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    reward: float
    alternatives: tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True)
class Episode:
    turns: tuple[Turn, ...]  # as they were answered
    rollout: Rollout


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def play(number: int, question: str, *, filtered: bool = False) -> Episode:
    """One of four: goes straight on; forks after its first reply, where its second goes on; rewrites its history; both,
    and ends at a limit. Filtered: each token was drawn from one to three.
    """
    sampling = SamplingParams(MAX_NEW_TOKENS, needs_alternatives=filtered)
    dialogue = Dialogue(CODEC.chat, sampling, RULES, CODEC.encode([user(question)]), number)
    turns: list[Turn] = []

    def say(*messages: Message) -> Message:
        ask = dialogue.ask(messages, ())
        assert ask is not None
        completion, reward = answer(ask.request), 0.25 * ((number + len(turns)) % 3)
        if filtered:
            places = enumerate(completion.token_ids)
            sets = [tuple((token + 1 + k) % len(TOKENIZER) for k in range((number + i) % 3)) for i, token in places]
            completion = replace(completion, alternatives=tuple(sets))
        reply = dialogue.answer(ask, completion)
        dialogue.pay(reward)
        turns.append(Turn(ask.request.prompt_ids, completion.token_ids, reward, completion.alternatives))
        return reply.message

    asked, kind = user(question), number % 4
    one = say(asked)
    two = say(asked, one, user("2+2="))
    if kind in (1, 3):
        say(asked, one, user("2+2="))
        say(asked, one, user("3+4="))
        say(asked, one, user("2+2="), two, user("5+5="))
    if kind in (2, 3):
        say(user(f"{question}9+"), two, user("1+7="))
        say(asked)
    rollout = dialogue.rollout(Score(sum(turn.reward for turn in turns) + number % 5, False, {}))
    assert len(rollout.starts) == (1, 3, 3, 5)[kind]
    return Episode(tuple(turns), replace(rollout, finish_reason=FinishReason.LENGTH) if kind == 3 else rollout)


def played(*, filtered: bool) -> list[list[Episode]]:
    numbers = iter(range(sum(SIZES)))
    return [
        [play(next(numbers), f"{group}+1=", filtered=filtered) for _ in range(size)] for group, size in enumerate(SIZES)
    ]


def standardised(values: Sequence[float]) -> list[float]:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return [(value - float(np.mean(values))) / (spread + 1e-4) for value in values]


def advantages_of(group: Sequence[Episode], *, per_turn: bool) -> list[list[float]]:
    """[G][turns]"""
    rewards = [episode.rollout.score.reward for episode in group]
    if not per_turn:
        pairs = zip(group, standardised(rewards), strict=True)
        return [[advantage] * len(episode.turns) for episode, advantage in pairs]
    found: list[list[float]] = [[] for _ in group]
    for k in range(max(len(episode.turns) for episode in group)):
        members = [i for i, episode in enumerate(group) if len(episode.turns) > k]
        to_come = [rewards[i] - sum(turn.reward for turn in group[i].turns[:k]) for i in members]
        for i, advantage in zip(members, standardised(to_come), strict=True):
            found[i].append(advantage)
    return found


def logprobs(model: Any, turn: Turn) -> Tensor:
    logits = model(torch.tensor([[*turn.prompt, *turn.completion]]), use_cache=False).logits[0]
    logits = logits[len(turn.prompt) - 1 : -1]
    if turn.alternatives is None:
        return logits.log_softmax(-1).gather(-1, torch.tensor(turn.completion)[:, None])[:, 0]
    sets = [[token, *others] for token, others in zip(turn.completion, turn.alternatives, strict=True)]
    return torch.stack([row[own].log_softmax(-1)[0] for row, own in zip(logits, sets, strict=True)])


def oracle(
    model: Any, how: str, *, per_turn: bool, updates: int, epochs: int, filtered: bool
) -> tuple[list[float], list[list[Tensor]]]:
    """The loss and the gradients of each update of plain gradient descent, which changes the model. Old logprobs and
    weights are kept in float32, as the run keeps them.
    """
    episodes = [
        (episode, own)
        for group in played(filtered=filtered)
        for episode, own in zip(group, advantages_of(group, per_turn=per_turn), strict=True)
    ]
    with torch.no_grad():
        old = {id(turn): logprobs(model, turn).float() for episode, _ in episodes for turn in episode.turns}
    losses, gradients = [], []
    bounds = [-(-i * len(episodes) // updates) for i in range(updates + 1)]
    for first, last in list(pairwise(bounds)) * epochs:
        batch = episodes[first:last]
        whole = [each for each in batch if each[0].rollout.finish_reason is FinishReason.STOP]
        num_tokens = sum(len(turn.completion) for episode, _ in whole for turn in episode.turns)
        loss = torch.zeros((), dtype=torch.float64)
        for episode, own in whole:
            length = sum(len(turn.completion) for turn in episode.turns)
            weight = {
                "grpo": 1 / length / len(batch),
                "dapo": 1 / num_tokens,
                "dr_grpo": 1 / (len(batch) * MAX_NEW_TOKENS),
            }[how]
            for turn, advantage in zip(episode.turns, own, strict=True):
                ratio = (logprobs(model, turn) - old[id(turn)]).exp()
                worse = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                loss = loss - weight * worse.sum()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.float().add_(parameter.grad.float(), alpha=-LR))
    return losses, gradients


def varlen_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Any, enable_gqa: bool, scale: float, **__: Any
) -> Tensor:
    """What torch's kernel computes: attention within each sequence."""
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=enable_gqa
        )[0].transpose(0, 1)
        for a, b in pairwise(ends.tolist())
    ]
    return torch.cat(parts)


def make_model() -> Any:
    sizes = {"num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1}
    return make_llama(vocab_size=len(TOKENIZER), **sizes).double()


LOSSES: dict[str, Any] = {"grpo": GRPO, "dapo": DAPO, "dr_grpo": DrGRPO}


@pytest.mark.parametrize("layout", [Padded(), Varlen(), Tree()], ids=lambda layout: type(layout).__name__.lower())
@pytest.mark.parametrize(
    ("how", "per_turn", "updates", "batch_size", "filtered"),
    [
        ("grpo", False, 1, 100, False),
        ("grpo", True, UPDATES, 1, True),
        ("dapo", False, UPDATES, 100, True),
        ("dr_grpo", False, UPDATES, 1, False),
    ],
)
def test_loss_and_gradients_are_those_of_a_loop_over_the_turns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: Any,
    how: str,
    per_turn: bool,
    updates: int,
    batch_size: int,
    filtered: bool,
) -> None:
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_on_cpu)
    model, epochs = make_model(), 1 if updates == 1 else 2
    run = {"per_turn": per_turn, "updates": updates, "epochs": epochs, "filtered": filtered}
    expected_losses, expected = oracle(copy.deepcopy(model), how, **run)

    def loss(**settings: Any) -> Any:
        return LOSSES[how](**{**settings, "entropy_coef": 0.0})

    settings = {"updates_per_iteration": updates, "epochs": epochs, "batch_size": batch_size, "mask_truncated": True}
    advantage = PerTurn() if per_turn else GroupStd()
    updater = make_updater(tmp_path, model=model, loss=loss, advantage=advantage, grad_clip=1e9, **settings)
    updater.passes.policy.scoring.layout = layout
    masters = list(updater.passes.policy.masters.parameters.values())
    updater = replace(updater, optimizer=torch.optim.SGD(masters, lr=LR))
    found: list[list[Tensor]] = []
    updater.optimizer.register_step_pre_hook(lambda *_: found.append([p.grad.clone() for p in masters]))

    groups = [RolloutGroup(None, tuple(episode.rollout for episode in group)) for group in played(filtered=filtered)]
    batch = prepare_batch(groups, updater.passes).batch
    assert batch is not None
    assert (batch.num_rollouts, batch.num_sequences) == (9, 25)
    metrics = updater.run(batch, iteration=0)
    assert metrics["loss_total"] == pytest.approx(np.mean(expected_losses), abs=1e-6)
    assert len(found) == len(expected) == updates * epochs
    for ours, theirs in zip(found, expected, strict=True):
        largest = max(gradient.abs().max() for gradient in theirs)
        assert largest > 1e-4
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=0.0, atol=1e-6 * float(largest))


def test_a_tree_computes_a_forked_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is trained in one sequence and context in the next, in whatever order they come."""
    rollouts = [play(number, "1+1=").rollout for number in (1, 5, 9, 13)]
    batch = with_advantages(build_batch(rollouts), [1.0] * len(rollouts))
    order = sorted(range(batch.num_sequences), key=lambda s: -batch.sequence_lengths[s])
    for part in (batch, batch.select(order)):
        trees = prefix_trees(part)
        assert trees is not None
        assert trees.token_ids.shape[0] == 1, "all begin with the same prompt"
        paths = [tuple(own.tolist()) for own in part.token_ids.split(part.sequence_lengths)]
        prefixes = {path[:end] for path in paths for end in range(1, len(path) + 1)}
        assert trees.token_ids.shape[1] == len(prefixes), "a node for each different prefix"
        model = make_model()
        scored = make_scoring(model, Tree()).logprobs(part)
        alone = [make_scoring(model, Padded()).logprobs(part.select([s])) for s in range(part.num_sequences)]
        torch.testing.assert_close(scored, torch.cat(alone), rtol=0.0, atol=1e-9)


def test_advantages_and_penalties_count_episodes() -> None:
    """They are those of the same tokens in one sequence."""
    rng = np.random.default_rng(0)

    def scored(rollout: Rollout) -> Rollout:
        found = tuple(rng.normal(size=len(rollout.token_ids)).tolist())
        parts = {"a": rollout.score.reward, "b": float(rng.normal())}
        return replace(rollout, teacher_logprobs=found, ref_logprobs=found, score=replace(rollout.score, parts=parts))

    groups = [
        RolloutGroup(None, tuple(scored(episode.rollout) for episode in group)) for group in played(filtered=False)
    ]
    joined = [replace(g, rollouts=tuple(replace(r, starts=(0,)) for r in g.rollouts)) for g in groups]
    batches = [build_batch([r for g in each for r in g.rollouts]) for each in (groups, joined)]
    assert [batch.num_sequences for batch in batches] == [25, 9]
    for kind in (ReinforceBaseline(), GDPO(weights=None), Distill(teacher=None, weight=1.0, base=BatchStd())):
        found, expected = (kind(each, batch) for each, batch in zip((groups, joined), batches, strict=True))
        assert found == expected, type(kind).__name__
    penalize = reward_penalty(GRPO(**{**LOSS, "kl_coef": 0.5, "kl_placement": "reward"}))
    assert penalize is not None
    torch.testing.assert_close(*map(penalize, batches))


def test_an_episode_is_read_again_as_it_was_recorded() -> None:
    groups = [RolloutGroup(None, tuple(episode.rollout for episode in group)) for group in played(filtered=False)]
    table = pq.read_table(pa.BufferReader(parquet(table_of("train", groups, None, 0), {})))
    assert groups_of(table, group_rows(table).values(), {}.__getitem__) == groups


def test_atropos_gets_each_sequence_as_one_of_its_own() -> None:
    group = RolloutGroup(None, tuple(episode.rollout for episode in played(filtered=False)[0]))
    found = scored_data(group)
    sequences = [
        (r.token_ids[start:end], r.is_sampled[start:end], r.score.reward)
        for r in group.rollouts
        for start, end in r.bounds
    ]
    assert [(tuple(ids), reward) for ids, reward in zip(found["tokens"], found["scores"], strict=True)] == [
        (ids, reward) for ids, _, reward in sequences
    ]
    masks = [tuple(token != NOT_TRAINED for token in mask) for mask in found["masks"]]
    assert masks == [is_sampled for _, is_sampled, _ in sequences]


def test_what_the_model_saw_is_shown_by_sequence() -> None:
    rollout = play(3, "1+1=").rollout
    sample = record(RolloutGroup(None, (rollout,)), rollout, None, TOKENIZER.decode)
    said = [TOKENIZER.decode(rollout.token_ids[turn.start : turn.end]) for turn in rollout.turns]
    shown = sample["rendered"]
    assert [who for who, _ in shown if who.startswith("sequence")] == [f"sequence {i} of 5" for i in range(1, 6)]
    assert sorted(text for who, text in shown if who == "policy") == sorted(said)
    assert "".join(text for _, text in shown) == TOKENIZER.decode(rollout.token_ids)
