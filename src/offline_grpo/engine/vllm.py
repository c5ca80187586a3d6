"""vLLM, 0.25 to 0.33: how a server is started, how it is asked, and how weight sync controls it: pause, call its
worker, swap its adapters.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import BytesIO
from itertools import pairwise, takewhile
from operator import eq
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from offline_grpo.engine.engine import ServedBits
from offline_grpo.engine.http import TIMEOUT_S, NotFound, Refused, read
from offline_grpo.engine.server_engine import LOWEST_LOGPROB, Choice, Launcher, ServerEngine, flags, num_told
from offline_grpo.engine.spawn import usable_cores
from offline_grpo.errors import EngineDied, EngineError, require
from offline_grpo.types import Completion, SamplingParams, SamplingRequest, ServedWeights

log = logging.getLogger(__name__)

TOKENS = "/generate_tokens"
"""Token ids in, token ids and logprobs out, and nothing else that takes time per token; see `inside_vllm/`."""
STOCK = "/v1/completions"  # takes and returns token ids in every version, and makes text that nobody reads

EXTENSION_FOLDER = Path(__file__).with_name("inside_vllm")
EXTENSION = "offline_grpo_worker.WorkerExtension"
SERVER = "offline_grpo_server"
GENERATE = "offline_grpo_generate.Generate"
SCHEDULER = "offline_grpo_scheduler.bundling_scheduler"
TOKEN_GATE = "offline_grpo_worker.TokenGate"
KEY = "OFFLINE_GRPO_API_KEY"
"""Where the token gate of a server that a run starts finds the key. vLLM 0.25 files what it compiles under the value of
each of its own variables, VLLM_API_KEY among them: with a new key for every run, it compiled everything anew."""
SERVED_NAME = "policy"
GRAPHED = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""The numbers of sequences for which vLLM records CUDA graphs by itself. For more at once it launches kernel by kernel,
which then takes most of the time of the engine's Python process."""
GRAPHED_STEP, MOST_GRAPHED = 64, 1024  # vLLM decodes no more together, unless it is told to
OF_GRAPHS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config", "enforce_eager"}
EXECUTOR, CORES_FOR_MP = "distributed_executor_backend", 4
"""`mp` keeps two processes busy, each of which waits for the other in a loop; on two cores the HTTP server hardly gets
a turn.
"""
LORA_KERNELS = os.environ.get("VLLM_TUNED_CONFIG_FOLDER") or str(EXTENSION_FOLDER / "lora_kernels")
"""Settings of vLLM's LoRA kernels that are faster for few tokens (`benchmarks/lora_kernels.py`); on other GPUs vLLM
uses its own.
"""
READING = {"grpo_tag", "grpo_state", "grpo_sums", "grpo_describe", "grpo_layout"}
"""Of the worker extension's methods, those that change nothing."""
WAIT_TIMEOUT_S = 3600.0  # for a pause that lets all requests end first


