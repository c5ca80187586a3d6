"""From scored rollouts to a flat batch; from that to this process's microbatches; and the passes without gradients, in
which policy, reference and teacher compute the logprobs of its tokens before the updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offline_grpo import progress
from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Advantage, Loss, Scorer
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import Scoring
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import TrainConfig
from offline_grpo.train.sharding import Sharding
from offline_grpo.types import BatchTotals, Rollout, RolloutGroup, TokenBatch


def build_batch(rollouts: Sequence[Rollout], *, routes_shape: tuple[int, int] | None = None) -> TokenBatch:
    """Lay the S sequences of R rollouts end to end, on the CPU. Advantages are 0 until `with_advantages`;
    `ref_logprobs` and `teacher_logprobs` are None unless all rollouts have some. `routes_shape`: blocks and experts per
    token, if routes are needed. Raises ConfigError if only some rollouts have alternatives, or not all have routes.
    """
    # Whose token each one is, and whether the model sampled it.
    lengths = [end - start for r in rollouts for start, end in r.bounds]  # [S]
    owners = [number for number, r in enumerate(rollouts) for _ in r.starts]  # [S]
    sequence_ids = np.repeat(np.arange(len(lengths)), lengths)  # [T]
    starts = np.cumsum([0, *lengths])[:-1]  # [S]
    completion_mask = _flat((r.is_sampled for r in rollouts), np.bool_)  # [T]

    # Logprobs are 0 where none was sampled, so that nothing a source wrote there can reach a sum.
    zeros = np.zeros(len(sequence_ids), np.float32)
    arrays = {
        "token_ids": _flat((r.token_ids for r in rollouts), np.int64),
        "position_ids": np.arange(len(sequence_ids)) - starts[sequence_ids],
        "sequence_ids": sequence_ids,
        "completion_mask": completion_mask,
        "advantages": zeros,
        "rollout_logprobs": np.where(completion_mask, _flat((r.logprobs for r in rollouts), np.float32), zeros),
        "old_logprobs": zeros,
        "temperature": np.array([rollouts[owner].temperature for owner in owners], np.float32)[sequence_ids],
    }
    tensors: dict[str, Tensor | None] = {name: torch.from_numpy(array) for name, array in arrays.items()}

    # Those of a reference and of a teacher, which a source may bring along.
    for name in ("ref_logprobs", "teacher_logprobs"):
        rows = [row for row in (getattr(r, name) for r in rollouts) if row is not None]
        is_whole = len(rows) == len(rollouts)
        found = np.where(completion_mask, _flat(rows, np.float32), zeros) if is_whole else None
        tensors[name] = None if found is None else torch.from_numpy(found)

    # What else the sampler could have drawn, if its filters left a part of the vocabulary.
    sets = [r.alternatives for r in rollouts if r.alternatives is not None]
    if sets:
        if len(sets) < len(rollouts):
            about = "were sampled with top_p, top_k or min_p, and cannot be in one batch with others"
            raise ConfigError(f"rollouts: {len(sets)} of {len(rollouts)} {about}")
        of_tokens = [*chain.from_iterable(sets)]  # [T]
        tensors["num_alternatives"] = torch.from_numpy(np.fromiter(map(len, of_tokens), np.int64))
        tensors["alternatives"] = torch.from_numpy(_flat(of_tokens, np.int64))
    if routes_shape is not None:
        routes = [r.routes for r in rollouts if r.routes is not None and r.routes.shape[1:] == routes_shape]
        if len(routes) < len(rollouts):
            about = f"have no routes of {routes_shape[1]} experts in {routes_shape[0]} blocks"
            fix = "sample with model.router_replay=rollout beside vLLM, or use old"
            raise ConfigError(f"rollouts: {len(rollouts) - len(routes)} of {len(rollouts)} {about}; {fix}")
        tensors["routes"] = torch.from_numpy(np.concatenate(routes))
    has_pictures = any(r.pictures for r in rollouts)
    pictures = tuple(own for r in rollouts for own in r.pictures or ((),) * len(r.starts)) if has_pictures else ()
    how: Any = {"sequence_lengths": tuple(lengths), "owners": tuple(owners), "pictures": pictures}
    return TokenBatch(**tensors, **how)


def with_advantages(batch: TokenBatch, advantages: Sequence[float | Sequence[float]]) -> TokenBatch:
    """The batch with the advantages of R rollouts: one number for all tokens of a rollout, or one for each. Where a
    rollout has several sequences, also with `rollout_sizes`.
    """
    lengths = batch.rollout_lengths
    per_token = [
        torch.full((length,), own) if isinstance(own, float) else torch.tensor(own, dtype=torch.float32)
        for own, length in zip(advantages, lengths, strict=True)
    ]
    sizes = None
    if batch.num_sequences > len(lengths):
        masks = batch.completion_mask.split(lengths)
        sizes = torch.cat([mask.sum().clamp(min=1).expand(len(mask)) for mask in masks]).float()
    return replace(batch, advantages=torch.cat(per_token) * batch.completion_mask, rollout_sizes=sizes)


def _flat(sequences: Iterable[Iterable[float]], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    """The numbers of all sequences end to end. `torch.tensor` of a list takes eight times as long; a GPU would wait."""
    with np.errstate(over="ignore"):  # what is not trained may have any number, such as 1e300
        return np.fromiter(chain.from_iterable(sequences), dtype)


def totals_of(batch: TokenBatch, sequences: Sequence[int], *, max_new_tokens: int) -> BatchTotals:
    """The denominators of an optimizer batch made of these sequences, whichever process trains them."""
    num_tokens = int(np.count_nonzero(batch.completion_mask.numpy()[batch.positions_of(sequences)]))
    owners = {batch.owners[s] for s in sequences}
    return BatchTotals(num_completion_tokens=num_tokens, num_rollouts=len(owners), max_new_tokens=max_new_tokens)


def share_of_rank(sequences: Sequence[int], lengths: Sequence[int], *, rank: int, world_size: int) -> list[int]:
    """The sequences that this process trains, longest first: each goes to the process with the fewest tokens so far,
    which has at most 4/3 of the tokens of the best division (Graham, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, r) for r in range(world_size)]
    for s in sorted(sequences, key=lambda s: (-lengths[s], s)):
        tokens, least = loads[0]
        shares[least].append(s)
        heapreplace(loads, (tokens + lengths[s], least))
    return shares[rank]


