"""What an iteration on N GPUs should take: sampling, training and push, from measured speeds and counted bytes. Needs
no GPU.

    python benchmarks/scaling_model.py

Qwen3-4B's shape, bf16, `mode=async`, `train.sharding=fsdp2`, `weight_sync=nccl`, a server on each sampling GPU; every
training GPU has 4 sequences of 16,384 tokens per iteration. Measured on one host with two H200 (`results/h200`):
training on one GPU, sampling on one, a push to one server, NCCL between two. Counted: bytes. Assumed: `ASSUMED`. The
model is checked against the one measurement that it was not given, training on two GPUs. All beyond is extrapolated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "h200"
ASSUMED = {"GPUs per host": 8, "GB/s of a GPU's own network card": 50.0, "us per step of a ring": 5.0}
BLOCKS = 36
MICROBATCHES = 4
TOKENS = MICROBATCHES * 16384
"""Of an iteration, per training GPU."""
PROMPT_FRAC = 512 / 16384


@dataclass(frozen=True)
class Measured:
    """Of one GPU each, or between two."""

    train_s: float  # an update of TOKENS tokens
    train_2_s: float  # the same on two GPUs, with as many tokens each
    sample_tok_s: float
    weights_bytes: float  # in bf16
    push_s: float
    link_bytes_s: float

    @classmethod
    def read(cls) -> Measured:
        """From the results of `sharding.py` and `weight_sync.py`."""
        sharding, push = (
            json.loads((RESULTS / f"{name}.json").read_text()) for name in ("sharding", "weight_sync_nccl_4b")
        )
        found = push["measured"]
        seconds = sharding["details"]["compiled"]
        speeds = (
            found["concurrent_tokens_per_s"],
            found["bytes_copied"],
            found["push_s"],
            found["broadcast_gb_per_s"] * 1e9,
        )
        return cls(seconds["1"]["s"], seconds["2"]["s"], *speeds)

    @property
    def fixed_s(self) -> float:
        """Of a push, what is not the link's: requests, and what the server does with the weights."""
        return self.push_s - self.weights_bytes / self.link_bytes_s


def train_s(m: Measured, num_gpus: int) -> tuple[float, float]:
    """An update, if the link's time is hidden behind the arithmetic wherever it can be, and if none of it is.

    For every microbatch each GPU receives the bf16 weights twice (forward, backward) and sends fp32 gradients once: 8
    bytes per weight. Between hosts all network cards of a host work together.
    """
    if num_gpus == 1:
        return m.train_s, m.train_s
    per_host, card, step_us = ASSUMED.values()
    speed = m.link_bytes_s if num_gpus <= per_host else min(m.link_bytes_s, per_host * card * 1e9)
    others = (num_gpus - 1) / num_gpus
    link_s = (
        MICROBATCHES * 4 * m.weights_bytes * others / speed + MICROBATCHES * 3 * BLOCKS * (num_gpus - 1) * step_us / 1e6
    )
    return max(m.train_s, link_s), m.train_s + link_s


def push_s(m: Measured, num_servers: int, num_gpus: int) -> float:
    """One broadcast along a chain of all servers, after a gather from all trainers: inside a host over its links, else
    at the speed of a card.
    """
    per_host, card, step_us = ASSUMED.values()
    speed = m.link_bytes_s if num_gpus <= per_host else min(m.link_bytes_s, card * 1e9)
    passes = 1 if num_gpus - num_servers == 1 else 2
    return m.fixed_s + passes * m.weights_bytes / speed + num_gpus * step_us / 1e6


def row(m: Measured, num_gpus: int) -> str:
    """A line of the table: the GPUs shared out so that sampling and training take about equally long."""
    sample_per_trainer = TOKENS * (1 - PROMPT_FRAC) / m.sample_tok_s  # s for one sampling GPU
    trainers = min(max(round(num_gpus * m.train_s / (m.train_s + sample_per_trainer)), 1), num_gpus - 1)
    servers = num_gpus - trainers
    sample = trainers * sample_per_trainer / servers
    pushed = push_s(m, servers, num_gpus)
    best, worst = (max(sample, update) + pushed for update in train_s(m, trainers))
    speed = trainers * TOKENS / worst
    per_gpu = TOKENS / (m.train_s + sample_per_trainer)  # of one GPU that does both in turn, and needs no push
    cells = [
        num_gpus,
        trainers,
        servers,
        *(f"{s:.1f}" for s in (sample, train_s(m, trainers)[1], pushed)),
        f"{best:.1f} - {worst:.1f}",
    ]
    return f"| {' | '.join(map(str, [*cells, f'{speed / 1000:,.1f}', f'{speed / (num_gpus * per_gpu):.2f}']))} |"


def main() -> None:
    m = Measured.read()
    best, worst = train_s(m, 2)
    print(
        f"training on two GPUs: {2 * TOKENS / worst:,.0f} to {2 * TOKENS / best:,.0f} tokens/s; measured "
        f"{2 * TOKENS / m.train_2_s:,.0f}"
    )
    assert best <= m.train_2_s <= worst, "the model does not hold where it can be checked"
    print(f"a push to one server: {m.push_s:.2f} s, of which the link {m.weights_bytes / m.link_bytes_s:.3f} s\n")
    print(
        "| GPUs | that train | that sample | sampling, s | training, s | push, s | iteration, s | thousand "
        "tokens/s | efficiency |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for num_gpus in (2, 4, 8, 16, 64, 256, 1000):
        print(row(m, num_gpus))


if __name__ == "__main__":
    main()
