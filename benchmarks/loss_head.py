"""Time and memory of the loss head (forward and backward) against materialised logits and TRL's fused head.

    python benchmarks/loss_head.py                      # the claim: CPU, float32, V=32000, H=256, 1536 tokens
    python benchmarks/loss_head.py --device cuda --dtype bfloat16 --vocab 151936 --hidden 4096 --tokens 8192 --name
    loss_head_h100
    # long sequences, for which logits have no room
    python benchmarks/loss_head.py --device cuda --dtype bfloat16 --vocab 62000 --hidden 2048 --tokens 131072
    --without-materialised --name loss_head_131k
    # where a sampler's filters left 8 tokens on average; sizes as of a run with top-p 0.97: 48 % have one, the median 2
    python benchmarks/loss_head.py --mean-set-size 8 --device cuda --dtype bfloat16 --vocab 151936 --hidden 2048
    --tokens 131072 --name h200/filtered_head

Arms. All compute the logprob of a target and the entropy, both with gradient, for trainable weights:
    materialised  logits, / temperature, log_softmax, gather; entropy = -(p * log p).sum(); autograd
    tiled         offline_grpo.model.lm_head.TiledHead
    entropy_as_metric  the same, with an entropy that carries no gradient; on a GPU in bfloat16 it keeps its tiles
                       (lm_head.KeptHead)
    trl_fused     trl.kernels.ChunkedLogProbFunction with the tile width that TRL uses
With --mean-set-size, the entropy without gradient:
    full          TiledHead, over the whole vocabulary
    filtered      offline_grpo.model.filtered_head, as it chooses: in one of the next three ways
    kernels, gathered, tiled_pairs

Before the timing, values and gradients of the arms are compared. The arms are interleaved in one process; time_ratio is
the median over rounds of the ratio within a round. Other work on the machine slows the fused arms most, because their
threads synchronise after every tile. If time_ratio and time_ratio_of_minima differ much, the machine was busy. On a
busy machine use OMP_NUM_THREADS=1.

Memory is the increase of the peak over the memory in use before the call, gradients included. On a GPU the allocator
reports it. On a CPU every arm runs in its own process: the kernel's high-water mark of resident memory (VmHWM) is reset
once the inputs exist and a tiny call has loaded the libraries, and it is read after one call. This includes memory that
torch's profiler cannot see, such as the packing buffers of the matrix library; it needs Linux.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from common import Target, alternate, parser_of, write_result
from torch import Tensor

from offline_grpo.model import filtered_head
from offline_grpo.model.lm_head import TiledHead

ENTROPY_COEF = 0.01
TRL_TILE_WIDTH = 32768
BASELINE = "materialised"
HEAD = TiledHead(tile_width=None)
CLAIMS = {
    "cpu": "On a CPU, logprob and entropy with gradients need at most 0.6 of the time and 0.3 of the memory of "
    "materialised logits.",
    "cuda": "On an H100, 8192 logprobs of 151936 tokens, with an entropy that is a metric, take at most 55 ms "
    "and 4 GiB.",
}
TARGETS = {
    "cpu": [Target("time_ratio", "<=", 0.6), Target("memory_ratio", "<=", 0.3)],
    "cuda": [Target("entropy_as_metric_time_s", "<=", 0.055), Target("entropy_as_metric_peak_gib", "<=", 4.0)],
}
SINGLE_FRAC, SET_SPREAD = 0.48, 1.25
"""Sets of one token, and the spread of the logarithm of the others' sizes: of a mean of 8, 1% have more than 80."""


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, H], a leaf, as is weight
    weight: Tensor  # [V, H]
    targets: Tensor  # [N]
    temperature: float
    num_alternatives: Tensor  # [N]
    alternatives: Tensor  # [M]; few tokens are in many sets, as in texts

    @classmethod
    def random(cls, args: argparse.Namespace, num_tokens: int) -> Inputs:
        torch.manual_seed(0)
        dtype = getattr(torch, args.dtype)
        targets = torch.randint(args.vocab, (num_tokens,), device=args.device)
        counts, alternatives = torch.zeros_like(targets), targets[:0]
        if args.mean_set_size is not None:
            # Each set has the tokens of consecutive ranks, from one on whose logarithm is uniform.
            order = torch.randperm(args.vocab, device=args.device)
            ranks = (torch.rand(num_tokens, device=args.device) * math.log(args.vocab)).exp().long() - 1
            mean = (args.mean_set_size - 1) / (1 - SINGLE_FRAC)
            sizes = mean * (SET_SPREAD * torch.randn(num_tokens, device=args.device) - SET_SPREAD**2 / 2).exp()
            is_single = torch.rand(num_tokens, device=args.device) < SINGLE_FRAC
            counts = sizes.round().long().clamp(1, args.vocab - 1).where(~is_single, 0)
            place = torch.arange(int(counts.sum()), device=args.device) - (counts.cumsum(0) - counts).repeat_interleave(
                counts
            )
            targets = order[ranks % args.vocab]
            alternatives = order[(ranks.repeat_interleave(counts) + 1 + place) % args.vocab]
        return cls(
            hidden=torch.randn(num_tokens, args.hidden, device=args.device, dtype=dtype).requires_grad_(),
            weight=(2 * args.hidden**-0.5 * torch.randn(args.vocab, args.hidden, device=args.device))
            .to(dtype)
            .requires_grad_(),
            targets=targets,
            temperature=args.temperature,
            num_alternatives=counts,
            alternatives=alternatives,
        )

    @property
    def temperatures(self) -> Tensor:
        return torch.full((len(self.hidden),), self.temperature, device=self.hidden.device)  # [N]


