"""Stand-ins for vLLM: its fused layers by vLLM's own names, a worker with the extension around a model of them, and a
server that a whole run can use.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from factories import complete_in_order
from safetensors.torch import load_file
from scripted_server import Reply, Request
from torch import nn
from transformers import AutoModelForCausalLM

from offline_grpo.engine.vllm import EXTENSION_FOLDER
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.model.load import load_tokenizer
from offline_grpo.types import SamplingParams, SamplingRequest


def load_extension() -> ModuleType:
    """The module that vLLM loads, without its patches, which would import vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXTENSION_FOLDER))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for module, name in (("scheduler", "look_further_ahead"), ("sets", "find_sets_at_once")):
            patch.setitem(sys.modules, f"offline_grpo_{module}", SimpleNamespace(**{name: lambda: None}))
        patch.delenv("OFFLINE_GRPO_NEEDS_RAY", raising=False)
        return importlib.import_module("offline_grpo_worker")


class Weighted(nn.Module):
    """A weight of that shape, random, and a bias where there is one. `tp_size` workers have one such each; this is the
    last one's.
    """

    def __init__(
        self, *shape: int, bias: bool = False, dtype: torch.dtype = torch.float32, tp_size: int = 1, **settings: int
    ) -> None:
        super().__init__()
        self.__dict__.update(settings, tp_size=tp_size, tp_rank=tp_size - 1)
        self.weight = nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.randn(shape[0]).to(dtype), requires_grad=False)


class ColumnParallelLinear(Weighted): ...


class RowParallelLinear(Weighted): ...


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values in one matrix; the methods are vLLM's."""

    def __init__(self, hidden: int, head: int, heads: int, kv_heads: int, **settings: Any) -> None:
        super().__init__((heads + 2 * kv_heads) * head, hidden, **{"num_kv_head_replicas": 1, **settings})
        self.sizes = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}

    def _get_shard_offset_mapping(self, part: str) -> int:
        return {"q": 0, "k": self.sizes["q"], "v": self.sizes["q"] + self.sizes["k"]}[part]

    def _get_shard_size_mapping(self, part: str) -> int:
        return self.sizes[part]


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several matrices with one input."""

    def __init__(self, hidden: int, output_sizes: list[int], **settings: Any) -> None:
        super().__init__(sum(output_sizes) // settings.get("tp_size", 1), hidden, **settings)
        self.output_sizes = output_sizes


class VocabParallelEmbedding(Weighted):
    """Rows beyond the vocabulary are padding."""

    def __init__(self, org_vocab_size: int, padded: int, hidden: int, **settings: Any) -> None:
        super().__init__(padded // settings.get("tp_size", 1), hidden, **settings)
        self.org_vocab_size = org_vocab_size
        begin = min(self.tp_rank * len(self.weight), org_vocab_size)
        end = min(begin + len(self.weight), org_vocab_size)
        self.shard_indices = SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=end)


class ParallelLMHead(VocabParallelEmbedding): ...


class WithLoRA(nn.Module):
    """vLLM puts the layer one level deeper and keeps the adapters in plain tensors."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = (torch.zeros(1, 1, 16, 8),)


class Block(nn.Module):
    def __init__(self, *, wrapped: bool, dtype: torch.dtype) -> None:
        super().__init__()
        wrap = WithLoRA if wrapped else lambda layer: layer
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = wrap(QKVParallelLinear(8, 4, heads=4, kv_heads=2, bias=True, dtype=dtype))
        self.self_attn.o_proj = wrap(Weighted(8, 16, dtype=dtype))
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = wrap(MergedColumnParallelLinear(8, [12, 12], dtype=dtype))
        self.mlp.down_proj = wrap(Weighted(8, 12, dtype=dtype))
        self.norm = Weighted(8, dtype=dtype)


class FusedModel(nn.Module):
    """One decoder block with grouped queries and biases, and a vocabulary of 10 that is padded to 16."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012

    def __init__(self, *, tied: bool = True, wrapped: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(10, 16, 8, dtype=dtype)
        self.model.layers = nn.ModuleList([Block(wrapped=wrapped, dtype=dtype)])
        self.lm_head = ParallelLMHead(10, 16, 8, dtype=dtype)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.q_proj.bias": (16,),
    "model.layers.0.self_attn.k_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.bias": (8,),
    "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.bias": (8,),
    "model.layers.0.self_attn.o_proj.weight": (8, 16),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.layers.0.norm.weight": (8,),
    "lm_head.weight": (10, 8),
}
"""What a checkpoint of `FusedModel` holds."""


def make_worker(model: nn.Module, **changes: Any) -> Any:
    """A worker with the extension. `changes` are settings of vLLM, such as `model_config__quantization="fp8"`."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=torch.float32,
            quantization=None,
            use_mla=False,
            enable_sleep_mode=False,
            logprobs_mode="processed_logprobs",
            max_logprobs=832,
        ),
        parallel_config=SimpleNamespace(world_size=1),
        cache_config=SimpleNamespace(cpu_offload_gb=0),
        lora_config=None,
    )
    for key, value in changes.items():
        part, _, name = key.partition("__")
        setattr(getattr(config, part), name, value)
    worker = load_extension().WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.vllm_config = config
    return worker


class FakeVllm:
    """The script of a `ScriptedServer`. `close` lets go of the memory that it shares."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(str(folder))
        self.worker = make_worker(self.model)
        self._client = TransformersClient(self.model, load_tokenizer(str(folder)), 64)
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Reply:
        if request.path == "/health":
            return Reply(b"", headers={})
        if request.path == "/version":
            return Reply({"version": "0.32.0"})
        if request.method == "GET":
            return Reply({"detail": "Method Not Allowed"}, status=405)
        with self._lock:
            if request.path == "/generate_tokens":
                return Reply(self._complete(request.body))
            if request.path == "/collective_rpc":
                return Reply({"results": [self._call(request.body["method"], request.body["kwargs"])]})
        return Reply({"status": "done"})

    def close(self) -> None:
        for file in getattr(self.worker, "_grpo_files", []):
            os.close(file)

    def _call(self, method: str, kwargs: dict[str, Any]) -> Any:
        if method == "reload_weights":
            for file in Path(kwargs["weights_path"]).glob("*.safetensors"):
                self.model.load_state_dict(load_file(file), strict=False)
            return None
        return getattr(self.worker, method)(**kwargs)

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(body["max_tokens"], temperature=body["temperature"])
        prompt = body["prompt"]["prompt_token_ids"]
        completions = complete_in_order(
            self._client, [SamplingRequest(tuple(prompt), body["n"], body["seed"])], sampling
        )[0]
        choices = [
            {
                "token_ids": list(completion.token_ids),
                "logprobs": list(completion.logprobs),
                "finish_reason": str(completion.finish_reason),
            }
            for completion in completions
        ]
        return {"prompt_token_ids": prompt, "choices": choices}
