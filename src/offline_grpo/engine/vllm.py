"""How a vLLM server is started, 0.25 to 0.32."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from offline_grpo.engine.command_line import CommandLine, flags
from offline_grpo.engine.process import usable_cores
from offline_grpo.errors import require

log = logging.getLogger(__name__)

EXTENSION_FOLDER = Path(__file__).with_name("inside_vllm")
EXTENSION = "offline_grpo_worker.WorkerExtension"
GENERATE = "offline_grpo_generate.Generate"
SCHEDULER = "offline_grpo_scheduler.bundling_scheduler"
KEY = "OFFLINE_GRPO_API_KEY"
"""Where the token gate of a server that a run starts finds the key. vLLM 0.25 files what it compiles under the value of
each of its own variables, VLLM_API_KEY among them: with a new key for every run, it compiled everything anew."""
TOKEN_GATE = "offline_grpo_worker.TokenGate"
SERVED_NAME = "policy"
GRAPHED = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""The numbers of sequences for which vLLM records CUDA graphs by itself. For more at once it launches kernel by kernel,
which then takes most of the time of the engine's Python process."""
GRAPHED_STEP, MOST_GRAPHED = 64, 1024
"""vLLM decodes no more together, unless it is told to."""
OF_GRAPHS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config", "enforce_eager"}
EXECUTOR, CORES_FOR_MP = "distributed_executor_backend", 4
"""`mp` keeps two processes busy, each of which waits for the other in a loop; on two cores the HTTP server hardly gets
a turn.
"""
LORA_KERNELS = os.environ.get("VLLM_TUNED_CONFIG_FOLDER") or str(EXTENSION_FOLDER / "lora_kernels")
"""Settings of vLLM's LoRA kernels that are faster for few tokens (`benchmarks/lora_kernels.py`); on other GPUs vLLM
uses its own.
"""


@dataclass(frozen=True, kw_only=True)
class VllmEngine(CommandLine):
    """The command line and environment of a vLLM managed server. See `CommandLine`.

    Args:
        blackwell_workaround: switch programmatic dependent launch (PDL, also called GDC) off in the server's LoRA
            kernels, which are known to fail with it on SM100 GPUs. Sets VLLM_LORA_DISABLE_PDL for the server and
            nothing else.
    """

    blackwell_workaround: bool

    name = "vLLM"
    package = "vllm"
    essentials: ClassVar[Mapping[str, Any]] = {
        "args": {
            "gpu_memory_utilization": 0.45,
            "distributed_executor_backend": "auto",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
        },
        "env": {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"},
        "blackwell_workaround": False,
    }
    tells_of_memory = True
    key_is_option = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            "VLLM_API_KEY" not in self.env,
            "engine.env.VLLM_API_KEY",
            "...",
            "set engine.api_key, which the run sends too",
        )

    def expecting(self, num_sequences: int) -> VllmEngine:
        """See `CommandLine.expecting`: with CUDA graphs for as many sequences, unless `args` say which graphs there
        are.
        """
        given = {
            name.replace("-", "_") for name, value in self.args.items() if value is not None and value is not False
        }
        num_sequences = min(num_sequences, int(self.args.get("max_num_seqs") or MOST_GRAPHED))
        if num_sequences <= GRAPHED[-1] or given & OF_GRAPHS:
            return self
        further = range(GRAPHED[-1] + GRAPHED_STEP, num_sequences + GRAPHED_STEP, GRAPHED_STEP)
        return replace(self, args={**self.args, "cudagraph_capture_sizes": [*GRAPHED, *further]})

    def command(self, model: str, port: int, args: Mapping[str, Any]) -> list[str]:
        """See `Launcher.command`. The module is started, not the `vllm` script, which some builds lack."""
        ours = {"host": self.host, "port": port, "served_model_name": SERVED_NAME, "scheduler_cls": SCHEDULER}
        settings = {**ours, **self.args, **args}
        settings["worker_extension_cls"] = EXTENSION
        if settings.get(EXECUTOR) == "auto":
            settings[EXECUTOR] = "mp" if usable_cores() >= CORES_FOR_MP else None
        gate = (
            [] if self.api_key is None else [TOKEN_GATE]
        )  # the key travels in the environment, where other users cannot read it
        middleware = [
            word for name in (GENERATE, *gate) for word in ("--middleware", name)
        ]  # vLLM puts each around those before it
        return [
            self.interpreter,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            model,
            *flags(settings),
            *middleware,
        ]

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """See `CommandLine.variables`."""
        ours = {
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc, weight transfer
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if self.api_key is not None:
            ours["VLLM_API_KEY"] = self.api_key
        if self.blackwell_workaround:
            log.info("engine.blackwell_workaround: the server gets VLLM_LORA_DISABLE_PDL=1")
            ours["VLLM_LORA_DISABLE_PDL"] = "1"
        merged = self.merged(ours, env)
        paths = [str(EXTENSION_FOLDER), merged.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
        return {**merged, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def environment(self, env: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
        """See `Launcher.environment`."""
        merged = super().environment(env, gpus)
        merged.pop("VLLM_API_KEY", None)  # the shell's: requests would have to carry it
        if self.api_key is not None:
            merged[KEY] = self.api_key
        return merged