@dataclass(frozen=True, kw_only=True)
class VllmLauncher(Launcher):
    """The command line and environment of a vLLM managed server. See `Launcher`."""

    blackwell_workaround: bool

    name = "vLLM"
    package = "vllm"
    variables: ClassVar[Mapping[str, str]] = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc, weight transfer
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    essentials: ClassVar[Mapping[str, Any]] = {
        "args": {
            "gpu_memory_utilization": 0.45,
            "distributed_executor_backend": "auto",
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 832,
            "mm_processor_cache_gb": 0,
            "generation_config": "vllm",
        },
        "env": {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"},
    }
    """Settings that a server outside of a run must have to be usable by one."""
    tells_of_memory = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fix = "set engine.api_key, which the run sends too"
        require("VLLM_API_KEY" not in self.env, "engine.env.VLLM_API_KEY", "...", fix)

    def check_installed(self) -> None:
        """vLLM 0.28 moved bitsandbytes into a package of its own."""
        super().check_installed()
        package = find_spec(self.package)
        if self.args.get("quantization") != "bitsandbytes" or self.python is not None or package is None:
            return
        [folder] = package.submodule_search_locations or [""]
        has_own = Path(folder, "model_executor/layers/quantization/bitsandbytes.py").exists()
        fix = "this vLLM (0.28 or newer) needs the package vllm-bnb-plugin for it; install that beside it"
        is_good = has_own or "PYTHONPATH" in self.env or find_spec("vllm_bnb_plugin") is not None
        require(is_good, "engine.args.quantization", "bitsandbytes", fix)

    def expecting(self, num_sequences: int) -> VllmLauncher:
        """Adds CUDA graphs for as many sequences, unless `args` say which ones there are."""
        given = {name.replace("-", "_") for name, value in self.args.items() if value not in (None, False)}
        num_sequences = min(num_sequences, int(self.args.get("max_num_seqs") or MOST_GRAPHED))
        if num_sequences <= GRAPHED[-1] or given & OF_GRAPHS:
            return self
        further = range(GRAPHED[-1] + GRAPHED_STEP, num_sequences + GRAPHED_STEP, GRAPHED_STEP)
        return replace(self, args={**self.args, "cudagraph_capture_sizes": [*GRAPHED, *further]})

    def command(self, model: str, port: int, args: Mapping[str, object]) -> list[str]:
        """A module is started, not the `vllm` script, which some builds lack."""
        ours = {"host": self.host, "port": port, "served_model_name": SERVED_NAME, "scheduler_cls": SCHEDULER}
        settings = {**ours, **self.args, **args, "worker_extension_cls": EXTENSION}
        if settings.get(EXECUTOR) == "auto":
            settings[EXECUTOR] = "mp" if usable_cores() >= CORES_FOR_MP else None
        words = [self.python or sys.executable, "-m", SERVER, "--model", model, *flags(settings)]
        words += ["--middleware", GENERATE]
        if self.api_key is not None:  # which travels in the environment, where other users cannot read it
            words += ["--middleware", TOKEN_GATE]  # vLLM puts each around those before it
        return words

    def environment(self, env: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
        ours = {"VLLM_LORA_DISABLE_PDL": "1"} if self.blackwell_workaround else {}
        merged = super().environment({**ours, **env}, gpus)
        merged.pop("VLLM_API_KEY", None)  # the shell's: requests would have to carry it
        if self.api_key is not None:
            merged[KEY] = self.api_key
        paths = [str(EXTENSION_FOLDER), merged.get("PYTHONPATH", "")]
        return {**merged, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class VllmEngine(ServerEngine):
    """A vLLM server, asked at our endpoint `TOKENS`; where that is missing, at vLLM's own, `STOCK`, from then on."""

    name: ClassVar[str] = "vLLM"
    tells_alternatives: ClassVar[bool] = True
    tells_routes: ClassVar[bool] = True
    shows_pictures: ClassVar[bool] = True
    path = TOKENS
    oldest, newest = (0, 25), (0, 33)
    pause_modes: ClassVar[tuple[str, ...]] = ("keep", "keep_cache", "wait", "abort")

    is_paused = False
    _description: dict[str, Any] | None = None  # of the server as it is; None: not asked yet

    def start(self, model: str, args: Mapping[str, object]) -> None:
        self.is_paused, self._description = False, None
        super().start(model, args)

    @classmethod
    def start_words(cls, model: str, args: Mapping[str, object], server_args: Mapping[str, Any]) -> list[str]:
        return ["offline_grpo.engine.serve", model, *flags({**args, **server_args})]

    def version(self) -> str:
        return read(self.get("/version"), lambda answer: answer["version"])

    def lacks(self, moves: str) -> str | None:
        if moves == "lora" and not self.has("/v1/load_lora_adapter"):
            return "does not load adapters while it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora)"
        if moves == "full" and not self.has("/collective_rpc"):
            return "has no endpoints for weights (VLLM_SERVER_DEV_MODE=1)"
        if moves == "full":
            try:
                self.served_tag()
            except Refused as error:
                return f"has no worker extension (--worker-extension-cls; {error})"
        return None

    def pause(self, mode: str) -> None:
        """Stop generating, and clear KV caches. A server that a failed push has left paused is paused already.

        Args:
            mode: for requests in flight: "keep" continues them after `resume` and computes their keys and values again,
                "keep_cache" continues with those that they have, "wait" lets them end first, "abort" ends them with
                what they have. With "keep_cache" later requests do not find what was cached before the pause, if they
                come to `offline_grpo_generate`.
        """
        # vLLM's own name for a pause that keeps everything is "keep" without clearing.
        if not self.is_paused:
            timeout_s = WAIT_TIMEOUT_S if mode == "wait" else TIMEOUT_S
            clears = mode != "keep_cache"
            params = {"mode": mode if clears else "keep", "clear_cache": str(clears).lower()}
            self.post("/pause", params=params, timeout_s=timeout_s)
            self.is_paused = True

    def resume(self) -> None:
        """Continue what was kept, and begin what has arrived since."""
        self.post("/resume")
        self.is_paused = False

    def call_workers(self, method: str, *, timeout_s: float = 600.0, **kwargs: Any) -> list[Any]:
        """The results of the method of each worker."""
        body = {"method": method, "kwargs": kwargs, "timeout": timeout_s}
        is_change = method not in READING
        return self.post("/collective_rpc", body, changes=is_change, timeout_s=timeout_s + 10).json()["results"]

    def load_weights(self, folder: str, *, tag: str, pause_mode: str) -> None:
        self.pause(pause_mode)
        self.call_workers("reload_weights", weights_path=folder)
        self.set_tag(tag)
        self.resume()

    def other_numbers(self, sums: Mapping[str, str]) -> list[str]:
        found = of_wholes(self.call_workers("grpo_sums", names=list(sums))) if sums else {}
        return [name for name, own in sums.items() if found.get(name) != own]

    def set_tag(self, tag: str) -> None:
        self.call_workers("grpo_set_tag", tag=tag)

    def served_tag(self) -> str | None:
        return self.call_workers("grpo_tag")[0]

    def served_bits(self) -> ServedBits:
        states = self.call_workers("grpo_state")
        return ServedBits(states[0]["dtype"], of_wholes([state["fingerprints"] for state in states]))

    def describe(self) -> dict[str, Any]:
        """Also the worker's pid, device, gpu_uuid (None on CPUs), and refusals: why its weights cannot be shared. Of
        several workers, what the first one says; nothing without the worker extension. Asked once after each start.
        """
        found = self._description
        if found is None:
            found = self._description = self.call_workers("grpo_describe")[0] if self.lacks("full") is None else {}
        return found

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the LoRA adapter of a folder under a name that was never used before."""
        self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter's name; requests in flight finish with it."""
        self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        """vLLM draws completion j of a request with its seed + j, and refuses n > 1 at temperature 0. What filters have
        left are the tokens with finite logprobs, `top_k` of them and those as probable as the last.
        """
        prompt, needs_sets = list(request.unexpanded_ids or request.prompt_ids), sampling.needs_alternatives
        stock = {"prompt": prompt, "logprobs": min(num_told(sampling.top_k), self.vocab_size) if needs_sets else 0}
        stock |= {"return_token_ids": True} | ({"return_tokens_as_token_ids": True} if needs_sets else {})
        images = {"images": [b64encode(each.data).decode() for each in request.pictures]} if request.pictures else {}
        own = {"prompt": {"prompt_token_ids": prompt, **images}, "urgent": request.is_urgent}
        own |= {"banned_ids": [*self.banned_ids]} if self.banned_ids else {}
        own |= {"alternatives": True} if needs_sets else {}
        own |= {"routes": True} if sampling.needs_routes else {}
        return {
            **(own if self.path == TOKENS else stock),
            "model": weights.name or None,  # None is the base model
            "n": 1 if sampling.temperature == 0 else request.num_completions,
            "seed": request.seed,
            "max_tokens": sampling.max_new_tokens,
            **self.sampler_settings(sampling),
        }

    def choices(self, answer: Any, request: SamplingRequest) -> list[Choice]:
        choices = answer["choices"]
        if "prompt_token_ids" in answer:  # of `TOKENS`
            prompt_ids, found = answer["prompt_token_ids"], [choice_of(choice) for choice in choices]
        else:
            choices = sorted(choices, key=lambda choice: choice["index"])
            prompt_ids, found = choices[0]["prompt_token_ids"], [stock_choice_of(choice) for choice in choices]
        if prompt_ids != (ours := list(request.prompt_ids)):
            if not request.pictures:
                raise ValueError("the prompt came back changed")
            at = sum(takewhile(bool, map(eq, ours, prompt_ids)))
            has = f"the prompt has {len(prompt_ids)} tokens there, {len(ours)} in the trainer, and others from {at} on"
            fix = "start the server from the folder of the model, and with no other settings of its processor"
            raise EngineError(f"{self.base_url}: {has}; {fix}")
        return found

    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        """Also raises EngineDied if the server has lost the adapter: it was restarted, or others control it."""
        path = self.path
        try:
            return await super().ask(request, sampling)
        except Refused as refusal:
            # It lists the names of the base model and of its adapters.
            name = self.weights.name
            served = (await asyncio.to_thread(self.get, "/v1/models")).json()["data"] if name else []
            if name and name not in {model["id"] for model in served}:
                why = "it was started anew, or it was told to unload it"
                raise EngineDied(f"{self.base_url}: the server has lost the adapter {name}: {why}.") from None

            # It may be one without our endpoint.
            if path == STOCK or not isinstance(refusal, NotFound):
                raise
            if request.pictures or self.banned_ids:
                fix = "start it by a run, or by python -m offline_grpo.engine.serve"
                raise EngineError(
                    f"{self.base_url}: the server has no POST {TOKENS}, which takes pictures; {fix}"
                ) from None
            if self.path == TOKENS:  # else another request was told so
                log.info("%s has no POST %s; it is asked at %s, slower", self.base_url, TOKENS, STOCK)
                self.path = STOCK
            return await super().ask(request, sampling)


def choice_of(choice: Mapping[str, Any]) -> Choice:
    """A completion as `TOKENS` returns it. Alternatives and routes travel in base64."""
    alternatives = routes = None
    if "alternatives" in choice:  # int32, with -1 behind those of each token
        ids = array("i", b64decode(choice["alternatives"]))
        ends = np.flatnonzero(np.asarray(ids) == -1).tolist()
        alternatives = [ids[end + 1 : next_end] for end, next_end in pairwise([-1, *ends])]
    if "routes" in choice:  # [N, L, K], a file of numpy's
        routes = np.load(BytesIO(b64decode(choice["routes"])))
    return Choice(choice["token_ids"], choice["logprobs"], choice["finish_reason"], alternatives, routes)


def stock_choice_of(choice: Mapping[str, Any]) -> Choice:
    """A completion as `STOCK` returns it. Where `body` asks for alternatives, tokens have names such as `token_id:17`,
    and a token's alternatives are all others that have a finite logprob in its place.
    """
    token_ids, logprobs, alternatives = choice["token_ids"], choice["logprobs"], None
    if (logprobs.get("tokens") or [""])[0].startswith("token_id:"):
        alternatives = []
        for token, top in zip(token_ids, logprobs["top_logprobs"], strict=True):
            finite = (int(name.removeprefix("token_id:")) for name, value in top.items() if value > LOWEST_LOGPROB)
            alternatives.append(array("i", (each for each in finite if each != token)))
    return Choice(token_ids, logprobs["token_logprobs"], choice["finish_reason"], alternatives)


def of_wholes(workers: Sequence[Mapping[str, tuple[int, str]]]) -> dict[str, str]:
    """By name, the fingerprint or sum of each parameter: those of the parts that the workers have add up. Where two
    workers have different bits in the same part, it is one that nothing has.
    """
    # Of each name where a part begins, and what the workers that have it say of it.
    parts: dict[str, dict[int, set[str]]] = {}
    for worker in workers:
        for name, (start, text) in worker.items():
            parts.setdefault(name, {}).setdefault(start, set()).add(text)
    return {
        name: f"{sum(int(text, 16) for [text] in found.values()) % 2**64:016x}"
        if all(len(texts) == 1 for texts in found.values())
        else "different in different workers"
        for name, found in parts.items()
    }
