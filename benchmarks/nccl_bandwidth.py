"""Bytes per second of one NCCL broadcast from GPU 0 to GPU 1: what a push of weights over NCCL is measured against.

python benchmarks/nccl_bandwidth.py [BYTES]
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
from torch import distributed, multiprocessing
from torch.multiprocessing.spawn import spawn

from offline_grpo.engine.http import choose_port

ROUNDS = 10


def _broadcast(rank: int, num_bytes: int, port: int, results: multiprocessing.Queue) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # under accelerate, rank 0 would open no store of its own
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=2)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(ROUNDS + 1):
        distributed.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        distributed.broadcast(tensor, src=0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        results.put(num_bytes / statistics.median(seconds[1:]) / 1e9)
    distributed.destroy_process_group()


def broadcast_gb_s(num_bytes: int) -> float:
    """In 10^9 bytes per second, median of `ROUNDS`; one tensor of `num_bytes` in each of two new processes."""
    port = choose_port("127.0.0.1", None, key="MASTER_PORT")
    results: multiprocessing.Queue = multiprocessing.get_context("spawn").Queue()
    spawn(_broadcast, args=(num_bytes, port, results), nprocs=2)
    return results.get(timeout=60)


if __name__ == "__main__":
    print(f"{broadcast_gb_s(int(sys.argv[1]) if len(sys.argv) > 1 else 2**33):.1f} GB/s")
