"""Who generates in `generation.py`: a run's server with its client, and vLLM's offline engine; the model and the
requests for both.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from common import complete_in_order

from offline_grpo.engine.vllm import VllmEngine, VllmLauncher
from offline_grpo.types import SamplingParams, SamplingRequest, ServedWeights

GROUP = 8
PROMPT_TOKENS = 40
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": True}
CPU_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "kv_cache_memory_bytes": 67108864,
    "gpu_memory_utilization": None,
    "max_num_batched_tokens": 32768,  # on CPUs, vLLM 0.32 crashes when it splits the prompt of a request with a seed
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "seed": 0,
}
CPU_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}

Group = list[tuple[tuple[int, ...], tuple[float, ...]]]
"""Token ids and logprobs of each completion of one prompt."""


def save_model(folder: Path, *, is_small: bool, shape: str = "0.6b") -> Path:
    """A shape of shapes.py with random weights; a tokenizer of characters."""
    import torch
    from shapes import SIZES
    from transformers import AutoModelForCausalLM, Qwen3Config

    from offline_grpo.model.tiny import build_char_tokenizer

    torch.manual_seed(0)
    config: Any = Qwen3Config(**SMALL) if is_small else SIZES[shape]
    config.eos_token_id, dtype = 2, torch.float32 if is_small else torch.bfloat16
    device = "cpu" if is_small else "cuda"
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(str(folder))
    build_char_tokenizer(4096).save_pretrained(str(folder))
    del model
    torch.cuda.empty_cache()  # the engines take their shares of what is free
    return folder


def requests(num_sequences: int, group: int = GROUP) -> list[SamplingRequest]:
    draw = random.Random(num_sequences)
    return [
        SamplingRequest(tuple(draw.randint(3, 80) for _ in range(PROMPT_TOKENS)), group, 1000 * index)
        for index in range(num_sequences // group)
    ]


class EndlessClient(VllmEngine):
    """Ignores the end-of-sequence token, so that every round does the same work."""

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        return super().body(request, sampling, weights) | {"ignore_eos": True, "stop_token_ids": []}


CLIENT: dict[str, Any] = {
    "eos_ids": [2],
    "vocab_size": 151936,
    "batch_size": 256,
    "timeout_s": 600,
    "max_retries": 0,
}


class Served:
    """A server of our own and its engine."""

    def __init__(
        self, model: Path, args: dict[str, Any], folder: Path, env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        engine: dict[str, Any] = {
            "python": None,
            "host": "127.0.0.1",
            "port": None,
            "api_key": None,
            "start_timeout_s": 400,
        }
        asked: dict[str, Any] = {
            "args": {**VllmLauncher.essentials["args"], **args},
            "env": {**VllmLauncher.essentials["env"], **env},
        }
        launcher: Any = VllmLauncher(**engine, **asked, blackwell_workaround=False)
        self.client = EndlessClient(launcher=launcher, log_dir=folder, **CLIENT)
        started = time.monotonic()
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.client.stop)
            self.client.start(str(model), {})
            if_it_fails.pop_all()
        self.start_s = time.monotonic() - started
        self.cpu_us_per_token: dict[str, float] = {}

    def generate(self, asked: Sequence[SamplingRequest], tokens: int) -> list[Group]:
        before = self._cpu_s()
        found = complete_in_order(self.client, asked, SamplingParams(max_new_tokens=tokens))
        num_tokens = tokens * sum(request.num_completions for request in asked)
        taken = {name.strip("()"): 1e6 * (s - before.get(name, s)) / num_tokens for name, s in self._cpu_s().items()}
        self.cpu_us_per_token = {name: value for name, value in taken.items() if value > 0.5}
        return [[(completion.token_ids, completion.logprobs) for completion in group] for group in found]

    def _cpu_s(self) -> dict[str, float]:
        """Of the API server (`python`) and the engine's processes, by name."""
        found: dict[str, float] = {}
        for process in psutil.Process(self.client.pid).children(recursive=True):
            found[process.name()] = found.get(process.name(), 0.0) + sum(process.cpu_times()[:2])
        return found

    def close(self) -> None:
        self.client.stop()


class Offline:
    """vLLM's offline engine in a child process, which is not to import vLLM into this one."""

    def __init__(self, model: Path, args: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_offline, args=(theirs, str(model), args))
        self._process.start()
        theirs.close()

    def start(self) -> float:
        """Make the engine: seconds. Its imports have gone on since the constructor."""
        started = time.monotonic()
        self._pipe.send("start")
        self._pipe.recv()
        return time.monotonic() - started

    def generate(self, asked: Sequence[SamplingRequest], tokens: int, *, logprobs: bool = True) -> list[Group]:
        self._pipe.send(
            ([(request.prompt_ids, request.num_completions, request.seed) for request in asked], tokens, logprobs)
        )
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


def _offline(pipe: Any, model: str, args: dict[str, Any]) -> None:
    import vllm
    from vllm.sampling_params import RequestOutputKind

    assert pipe.recv() == "start"
    engine = vllm.LLM(model, disable_log_stats=True, **args)
    pipe.send("ready")
    while True:
        try:
            asked, tokens, logprobs = pipe.recv()
        except EOFError:
            return
        kind = {
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "detokenize": False,
            "flat_logprobs": True,
            "ignore_eos": True,
        }
        settings = [
            vllm.SamplingParams(
                n=n, seed=seed, max_tokens=tokens, temperature=1.0, logprobs=0 if logprobs else None, **kind
            )
            for _, n, seed in asked
        ]
        prompts: Any = [{"prompt_token_ids": list(ids)} for ids, _, _ in asked]
        found = engine.generate(prompts, settings, use_tqdm=False)
        pipe.send(
            [
                [(tuple(one.token_ids), tuple(one.logprobs.logprobs) if logprobs else ()) for one in output.outputs]  # type: ignore[union-attr]
                for output in found
            ]
        )
