"""TRL's AsyncGRPOTrainer as an arm of async_trl.py, which starts it in a process of its own, beside vLLM's server.

Its attention kernel for packed rows is on the Hub. Here FlashAttention 4 does its work or, if that is missing or gives
the wrong output or gradients, torch's kernel.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from async_trl import WARMUP
from iteration_gpu import GROUP, LR
from random_model import sevens
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

KEPT = ("perf/", "batch/", "sample/", "rollout/", "ratio", "kl", "reward", "grad_norm", "completions/mean_length")


def reward(completions: Any, **_: Any) -> list[float]:
    return [sevens(completion[0]["content"]) for completion in completions]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, *at: Any, softmax_scale: float | None, **_: Any) -> Tensor:
    """What the kernels compute: q [Tq, heads, D] of each segment attends to its path k, v [Tk, kv_heads, D], of which
    it is the end. `at` has the boundaries of both, and the longest of both."""
    outs = []
    for (a, b), (c, d) in zip(pairwise(at[0].tolist()), pairwise(at[1].tolist()), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        parts = [x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])]
        outs.append(scaled_dot_product_attention(*parts, attn_mask=mask, scale=softmax_scale, enable_gqa=True)[0])
    return torch.cat(outs, dim=1).transpose(0, 1)


def flash4(q: Tensor, k: Tensor, v: Tensor, *at: Any, softmax_scale: float | None, **_: Any) -> Any:
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), at, strict=True))
    return flash_attn_varlen_func(q.contiguous(), k, v, **named, softmax_scale=softmax_scale, causal=True)[0]


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, *at: Any, softmax_scale: float | None, **_: Any) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q.contiguous(), k, v, *at, scale=softmax_scale, window_size=(-1, 0), enable_gqa=True)


def right_kernel() -> Callable[..., Any]:
    """The first kernel whose output and gradients are those of `one_by_one`."""
    if not torch.cuda.is_available():
        return one_by_one
    leaves = [torch.randn(n, heads, 128, device="cuda") for n, heads in ((1053, 16), (1079, 8), (1079, 8))]
    at = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 13, 533, 1053], [0, 13, 546, 1079])]

    def results(kernel: Callable[..., Any], dtype: torch.dtype) -> Tensor:
        qkv = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        out = kernel(*qkv, *at, 520, 533, softmax_scale=0.1)
        return torch.cat([x.detach().float().flatten() for x in (out, *torch.autograd.grad(out.sum(), qkv))])

    wanted = results(one_by_one, torch.float32)
    for kernel in (flash4, torch_varlen):
        try:
            error = float((results(kernel, torch.bfloat16) - wanted).norm() / wanted.norm())
            print(f"{kernel.__name__}: relative error {error:.4f}", flush=True)
            if error < 0.02:
                return kernel
        except Exception:
            traceback.print_exc()
    raise RuntimeError("no kernel for TRL's packed rows is right here")


def train(work: Path, args: SimpleNamespace) -> None:
    """Writes WORK/trl.json."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import async_grpo_trainer, packing
    from trl.experimental.async_grpo.async_grpo_config import AsyncGRPOConfig

    kernel = right_kernel()
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=kernel)  # type: ignore[assignment]
    tokenizer: Any = AutoTokenizer.from_pretrained(f"{work}/model")
    tokenizer.response_template = {}  # TRL knows none for this chat template: the reward gets the decoded text
    problems = [json.loads(line)["prompt"] for line in (work / "problems.jsonl").read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": problem}]} for problem in problems]
    longest = max(len(tokenizer.apply_chat_template(row["prompt"], return_dict=False)) for row in rows)
    sizes = {"per_device_train_batch_size": args.batch, "num_generations": GROUP, "max_completion_length": args.tokens}
    sizes |= {"gradient_accumulation_steps": args.prompts * GROUP // args.batch, "max_steps": args.iterations}
    sizes |= {"token_budget": args.batch * (args.tokens + 1) + args.batch // GROUP * longest}
    sizes |= {"max_inflight_tasks": args.staleness * args.prompts * GROUP, "max_staleness": args.staleness + 2}
    how: dict[str, Any] = {
        "gradient_checkpointing": False,
        "learning_rate": LR,
        "vllm_server_base_url": args.url,
    }
    how |= {"dtype": "float32" if args.small else "bfloat16", "bf16": not args.small, "use_cpu": args.small}
    how |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "vllm_server_timeout": args.timeout}
    config = AsyncGRPOConfig(f"{work}/trl_out", **sizes, **how)
    if args.small:
        setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # noqa: B010  # TRL's asks CUDA
    # a fingerprint is given, for which dill would pickle pyarrow wherever that is no part of site-packages
    make, data = async_grpo_trainer.AsyncGRPOTrainer, Dataset(InMemoryTable.from_pylist(rows), fingerprint="rows")
    trainer: Any = make(f"{work}/model", reward, config, data, tokenizer)
    prompts: dict[int, list[int]] = {}
    take = trainer.rollout_queue.get

    def get(timeout: float) -> Any:
        sample = take(timeout=timeout)
        prompts[sample.group_id] = sample.input_ids[: int(sample.completion_mask.argmax())].tolist()
        return sample

    trainer.rollout_queue.get = get
    trainer.vllm_client.get_dtype = lambda: config.dtype  # vLLM lists all packages to answer, and fails without pip
    if args.small:
        trainer.weight_transfer.init_weight_transfer = trainer.vllm_client.wait_for_server_ready
        trainer.weight_transfer.send_weights = list
    trainer.train()
    logged = [row for row in trainer.state.log_history if "perf/step_s" in row][WARMUP - 1 :]  # the first has none
    names = sorted({name for row in logged for name in row if name.startswith(KEPT)})
    rounds = {name: [row[name] for row in logged if row.get(name) is not None] for name in names}
    result = {"seconds": rounds["perf/step_s"], "tokens": rounds["batch/trained_tokens_per_step"], "rounds": rounds}
    result |= {"prompts": [prompts[i] for i in range(args.prompts)], "kernel": kernel.__name__}
    result |= {"versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")}}
    (work / "trl.json").write_text(json.dumps(result))


def main() -> None:
    args = SimpleNamespace(**json.loads(sys.argv[1]))
    train(Path(args.work), args)


if __name__ == "__main__":
    main()
