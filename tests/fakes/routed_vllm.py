"""What vLLM's CPU build lacks: only the second model runner, which needs Triton, returns the experts that tokens went
to. Here the first one does. What its routers choose is vLLM's own, and so is all that comes after it: the scheduler,
the output and the server. For servers whose worker and scheduler are one process, and which cache no prefixes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

VARIABLE = "TESTED_WITH_ROUTES"
"""In a server's environment: `vllm_python.py` installs this then."""
Steps = dict[int, Tensor]

_step: Steps = {}  # of each layer what the routers have chosen for the tokens of the step that is computed
_routes: dict[str, list[Any]] = {}  # of each request, [L, K] of each of its tokens
_told: dict[str, int] = {}


class Connector:
    """As vLLM's scheduler has one."""

    def build_connector_meta(self, *_: Any, **__: Any) -> None: ...

    def take_output(self, request: Any, _: Any) -> Any:
        """[tokens, L, K] that the request has not been told yet, but for the token that was just drawn."""
        name, end = request.request_id, request.num_tokens - 1
        start, _told[name] = _told.get(name, 0), end
        return np.stack(_routes[name][start:end]) if end > start else None

    def request_finished(self, request: Any) -> None:
        if not request.is_finished():  # a pause interrupts it: it goes on with the tokens that come then
            return
        _routes.pop(request.request_id, None)
        _told.pop(request.request_id, None)

    def reset(self) -> None: ...


def install() -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.v1.core.sched import scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    config: Any = VllmConfig
    config._verify_aux_output_compatibility = lambda _: None
    scheduler.AuxOutputSchedulerConnector = Connector  # type: ignore[misc]
    runner: Any = GPUModelRunner
    execute = runner.execute_model

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        for module in self.model.modules():
            if isinstance(module, MoERunner):
                router: Any = module.router
                router.set_capture_fn(lambda ids, at=module.layer_id: _step.__setitem__(at, ids))
        _step.clear()
        output = execute(self, scheduler_output, *args, **options)
        batch, row = self.input_batch, 0
        chosen = np.stack([_step[layer].numpy().astype(np.uint8) for layer in sorted(_step)], 1) if _step else None
        for index, name in enumerate(batch.req_ids):
            count, start = scheduler_output.num_scheduled_tokens[name], int(batch.num_computed_tokens_cpu[index])
            if chosen is not None:
                _routes.setdefault(name, [])[start:] = chosen[row : row + count]
            row += count
        return output

    runner.execute_model = execute_model