@dataclass
class Passes:
    """The models that go over a batch; decides which passes an iteration needs, and makes them."""

    policy: Policy
    reference: Scorer | None
    loss: Loss
    advantage: Advantage
    config: TrainConfig
    ranks: Ranks
    sharding: Sharding
    reward_penalty: Callable[[TokenBatch], Tensor] | None = None  # [R], see `loss.base.reward_penalty`
    teacher: Scorer | None = None
    router_replay: str = "none"  # see conf/model/hf.yaml

    def batch_of(self, rollouts: Sequence[Rollout]) -> TokenBatch:
        """`build_batch`, with routes if the policy follows those of the sampler."""
        routers = self.policy.scoring.routers if self.router_replay == "rollout" else None
        return build_batch(rollouts, routes_shape=None if routers is None else routers.shape)

    @property
    def reports(self) -> bool:
        """Whether this process's numbers count in sums: of those that share their sequences, one's do."""
        return self.ranks.rank % self.config.sequence_parallel == 0

    def updates_of(self, num_rollouts: int) -> list[range]:
        """The rollouts of each update of one epoch over a batch of this many: consecutive runs of them, of nearly the
        same size where `updates_per_iteration` says how many, such as [range(0, 3), range(3, 5)].
        """
        config = self.config
        if config.grad_accum_steps is not None:
            assert config.batch_size is not None
            size = config.batch_size * config.grad_accum_steps
            bounds = [*range(0, num_rollouts, size), num_rollouts]
        else:
            assert config.updates_per_iteration is not None
            num_updates = min(config.updates_per_iteration, num_rollouts)
            bounds = [-(-i * num_rollouts // num_updates) for i in range(num_updates + 1)]
        return [range(first, last) for first, last in pairwise(bounds)]

    def needs_old(self, batch: TokenBatch) -> bool:
        """Whether a pass must compute the logprobs of the policy before its updates: rewards or advantages use them, or
        the ratio does and there are several updates. In a single update the ratio is to that pass's own logprobs.
        """
        is_needed = self.reward_penalty is not None or "old" in self.advantage.needs
        return is_needed or (self._has_several_updates(batch) and self.loss.ratio_reference == "old")

    def _has_several_updates(self, batch: TokenBatch) -> bool:
        return len(self.updates_of(batch.num_rollouts)) * self.config.epochs > 1

    def score(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the logprobs of the old policy and of the reference, where the iteration needs them. No pass
        is made for reference logprobs that came with the rollouts.
        """
        # With `router_replay=old` all updates follow the routes of this pass; a single update takes the same by itself.
        scoring, old = self.policy.scoring, None
        if self.router_replay == "old" and self._has_several_updates(batch):
            assert scoring.routers is not None
            shape = scoring.routers.shape
            found = self.values(scoring, batch, "logprobs_and_routes", width=1 + math.prod(shape))
            batch = replace(batch, routes=found[:, 1:].to(torch.int16).unflatten(1, shape))
            old = found[:, 0].contiguous()
        elif self.needs_old(batch):
            old = self.values(scoring, batch)
        ref = None
        if self.reference is not None and batch.ref_logprobs is None:
            ref = self.values(self.reference, batch)
        return batch.with_logprobs(old=old, ref=ref)

    def teach(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """The groups with the teacher's logprobs in place of any that came with them; truncated completions get some
        too, because they are recorded.
        """
        assert self.teacher is not None
        batch = build_batch([rollout for group in groups for rollout in group.rollouts])
        is_server = not isinstance(self.teacher, Scoring)
        rows = iter(self.values(self.teacher, batch, at_once=is_server).split(batch.rollout_lengths))
        taught = []
        for group in groups:
            rollouts = (replace(rollout, teacher_logprobs=tuple(next(rows).tolist())) for rollout in group.rollouts)
            taught.append(replace(group, rollouts=tuple(rollouts)))
        return taught

    def values(
        self, scorer: Scorer, batch: TokenBatch, what: str = "logprobs", *, at_once: bool = False, width: int = 0
    ) -> Tensor:
        """Logprobs (or `what`) [T], or [T, `width`], of all sequences; each process scores a share, in microbatches or
        `at_once`.
        """
        # A server is asked for all of this process's sequences at once, and makes batches of its own.
        values = torch.zeros((len(batch.token_ids), width) if width else len(batch.token_ids))
        parts = self.microbatches(range(batch.num_sequences), batch)
        if at_once:
            own = [s for sequences, counts in parts if counts and self.reports for s in sequences]
            parts = [(own, True)] if own else []

        # What is scored stays on the device until the end: it is not waited for between two microbatches.
        scored: list[tuple[Sequence[int], Tensor]] = []
        for number, (sequences, counts) in enumerate(parts):
            part = getattr(scorer, what)(batch.select(sequences).to(scorer.device))
            if counts and self.reports:
                scored.append((sequences, part))
            progress.report(number + 1, len(parts), "microbatches scored")

        # Each process has filled in its own share, and zeros elsewhere: the sum is the whole.
        for sequences, part in scored:
            values.numpy()[batch.positions_of(sequences)] = part.cpu().numpy()
        self.ranks.sum_([values])
        return values

    def microbatches(self, sequences: Sequence[int], batch: TokenBatch) -> list[tuple[Sequence[int], bool]]:
        """This process's microbatches of these sequences, each of so many of them or of so many tokens, padding
        included where rows are padded; a longer sequence gets one of its own. Then, as often as the sharding asks for
        it, one that does not count.
        """
        # The longest come first, so that rows of one microbatch pad little, and the first says how wide they are.
        config, lengths, padded = self.config, batch.sequence_lengths, self.policy.scoring.pads
        own: list[list[int]] = []
        size = config.sequence_parallel  # processes that have the same sequences, each a slice of them
        place = {"rank": self.ranks.rank // size, "world_size": self.ranks.world_size // size}
        num_tokens = 0  # of the current one
        for s in share_of_rank(sequences, lengths, **place):
            if config.batch_size is not None:
                is_full = not own or len(own[-1]) == config.batch_size
            else:
                assert config.tokens_per_microbatch is not None
                grown = lengths[own[-1][0]] * (len(own[-1]) + 1) if own and padded else num_tokens + lengths[s]
                is_full = not own or grown > config.tokens_per_microbatch
            if is_full:
                own.append([])
                num_tokens = 0
            own[-1].append(s)
            num_tokens += lengths[s]

        # A pass that needs all processes is made by all of them: by those that have less to do once more.
        filler = own[-1] if own else sequences[:1]
        num_fillers = self.sharding.num_microbatches(len(own)) - len(own)
        return [*((chosen, True) for chosen in own), *[(filler, False)] * num_fillers]
