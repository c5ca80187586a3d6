"""vLLM's scheduler, which hands tokens to the HTTP server in bundles where nobody reads them one by one.

vLLM loads it by `--scheduler-cls`. Its engine sends every token, with its logprob, to the process that answers
requests, as soon as it is drawn. For a completion that is answered in one piece this is work for nothing: three arrays
to encode and to decode for each token. The engine is one Python process, for which the GPU waits if the model is small.
Like its neighbours, the module stands alone; all that it uses of vLLM is alike in all versions that are supported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

BUNDLE_TOKENS = 32
"""More would save little, and keep the HTTP server idle until all completions end at once."""

IN_ONE_PIECE = {"VLLM_MSGPACK_ZERO_COPY_THRESHOLD": str(2**30)}
"""vLLM sends arrays from 256 bytes on, such as those of a bundle, in parts of a message of their own. It then asks zmq
whether the last part has left, and before 0.32 wrote the next message over the first part, which may not have: the HTTP
server got messages that it could not decode, or one twice and another one never. Arrays up to this size are within the
one part that there is then."""

# fmt: off
JOINED = {
    "request_id", "new_token_ids", "new_logprobs", "finish_reason", "stop_reason", "events", "prefill_stats",
    "trace_headers", "num_nans_in_logits",
}
# fmt: on
"""What `joined` takes care of, or the last output has anyway."""
OTHERS = [name for name in EngineCoreOutput.__struct_fields__ if name not in JOINED]
NOTHING = (None,) * len(OTHERS)
_not_joined = attrgetter(*OTHERS)


def bundling_scheduler(vllm_config: Any, **others: Any) -> Any:
    """The scheduler that vLLM would take for this configuration, with `Bundling`. vLLM makes it before its thread that
    sends outputs.
    """
    os.environ.update(IN_ONE_PIECE)
    kind = AsyncBundling if vllm_config.scheduler_config.async_scheduling else SyncBundling
    return kind(vllm_config=vllm_config, **others)


class Bundling:
    """Mixed into a scheduler of vLLM's. A request that ends, for whatever reason, takes its held outputs along; those
    of an aborted one are dropped, as vLLM drops what it has sent of it."""

    requests: dict[str, Any]

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._held: dict[str, list[EngineCoreOutput]] = {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """See `Scheduler.update_from_output`: the outputs of a step, {client: outputs}."""
        of_clients = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for of_client in of_clients.values():
            of_client.outputs = list(self._passed_on(of_client.outputs))
        if len(self._held) > len(self.requests):
            self._held = {name: held for name, held in self._held.items() if name in self.requests}
        return of_clients

    def _passed_on(self, outputs: list[EngineCoreOutput]) -> Iterator[EngineCoreOutput]:
        """What is to be sent now. Runs for every token, in the process that the GPU waits for."""
        for output in outputs:
            held = self._held.get(output.request_id)
            is_whole = output.finish_reason is not None or not _is_plain(output)
            if held is not None:
                held.append(output)
                if is_whole or len(held) >= BUNDLE_TOKENS:
                    yield joined(self._held.pop(output.request_id))
            elif is_whole or not _may_wait(self.requests.get(output.request_id)):
                yield output
            else:
                self._held[output.request_id] = [output]


class SyncBundling(Bundling, Scheduler):
    """`Scheduler`, see `Bundling`."""


class AsyncBundling(Bundling, AsyncScheduler):
    """`AsyncScheduler`, see `Bundling`."""


def _may_wait(request: Any) -> bool:
    """Whether the answer to the request has no parts, and nobody looks for strings in its text, which is done where it
    is answered.
    """
    params = None if request is None else request.sampling_params
    return params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY and not params.detokenize


def _is_plain(output: EngineCoreOutput) -> bool:
    """Whether it has nothing that `joined` would lose if another output came after it."""
    try:
        return _not_joined(output) == NOTHING  # three times as fast as to compare them one by one
    except ValueError:  # an array, which is neither equal to None nor unequal
        return False


def joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """One output that tells the same as several of one request."""
    last = outputs[-1]
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    last.prefill_stats = outputs[0].prefill_stats
    last.events = [event for output in outputs for event in output.events or ()] or None
    pieces = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if pieces:
        # a step has as many columns as the request in it that wants most
        width = min(piece.logprobs.shape[1] for piece in pieces)
        token_ids = np.concatenate([piece.logprob_token_ids[:, :width] for piece in pieces])
        logprobs = np.concatenate([piece.logprobs[:, :width] for piece in pieces])
        ranks = np.concatenate([piece.sampled_token_ranks for piece in pieces])
        last.new_logprobs = LogprobsLists(token_ids, logprobs, ranks)
    return last
