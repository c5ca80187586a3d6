"""Time and memory of the loss head (forward and backward) against materialised logits and TRL's fused head.

    python benchmarks/loss_head.py                      # the claim: CPU, float32, V=32000, H=256, 1536 tokens
    python benchmarks/loss_head.py --device cuda --dtype bfloat16 --vocab 151936 --hidden 4096 --tokens 8192 --name
    loss_head_h100
    # long sequences, for which logits have no room
    python benchmarks/loss_head.py --device cuda --dtype bfloat16 --vocab 62000 --hidden 2048 --tokens 131072
    --without-materialised --name loss_head_131k

Arms. All compute the logprob of a target and the entropy, both with gradient, for trainable weights:
    materialised  logits, / temperature, log_softmax, gather; entropy = -(p * log p).sum(); autograd
    tiled         offline_grpo.model.lm_head.TiledHead
    entropy_as_metric  the same, with an entropy that carries no gradient; on a GPU in bfloat16 it keeps its tiles
                       (lm_head.KeptHead)
    trl_fused     trl.kernels.ChunkedLogProbFunction with the tile width that TRL uses

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
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from common import Target, alternate, parser_of, write_result
from torch import Tensor

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


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor  # [N, H], a leaf, as is weight
    weight: Tensor  # [V, H]
    targets: Tensor  # [N]
    temperature: float

    @classmethod
    def random(cls, args: argparse.Namespace, num_tokens: int) -> Inputs:
        torch.manual_seed(0)
        dtype = getattr(torch, args.dtype)
        return cls(
            hidden=torch.randn(num_tokens, args.hidden, device=args.device, dtype=dtype).requires_grad_(),
            weight=(2 * args.hidden**-0.5 * torch.randn(args.vocab, args.hidden, device=args.device))
            .to(dtype)
            .requires_grad_(),
            targets=torch.randint(args.vocab, (num_tokens,), device=args.device),
            temperature=args.temperature,
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


HEADS = {"materialised": materialised, "tiled": partial(tiled, entropy_requires_grad=True)}
HEADS |= {"entropy_as_metric": partial(tiled, entropy_requires_grad=False), "trl_fused": trl_fused}


def backward(head: Callable[[Inputs], tuple[Tensor, Tensor]], inputs: Inputs) -> tuple[Tensor, Tensor]:
    """One forward and backward pass. Returns logprobs [N] and entropy [N]; gradients are in the leaf tensors."""
    inputs.hidden.grad = inputs.weight.grad = None
    logprobs, entropy = head(inputs)
    loss = -logprobs.mean() - (ENTROPY_COEF * entropy.mean() if entropy.requires_grad else 0.0)
    loss.backward()
    return logprobs.detach(), entropy.detach()


def largest_differences(inputs: Inputs) -> dict[str, float]:
    """Errors of the tiled head against materialised logits; those of gradients are relative to the largest gradient."""
    results = {}
    for name in (BASELINE, "tiled"):
        logprobs, entropy = backward(HEADS[name], inputs)
        gradients = {"hidden": inputs.hidden.grad, "weight": inputs.weight.grad}
        results[name] = {"logprobs": logprobs, "entropy": entropy, **gradients}
    differences = {}
    for key, expected in results[BASELINE].items():
        scale = expected.abs().max() if key in ("hidden", "weight") else 1.0
        differences[key] = float(((results["tiled"][key] - expected) / scale).abs().max())
    return differences


def measure_peak_bytes(args: argparse.Namespace, name: str) -> int:
    """Increase of the peak memory of this process during one call."""
    inputs = Inputs.random(args, args.tokens)
    backward(HEADS[name], Inputs.random(args, 8))
    if args.device == "cuda":
        torch.cuda.synchronize()
        held_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        backward(HEADS[name], inputs)
        return torch.cuda.max_memory_allocated() - held_bytes
    held_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS, see proc(5)
    backward(HEADS[name], inputs)
    return _status_bytes("VmHWM") - held_bytes


def measure_peak_in_child(name: str) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--peak-of", name]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


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
    parser.add_argument("--peak-of", choices=list(HEADS), help="only print the peak memory of one arm, in bytes")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.peak_of:
        print(measure_peak_bytes(args, args.peak_of))
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
