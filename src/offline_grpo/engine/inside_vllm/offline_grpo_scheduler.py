"""vLLM's scheduler, which hands tokens to the HTTP server in bundles where nobody reads them one by one, and computes
urgent requests before others that wait.

vLLM loads it by `--scheduler-cls`. Its engine sends every token, with its logprob, to the process that answers
requests, as soon as it is drawn. For a completion that is answered in one piece this is work for nothing: three arrays
to encode and to decode for each token. The engine is one Python process, for which the GPU waits if the model is small.

Requests that a pause has interrupted wait when it ends, because all of their keys and values are computed again, which
takes seconds for a large model. The probe of a push, which a trainer waits for, goes before them.

Like its neighbours, the module stands alone; all that it uses of vLLM is alike in all versions that are supported.
"""

from __future__ import annotations

import os
import time
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

BUNDLE_TOKENS = 32  # more would save little, and keep the HTTP server idle until all completions end at once

END = b"\xff" * 4
"""-1, behind the alternatives of a token. Also, numpy takes the zeros at the end of a string for filling."""

HEAD_START_S = 0.05
"""After a pause, what waits is held back for an urgent request that may come. Our probe comes within 10 ms."""

IN_ONE_PIECE = {"VLLM_MSGPACK_ZERO_COPY_THRESHOLD": str(2**30)}
"""vLLM sends arrays from 256 bytes on, such as those of a bundle, in parts of a message of their own. It then asks zmq
whether the last part has left, and before 0.32 wrote the next message over the first part, which may not have: the HTTP
server got messages that it could not decode, or one twice and another one never. Arrays up to this size are within the
one part that there is then."""

# fmt: off
JOINED = {
    "request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason", "events", "prefill_stats",
    "trace_headers", "num_nans_in_logits", "routed_experts",
}
# fmt: on
"""What `Held.joined` takes care of, or the last output has anyway."""
OTHERS = [name for name in EngineCoreOutput.__struct_fields__ if name not in JOINED]
NOTHING = (None,) * len(OTHERS)
_not_joined = attrgetter(*OTHERS)


def bundling_scheduler(vllm_config: Any, **others: Any) -> Any:
    """The scheduler that vLLM would take for this configuration, with `Bundling`. vLLM makes it before its thread that
    sends outputs.
    """
    os.environ.update(IN_ONE_PIECE)
    look_further_ahead()
    kind = AsyncBundling if vllm_config.scheduler_config.async_scheduling else SyncBundling
    return kind(vllm_config=vllm_config, **others)


class Step:
    """The logprobs and ranks of the tokens that a step has sampled. Numbers, because vLLM makes three arrays for each
    request, which takes longer than all else that is done here for its token.
    """

    def __init__(self, output: Any, logprobs: LogprobsLists) -> None:
        self._columns = logprobs.logprob_token_ids, logprobs.logprobs  # [R, K + 1], the sampled ones first
        self.logprobs, self.ranks = logprobs.logprobs[:, 0].tolist(), logprobs.sampled_token_ranks.tolist()
        starts, rows = logprobs.cu_num_generated_tokens, output.req_id_to_index
        self.starts = rows if starts is None else {name: starts[row] for name, row in rows.items()}

    @cached_property
    def alternatives(self) -> list[bytes]:
        """Of each row the ids of the tokens that could have been sampled instead, in 4 bytes each, and `END`."""
        ids, logprobs = self._columns
        del self._columns  # which take more memory than what is told
        width = 1 + np.count_nonzero(logprobs[:, 1:].max(0) != -np.inf)  # those that could have been sampled come first
        ids = ids[:, :width].astype(np.int32)
        is_told = np.isfinite(logprobs[:, :width]) & (ids != ids[:, :1])
        ids[:, 0], is_told[:, 0] = -1, True  # the end of the row before
        found, ends = ids[is_told].tobytes() + END, 4 * is_told.sum(1).cumsum()
        return [found[start + 4 : end + 4] for start, end in pairwise([0, *ends.tolist()])]


