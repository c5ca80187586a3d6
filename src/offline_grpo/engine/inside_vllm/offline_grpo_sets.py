"""Which tokens filters left, from one reading of the logits. vLLM's second model runner searches for the most
probable ones, and reads all logits three times more for logprobs and ranks.

Like its neighbours, the module stands alone; all that it uses of vLLM is alike in all versions that are supported.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4  # logits that a program looks at at a time; the fastest of five on an H200


class NumSets(int):
    """Of how many tokens a step tells the logprobs, where all requests that ask for several want to know what filters
    left: any order is good.
    """


def find_sets_at_once() -> None:
    """Let vLLM's second model runner do so, in this process."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    states: Any = SamplingStates
    name = "compute_topk_logprobs" if hasattr(sampler, "compute_topk_logprobs") else "compute_topk_scores"  # of 0.25
    compute, add = getattr(sampler, name), states.add_request

    def add_request(self: Any, index: int, params: Any) -> Any:
        added = add(self, index, params)
        if "alternatives" in (params.extra_args or {}):
            self.num_logprobs[index] *= -1  # is below -1, which stands for none
        return added

    def max_num_logprobs(self: Any, rows: Any) -> int:
        asked = self.num_logprobs[rows]
        sets, others = -int(asked.min()), int(asked.max())
        return others if sets <= 1 else NumSets(sets) if others <= 0 else max(sets, others)

    def compute_logprobs(logits: Tensor, number: int, sampled: Tensor, starts: Any = None, **others: Any) -> Any:
        if not isinstance(number, NumSets) or starts is not None or others.get("max_per_req_token_ids"):
            return compute(logits, number, sampled, starts, **others)
        return LogprobsTensors(*sets_of(logits, number, sampled))

    states.add_request, states.max_num_logprobs = add_request, max_num_logprobs
    setattr(sampler, name, compute_logprobs)


def sets_of(logits: Tensor, number: int, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [R, 1 + K], logprobs [R, 1 + K], and the rank of the sampled token [R], as vLLM tells them: that one first,
    then the first K of those that are not minus infinity, by their ids; the rest is minus infinity.

    Args:
        logits: [R, V], of which each row is contiguous.
        number: K.
        sampled: [R] int64.
    """
    shape = len(logits), 1 + number
    ids = torch.zeros(shape, dtype=torch.int32, device=logits.device)
    values = torch.full(shape, -torch.inf, device=logits.device)
    totals, ranks = values.new_empty(len(logits)), torch.empty_like(sampled)
    rows = logits, logits.stride(0), sampled, ids, values, totals, ranks
    _find[len(logits),](*rows, logits.shape[1], number, BLOCK, num_warps=WARPS)  # pyright: ignore
    return ids, values.sub_(totals[:, None]), ranks


@triton.jit
def _find(logits, stride, sampled, ids, values, totals, ranks, V, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits, ids, values = logits + row * stride, ids + row * (1 + K), values + row * (1 + K)
    token = tl.load(sampled + row)
    chosen = tl.load(logits + token).to(tl.float32)
    tl.store(ids, token.to(tl.int32))
    tl.store(values, chosen)
    count, rank, highest, total = 0, 0, float("-inf"), 0.0
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits + i, mask=i < V, other=float("-inf")).to(tl.float32)
        is_left = (x != float("-inf")).to(tl.int32)  # NaN too
        num_left = tl.sum(is_left)
        if num_left > 0:
            place = count + tl.cumsum(is_left)
            is_told = (is_left > 0) & (place <= K)
            tl.store(ids + place, i, mask=is_told)
            tl.store(values + place, x, mask=is_told)
            before, highest = highest, tl.maximum(highest, tl.max(x))
            total = total * tl.exp(before - highest) + tl.sum(tl.exp(x - highest))
            count += num_left
            rank += tl.sum((x >= chosen).to(tl.int32))
    tl.store(totals + row, highest + tl.log(total))
    tl.store(ranks + row, rank)
