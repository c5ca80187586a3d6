"""What an iteration on N GPUs should take: sampling, training, push and its proof, from measured speeds and counted
bytes. Needs no GPU.

    python benchmarks/scaling_model.py

Qwen3-4B's shape, bf16, `mode=async`, `train.sharding=fsdp2`, `weight_sync=nccl`, a server on each sampling GPU; every
training GPU has 4 sequences of 16,384 tokens per iteration. Measured on hosts with H200 (`results/h200`): training on
one GPU, sampling on four, a push to one server, its proof amid sampling on eight, NCCL between two. Counted: bytes.
Assumed: `ASSUMED`. The model is checked against measurements that it was not given: training on two GPUs and on eight,
and the iteration of the whole run, of which it is given the parts. All beyond is extrapolated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "h200"
ASSUMED = {"GPUs per host": 8, "GB/s of a GPU's own network card": 50.0, "us per step of a ring": 5.0}
BLOCKS = 36
MICROBATCHES = 4
TOKENS = MICROBATCHES * 16384
"""Of an iteration, per training GPU."""
PROMPT_FRAC = 512 / 16384


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def update_s(name: str, num_gpus: int) -> float:
    """Of TOKENS tokens on each GPU, as `sharding.py` measured it."""
    return result(name)["details"]["compiled"][str(num_gpus)]["s"]


@dataclass(frozen=True)
class Measured:
    """Of one GPU each, or between two."""

    train_s: float  # an update of TOKENS tokens
    sample_tok_s: float
    weights_bytes: float  # in bf16
    push_s: float
    proof_s: float  # amid sampling
    link_bytes_s: float

    @classmethod
    def read(cls, sharding: str = "sharding_8") -> Measured:
        """From the results of `sharding.py`, `whole_run.py` and `weight_sync.py`."""
        run, push = result("whole_run_4b"), result("weight_sync_nccl_4b")["measured"]
        first = run["details"]["alone"]  # its first iteration, which nothing disturbs
        sampled = first["num_completion_tokens"] / first["time/sampling_s"] / int(run["settings"]["servers"])
        proof_s = run["measured"]["time/sync_proof_s"]
        link = push["broadcast_gb_per_s"] * 1e9
        return cls(update_s(sharding, 1), sampled, push["bytes_copied"], push["push_s"], proof_s, link)

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


def whole_run_s(m: Measured) -> float:
    """An iteration of the whole run, of which training is given: its sequences are shorter than the table's."""
    run = result("whole_run_4b")["measured"]
    sample_s = run["num_completion_tokens"] / m.sample_tok_s / 4
    return max(sample_s, run["time/train_s"]) + push_s(m, 4, 8) + m.proof_s


def in_turn_tok_s(m: Measured) -> float:
    """Of one GPU that samples and trains in turn, and needs no push."""
    return TOKENS / (m.train_s + sample_per_trainer_s(m))


def sample_per_trainer_s(m: Measured) -> float:
    """Of one sampling GPU, for one training GPU's completions."""
    return TOKENS * (1 - PROMPT_FRAC) / m.sample_tok_s


def row(m: Measured, num_gpus: int) -> str:
    """A line of the table: the GPUs shared out so that sampling and training take about equally long."""
    sample_per_trainer = sample_per_trainer_s(m)
    trainers = min(max(round(num_gpus * m.train_s / (m.train_s + sample_per_trainer)), 1), num_gpus - 1)
    servers = num_gpus - trainers
    sample = trainers * sample_per_trainer / servers
    pushed = push_s(m, servers, num_gpus)
    best, worst = (max(sample, update) + pushed + m.proof_s for update in train_s(m, trainers))
    speed = trainers * TOKENS / worst
    cells = [
        num_gpus,
        trainers,
        servers,
        *(f"{s:.1f}" for s in (sample, train_s(m, trainers)[1], pushed, m.proof_s)),
        f"{best:.1f} - {worst:.1f}",
    ]
    return (
        f"| {' | '.join(map(str, [*cells, f'{speed / 1000:,.1f}', f'{speed / (num_gpus * in_turn_tok_s(m)):.2f}']))} |"
    )


def main() -> None:
    m = Measured.read()
    for name, num_gpus in (("sharding", 2), ("sharding_8", 8)):
        best, worst = train_s(Measured.read(name), num_gpus)
        found, tokens = update_s(name, num_gpus), num_gpus * TOKENS
        print(
            f"training on {num_gpus} GPUs: {tokens / worst:,.0f} to {tokens / best:,.0f} tokens/s; "
            f"measured {tokens / found:,.0f}"
        )
        assert best <= found <= worst, "the model does not hold where it can be checked"
    found = result("whole_run_4b")["measured"]["time/iteration_s"]
    print(f"the whole run, four GPUs train and four sample: {whole_run_s(m):.1f} s; measured {found:.1f} s")
    assert 0.9 < whole_run_s(m) / found < 1.1, "the model does not hold where it can be checked"
    print(f"a push to one server: {m.push_s:.2f} s, of which the link {m.weights_bytes / m.link_bytes_s:.3f} s\n")
    print(
        "| GPUs | that train | that sample | sampling, s | training, s | push, s | proof, s | iteration, s | thousand "
        "tokens/s | efficiency |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for num_gpus in (2, 4, 8, 16, 64, 256):
        print(row(m, num_gpus))


if __name__ == "__main__":
    main()