class Held:
    """The tokens of one request that are not passed on yet. They are as soon as there are `limit` of them."""

    __slots__ = (
        *("events", "has_alternatives", "has_logprobs", "limit", "places", "prefill_stats", "routes", "token_ids"),
    )

    def __init__(self, first: EngineCoreOutput, params: SamplingParams, limit: int) -> None:
        self.limit, self.prefill_stats = limit, first.prefill_stats
        self.has_logprobs, self.has_alternatives = params.logprobs is not None, bool(params.logprobs)
        self._empty()

    def _empty(self) -> None:
        self.token_ids: list[int] = []
        self.places: list[tuple[Step, int]] = []  # where to find what is told of each, if anything
        self.events: list[Any] = []
        self.routes: list[Any] = []

    def add(self, output: EngineCoreOutput, step: Step | None) -> None:
        ids = output.new_token_ids
        self.token_ids += ids
        if output.events:
            self.events += output.events
        if output.routed_experts is not None:
            self.routes.append(output.routed_experts)
        if step is not None and self.has_logprobs and ids:
            start = step.starts[output.request_id]
            for row in range(start, start + len(ids)):
                self.places.append((step, row))

    def joined(self, last: EngineCoreOutput) -> EngineCoreOutput:
        """One output that tells the same as all that were added, the last of which is `last`. Alternatives take the
        place of ranks, which nobody reads then: the HTTP server takes 0.1 us for each token that an array of K columns
        has.
        """
        last.new_token_ids, last.prefill_stats, last.events = self.token_ids, self.prefill_stats, self.events or None
        last.routed_experts = np.concatenate(self.routes) if self.routes else None
        if self.has_logprobs:
            logprobs = [step.logprobs[row] for step, row in self.places]
            told = [(step.alternatives if self.has_alternatives else step.ranks)[row] for step, row in self.places]
            columns = np.array(self.token_ids, np.int32)[:, None], np.array(logprobs, np.float32)[:, None]
            last.new_logprobs = LogprobsLists(*columns, np.array(told))
        self.limit, self.prefill_stats = BUNDLE_TOKENS, None
        self._empty()
        return last


class Bundling:
    """Mixed into a scheduler of vLLM's. A request that ends, for whatever reason, takes its held outputs along; those
    of an aborted one are dropped, as vLLM drops what it has sent of it."""

    requests: dict[str, Any]
    waiting: Any
    policy: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._held: dict[str, Held] = {}
        self._num_begun = 0
        self._urgent: set[str] = set()
        self._head_start_until = 0.0

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        if request.priority < 0:
            self._urgent.add(request.request_id)
            self._head_start_until = 0.0

    def set_pause_state(self, pause_state: Any) -> None:
        if pause_state is PauseState.UNPAUSED:
            self._head_start_until = time.monotonic() + HEAD_START_S
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def schedule(self, *args: Any, **options: Any) -> Any:
        """See `Scheduler.schedule`. While there are urgent requests, others that wait are hidden; running ones continue
        beside them, so that memory and places become free.
        """
        if self._urgent:
            self._urgent &= self.requests.keys()
        if not (self._urgent or time.monotonic() < self._head_start_until):
            return super().schedule(*args, **options)  # type: ignore[misc]

        # vLLM schedules a queue of the urgent ones alone, and what is left of it comes first in the real one.
        others, self.waiting = self.waiting, create_request_queue(self.policy)
        first = [request for request in others if request.request_id in self._urgent]
        others.remove_requests(first)
        for request in first:
            self.waiting.add_request(request)
        try:
            return super().schedule(*args, **options)  # type: ignore[misc]
        finally:
            for request in reversed([*self.waiting]):  # which found no place, or lost it
                others.prepend_request(request)
            self.waiting = others

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """See `Scheduler.update_from_output`: the outputs of a step, {client: outputs}."""
        # Where all requests of the step are held, their logprobs stay numbers.
        logprobs = model_runner_output.logprobs
        step = None if logprobs is None else Step(model_runner_output, logprobs)
        if scheduler_output.num_scheduled_tokens.keys() <= self._held.keys():
            model_runner_output.logprobs = None
        of_clients = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for of_client in of_clients.values():
            passed_on = []
            for output in of_client.outputs:  # for every token, in the process that the GPU waits for
                held = self._held.get(output.request_id)
                is_whole = output.finish_reason is not None or not _is_plain(output)

                # A request is held if nobody reads its tokens one by one: its answer has no parts and no logprobs of
                # other tokens, though perhaps their ids, and nobody looks for strings in its text.
                if held is None:
                    request: Any = self.requests.get(output.request_id)
                    params: SamplingParams | None = None if request is None else request.sampling_params
                    if (
                        is_whole
                        or params is None
                        or (params.logprobs and "alternatives" not in (params.extra_args or {}))
                        or params.logprob_token_ids
                        or params.detokenize
                        or params.output_kind is not RequestOutputKind.FINAL_ONLY
                    ):
                        passed_on.append(output)
                        continue
                    # First bundles differ in length: else requests that began together would all be passed on in one
                    # step.
                    self._num_begun += 1
                    held = Held(output, params, 1 + self._num_begun % BUNDLE_TOKENS)
                    self._held[output.request_id] = held
                held.add(output, step)
                if is_whole or len(held.token_ids) >= held.limit:
                    if output.finish_reason is not None:
                        del self._held[output.request_id]
                    passed_on.append(held.joined(output))
            of_client.outputs = passed_on
        if len(self._held) > len(self.requests):
            self._held = {name: held for name, held in self._held.items() if name in self.requests}
        return of_clients