def materialised(inputs: Inputs) -> tuple[Tensor, Tensor]:
    logits = (inputs.hidden @ inputs.weight.T).float() / inputs.temperatures[:, None]  # [N, V]
    log_p = torch.log_softmax(logits, dim=-1)
    return log_p.gather(1, inputs.targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def tiled(inputs: Inputs, *, entropy_requires_grad: bool) -> tuple[Tensor, Tensor]:
    of_inputs = (inputs.hidden, inputs.weight, None, inputs.targets, inputs.temperatures)
    return HEAD(*of_inputs, entropy_requires_grad=entropy_requires_grad)


def trl_fused(inputs: Inputs) -> tuple[Tensor, Tensor]:
    from trl.kernels import ChunkedLogProbFunction

    of_inputs = (inputs.hidden, inputs.weight, None, inputs.targets, inputs.temperature)
    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(*of_inputs, TRL_TILE_WIDTH, None, 1.0, ("entropy",))
    return logprobs, entropy


def masked(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What the filtered head should give."""
    logits = (inputs.hidden.float() @ inputs.weight.float().T) / inputs.temperatures[:, None]  # [N, V]
    outside = torch.ones_like(logits, dtype=torch.bool).scatter_(1, inputs.targets[:, None], False)
    rows = torch.arange(len(logits), device=logits.device).repeat_interleave(inputs.num_alternatives)
    outside[rows, inputs.alternatives] = False
    log_p = torch.log_softmax(logits.masked_fill(outside, -torch.inf), dim=-1)
    entropy = -(log_p.exp() * log_p.masked_fill(outside, 0.0)).sum(-1).detach()
    return log_p.gather(1, inputs.targets[:, None]).squeeze(1), entropy


def filtered(inputs: Inputs, *, way: str | None) -> tuple[Tensor, Tensor]:
    """In the way of this name, or in the one that the head chooses."""
    chosen = filtered_head.way_for
    if way is not None:
        named = {"gathered": filtered_head.GATHERED, "tiled_pairs": filtered_head.TILED}
        if way == "kernels":
            from offline_grpo.model import pair_kernel

            named["kernels"] = filtered_head.Way(pair_kernel.products, pair_kernel.sums)
        filtered_head.way_for = lambda *_: named[way]
    try:
        return filtered_head.filtered_head(
            *(inputs.hidden, inputs.weight, None, inputs.targets, inputs.temperatures),
            num_alternatives=inputs.num_alternatives,
            alternatives=inputs.alternatives,
            entropy_requires_grad=False,
        )
    finally:
        filtered_head.way_for = chosen


HEADS = {"materialised": materialised, "tiled": partial(tiled, entropy_requires_grad=True)}
HEADS |= {"entropy_as_metric": partial(tiled, entropy_requires_grad=False), "trl_fused": trl_fused}
OF_SETS = {"full": HEADS["entropy_as_metric"], "filtered": partial(filtered, way=None)}
OF_SETS |= {way: partial(filtered, way=way) for way in ("kernels", "gathered", "tiled_pairs")}


def backward(head: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """One forward and backward pass. Returns logprobs [N] and entropy [N]; gradients are in the leaf tensors."""
    inputs.hidden.grad = inputs.weight.grad = None
    logprobs, entropy = head(inputs)
    loss = -logprobs.mean() - (ENTROPY_COEF * entropy.mean() if entropy.requires_grad else 0.0)
    loss.backward()
    return logprobs.detach(), entropy.detach()


def largest_differences(
    inputs: Inputs,
    head: Callable[[Inputs], tuple[Tensor, Tensor]] = HEADS["tiled"],
    right: Callable[[Inputs], tuple[Tensor, Tensor]] = materialised,
) -> dict[str, float]:
    """Errors of a head against materialised logits; those of gradients are relative to the largest gradient."""
    results = []
    for each in (right, head):
        logprobs, entropy = backward(each, inputs)
        gradients = {"hidden": inputs.hidden.grad, "weight": inputs.weight.grad}
        results.append({"logprobs": logprobs, "entropy": entropy, **gradients})
    differences = {}
    for key, expected in results[0].items():
        scale = expected.abs().max() if key in ("hidden", "weight") else 1.0
        differences[key] = float(((results[1][key] - expected) / scale).abs().max())
    return differences


def measure_peak_bytes(args: argparse.Namespace, name: str) -> int:
    """Increase of the peak memory of this process during one call."""
    inputs = Inputs.random(args, args.tokens)
    head = (HEADS | OF_SETS)[name]
    backward(head, Inputs.random(args, 8))
    if args.device == "cuda":
        torch.cuda.synchronize()
        held_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        backward(head, inputs)
        return torch.cuda.max_memory_allocated() - held_bytes
    held_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS, see proc(5)
    backward(head, inputs)
    return _status_bytes("VmHWM") - held_bytes


def measure_peak_in_child(name: str) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", name]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what the tiny call has freed does not stay resident
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=1536, help="N, tokens scored per call")
    parser.add_argument("--vocab", type=int, default=32000, help="V, rows of the head")
    parser.add_argument("--hidden", type=int, default=256, help="H, width of the model")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype of hidden states and weights"
    )
    parser.add_argument("--without-trl", action="store_true", help="where TRL is not installed")
    parser.add_argument("--without-materialised", action="store_true", help="values are compared on 8192 tokens alone")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=11, help="timed calls per arm")
    parser.add_argument("--name", default="loss_head", help="name of the result file")
    parser.add_argument("--mean-set-size", type=float, help="time the filtered head, with sets of this mean size")
    parser.add_argument("--without", nargs="*", default=[], help="arms of it that are left out")
    parser.add_argument("--peak-of", choices=[*HEADS, *OF_SETS], help="only print the peak memory of one arm, in bytes")
    return parser.parse_args()


def measure_filtered(args: argparse.Namespace) -> None:
    """The filtered head beside the full one. Every way is right first."""
    heads = {name: head for name, head in OF_SETS.items() if name not in args.without}
    if args.device == "cpu":
        heads.pop("kernels", None)
    few = Inputs.random(args, min(args.tokens, 1024))
    differences = {name: largest_differences(few, head, masked) for name, head in heads.items() if name != "full"}
    assert all(value < 0.02 for found in differences.values() for value in found.values()), differences
    inputs = Inputs.random(args, args.tokens)
    timings = alternate({name: partial(backward, head, inputs) for name, head in heads.items()}, rounds=args.rounds)
    peak_bytes = {
        name: measure_peak_bytes(args, name) if args.device == "cuda" else measure_peak_in_child(name) for name in heads
    }
    way = filtered_head.way_for(inputs.hidden, inputs.weight, args.tokens + len(inputs.alternatives))
    measured: dict[str, float] = {
        "time_ratio": timings.ratio("filtered", "full"),
        "memory_ratio": peak_bytes["filtered"] / peak_bytes["full"],
        "mean_set_size": 1 + len(inputs.alternatives) / args.tokens,
        **{f"{name}_time_s": timings.median_s(name) for name in heads},
        **{f"{name}_peak_gib": peak_bytes[name] / 2**30 for name in heads},
    }
    is_small = args.mean_set_size <= 8
    targets = [Target("time_ratio", "<=", 0.5 if is_small else 1.0)]
    if is_small and args.device == "cuda":  # on a CPU the gradient of the weights is most of it
        targets.append(Target("memory_ratio", "<=", 0.5))
    write_result(
        args.name,
        claim="Of sets of 8 tokens on average, logprob and gradients take at most half of the time and, on a GPU, of "
        "the memory of the full head; of large sets, at most as long.",
        targets=targets,
        settings={key: value for key, value in vars(args).items() if key not in ("peak_of", "name")},
        measured={key: float(f"{value:.4g}") for key, value in measured.items()},
        details={"way": way.products.__name__, "largest_differences": differences, "timings": timings.summary("full")},
    )


def main() -> None:
    args = parse_args()
    if args.peak_of:
        print(measure_peak_bytes(args, args.peak_of))
        return
    if args.mean_set_size is not None:
        measure_filtered(args)
        return
    inputs = Inputs.random(args, args.tokens)
    differences = largest_differences(Inputs.random(args, min(args.tokens, 8192)))
    left_out = {"trl_fused": args.without_trl, BASELINE: args.without_materialised}
    heads = {name: head for name, head in HEADS.items() if not left_out.get(name)}
    arms = {name: partial(backward, head, inputs) for name, head in heads.items()}
    timings = alternate(arms, rounds=args.rounds)
    peak_bytes = {name: measure_peak_in_child(name) for name in heads}
    measured: dict[str, float] = {}
    for other, suffix in ((BASELINE, ""), ("trl_fused", "_to_trl_fused")):
        if other in heads:
            measured[f"time_ratio{suffix}"] = timings.ratio("tiled", other)
            measured[f"memory_ratio{suffix}"] = peak_bytes["tiled"] / peak_bytes[other]
    if BASELINE in heads:
        measured["time_ratio_of_minima"] = timings.min_s("tiled") / timings.min_s(BASELINE)
    measured |= {
        "entropy_as_metric_time_s": timings.median_s("entropy_as_metric"),
        "entropy_as_metric_peak_gib": peak_bytes["entropy_as_metric"] / 2**30,
        **{f"largest_difference_{key}": value for key, value in differences.items()},
    }
    write_result(
        args.name,
        claim=CLAIMS[args.device],
        targets=[] if args.without_materialised else TARGETS[args.device],
        settings={key: value for key, value in vars(args).items() if key not in ("peak_of", "name")},
        measured={key: float(f"{value:.4g}") for key, value in measured.items()},
        details={"peak_extra_bytes": peak_bytes, "timings": timings.summary(next(iter(heads)))},
    )


if __name__ == "__main__":
    main()