class SyncBundling(Bundling, Scheduler):
    """`Scheduler`, see `Bundling`."""


class AsyncBundling(Bundling, AsyncScheduler):
    """`AsyncScheduler`, see `Bundling`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._preempted: list[Any] = []
        slots, managers = self.kv_cache_manager, self.kv_cache_manager.coordinator.single_type_managers
        if [type(manager) for manager in managers] == [FullAttentionManager]:
            slots.allocate_slots = partial(  # type: ignore[method-assign]
                _allocate, slots.allocate_slots, managers[0], slots.empty_kv_cache_blocks
            )

    def _preempt_request(self, request: Any, *args: Any, **options: Any) -> None:
        super()._preempt_request(request, *args, **options)
        self._preempted.append(request)

    def schedule(self, *args: Any, **options: Any) -> Any:
        """See `Bundling.schedule`. With one more step under way, vLLM 0.25 and 0.26 resume a preempted request while
        its last token is still computed, and draw it again: the sequence has both, or the assertion about placeholders
        fails. It waits here, out of vLLM's sight. From 0.27 on vLLM itself lets it wait, and leaves no placeholders.
        """
        if not self._preempted:
            return super().schedule(*args, **options)
        held = [one for one in self._preempted if one.status is RequestStatus.PREEMPTED and one.num_output_placeholders]
        self._preempted = [*held]  # vLLM may preempt more
        self.waiting.remove_requests(held)
        scheduled = super().schedule(*args, **options)
        for request in reversed(held):
            self.waiting.prepend_request(request)
        return scheduled

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)
        if scheduler_output.has_structured_output_requests:
            # the grammar's mask for a token needs the one before: at most one step may be under way in between
            eligible = self.current_step + self.vllm_config.max_concurrent_batches - 1
            for request in map(self.requests.__getitem__, scheduler_output.num_scheduled_tokens):
                if request.use_structured_output:
                    request.next_decode_eligible_step = max(request.next_decode_eligible_step, eligible)


def _allocate(allocate: Any, manager: Any, nothing: Any, request: Any, num_tokens: int, **options: Any) -> Any:
    """`KVCacheManager.allocate_slots`, which takes half of the scheduler's time, where a running request's last block
    is full. Else there is nothing to do: once the tokens are there, the scheduler caches the blocks that they fill.
    """
    if options.keys() == {"num_lookahead_tokens"} and request.status is RequestStatus.RUNNING:
        needed = request.num_computed_tokens + num_tokens + options["num_lookahead_tokens"]
        if needed <= len(manager.req_to_blocks.get(request.request_id, ())) * manager.block_size:
            return nothing
    return allocate(request, num_tokens, **options)


def look_further_ahead() -> None:
    """vLLM schedules a step while the one before it is computed. For a small model it takes longer than that until the
    results are with the scheduler and the next step is with the worker, so that the GPU waits. With one more step under
    way it does not. Both processes must know, before they make their queues and buffers.
    """
    # One more for a model of one stage, unless something else looks ahead too; only where the worker is ours.
    steps: Any = VllmConfig.max_concurrent_batches.fget

    def further(config: VllmConfig) -> int:
        own = steps(config)
        is_one_stage = own == 2 and config.scheduler_config.async_scheduling  # of a pipeline
        others = config.speculative_config or config.kv_transfer_config or config.model_config.is_hybrid
        if not (is_one_stage and config.use_v2_model_runner) or others:
            return own
        return own + str(config.parallel_config.worker_extension_cls).startswith("offline_grpo_worker.")

    VllmConfig.max_concurrent_batches = property(further)  # type: ignore[misc, method-assign, assignment]


def _is_plain(output: EngineCoreOutput) -> bool:
    """Whether it has nothing that `joined` would lose if another output came after it."""
    try:
        return _not_joined(output) == NOTHING  # three times as fast as to compare them one by one
    except ValueError:  # an array, which is neither equal to None nor unequal
        return False
