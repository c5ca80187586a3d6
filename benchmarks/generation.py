"""Tokens per second of a run's vLLM server against vLLM's offline engine, on the same GPU with the same share of its
memory.

    python benchmarks/generation.py                # one H100: at most six minutes
    # does it pay to run the model in a process of its own?
    python benchmarks/generation.py --servers '{"uni": {"args": {"distributed_executor_backend": "uni"}},
        "mp": {"args": {"distributed_executor_backend": "mp"}}}' --share 0.27 --tokens 470 88
    # 8-bit weights and activations? At most eight minutes with an 80 GB card
    python benchmarks/generation.py --shape 8b --servers '{"bf16": {}, "fp8": {"args": {"quantization": "fp8"}}}'
        --server-args '{"kv_cache_memory_bytes": 20000000000}' --sequences 64 256 --limit-s 200 --out fp8_generation
    # what do filters cost, and what does it cost to be told which tokens they left?
    python benchmarks/generation.py --servers '{"0.6b": {}, "smollm2": {"model": "FOLDER"}}' --share 0.3
        --filters '{"top_p": 0.95, "top_k": 20}' --sequences 256 --tokens 512 --rounds 5 --out filters
    # does it pay to guess tokens from what is there?
    python benchmarks/generation.py --servers '{"plain": {"model": "FOLDER"}, "ngram": {"model": "FOLDER", "args":
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}}}' --share 0.2
        --task math_sample --sequences 8 256 --tokens 256 256 --out speculation
    python benchmarks/generation.py --small        # a tiny model and vLLM's CPU build; says nothing about speed

Every sequence has exactly `--tokens` tokens after a prompt of 40 random ones, or of --task in the chat template of the
first server's model, in groups of 8, each with a seed of its own. First,
each sequence alone, all arms must return the same tokens. Then they alternate.

Arms:
    server            VllmEngine and a managed server, as `run_grpo.py` uses them
    stock             the same server through /v1/completions, which has to make text
    offline           vLLM's LLM.generate in a process of its own: the sampled token's logprob, no text
    offline_bare      the same without logprobs

With --servers there are several servers on the card, which start at the same time. Each is as runs use it, with vLLM's
options, the environment variables and the model that the JSON adds; gains are over the first. --tokens may differ for
the numbers of sequences. With --filters each server is asked in three ways: without, with them (`_filtered`), and with
them but without the sets of tokens that they leave (`_untold`).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from common import RESULTS, Target, Timings, complete_in_order, parser_of, write_result

from offline_grpo.config import compose as conf
from offline_grpo.config.problems import build_task
from offline_grpo.engine.vllm import STOCK, VllmEngine, VllmLauncher
from offline_grpo.types import Completion, SamplingParams, SamplingRequest, ServedWeights, Split

COMMON: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_seqs": 1024,
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "seed": 0,
}


OTHERS_BYTES = 7 * 2**30
"""What a server of Qwen3-0.6B needs beside its KV cache: weights, activations of up to 1,024 sequences, CUDA graphs."""


GROUP = 8
PROMPT_TOKENS = 40
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


def requests(num_sequences: int, prompts: Sequence[tuple[int, ...]] = ()) -> list[SamplingRequest]:
    draw = random.Random(num_sequences)
    return [
        SamplingRequest(
            prompts[index % len(prompts)] if prompts else tuple(draw.randint(3, 80) for _ in range(PROMPT_TOKENS)),
            GROUP,
            1000 * index,
        )
        for index in range(num_sequences // GROUP)
    ]


def prompts_of(task: str, model: str) -> list[tuple[int, ...]]:
    """The token ids of its first 32 held-out problems."""
    from transformers import AutoTokenizer

    conf.register()
    problems = build_task(conf.typed(conf.composed([f"task={task}"])).task).problems(Split.EVAL)
    tokenizer = AutoTokenizer.from_pretrained(model)
    encode = partial(tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False)
    return [tuple(encode([*map(dict, problem.messages)])) for problem in islice(problems, 32)]


class EndlessClient(VllmEngine):
    """Ignores the end-of-sequence token, so that every round does the same work."""

    def body(self, request: SamplingRequest, sampling: SamplingParams, weights: ServedWeights) -> dict[str, Any]:
        return super().body(request, sampling, weights) | {"ignore_eos": True, "stop_token_ids": []}


CLIENT: dict[str, Any] = {"eos_ids": [2], "vocab_size": 151936, "batch_size": 256, "timeout_s": 600, "max_retries": 0}


class Served:
    """A server of our own and its engine."""

    def __init__(
        self, model: Path, args: dict[str, Any], folder: Path, env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        engine: dict[str, Any] = {"python": None, "host": "127.0.0.1", "port": None, "api_key": None}
        engine["args"] = {**VllmLauncher.essentials["args"], **args}
        engine["env"] = {**VllmLauncher.essentials["env"], **env}
        launcher: Any = VllmLauncher(**engine, start_timeout_s=400, blackwell_workaround=False)
        self.client = EndlessClient(launcher=launcher, log_dir=folder, **CLIENT)
        started = time.monotonic()
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.client.stop)
            self.client.start(str(model), {})
            if_it_fails.pop_all()
        self.start_s = time.monotonic() - started
        self.last: list[list[Completion]] = []

    def generate(self, asked: Sequence[SamplingRequest], tokens: int, **filters: Any) -> list[Group]:
        found = complete_in_order(self.client, asked, SamplingParams(max_new_tokens=tokens, **filters))
        self.last = found if filters.get("needs_alternatives") else self.last
        return [[(completion.token_ids, completion.logprobs) for completion in group] for group in found]

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
        kind: Any = {"detokenize": False, "flat_logprobs": True, "ignore_eos": True, "temperature": 1.0}
        kind |= {"output_kind": RequestOutputKind.FINAL_ONLY, "logprobs": 0 if logprobs else None}
        settings = [vllm.SamplingParams(n=n, seed=seed, max_tokens=tokens, **kind) for _, n, seed in asked]
        prompts: Any = [{"prompt_token_ids": list(ids)} for ids, _, _ in asked]
        found = engine.generate(prompts, settings, use_tqdm=False)
        pipe.send(
            [
                [(tuple(one.token_ids), tuple(one.logprobs.logprobs) if logprobs else ()) for one in output.outputs]  # type: ignore[union-attr]
                for output in found
            ]
        )


def check_equal(arms: dict[str, Callable[[Sequence[SamplingRequest], int], list[Group]]], tokens: int) -> None:
    """One sequence at a time, so that no arm's batches differ from another's."""
    for request in requests(3 * GROUP)[:3]:
        alone = [SamplingRequest(request.prompt_ids, 1, request.seed)]
        answers = {name: generate(alone, tokens)[0][0] for name, generate in arms.items()}
        ids, logprobs = answers[next(iter(answers))]
        assert len(ids) == tokens
        for name, (theirs, their_logprobs) in answers.items():
            assert theirs == ids, f"{name} draws other tokens"
            assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(logprobs, their_logprobs, strict=False)), name


def measure(
    arms: dict[str, Callable[[Sequence[SamplingRequest], int], list[Group]]],
    count: int,
    tokens: int,
    rounds: int,
    deadline: float,
    prompts: Sequence[tuple[int, ...]] = (),
) -> Timings:
    """Seconds that every arm takes for `count` sequences. Rounds for which no time is left are left out."""
    for generate in arms.values():
        generate(requests(8 * GROUP, prompts), max(1, tokens // 8))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    round_s = 0.0
    for index in range(rounds):
        if index > 0 and time.monotonic() + round_s > deadline:
            break
        began = time.monotonic()
        for name in list(arms) if index % 2 == 0 else reversed(list(arms)):
            started = time.perf_counter()
            groups = arms[name](requests(count, prompts), tokens)
            seconds[name].append(time.perf_counter() - started)
            assert all(len(ids) == tokens for group in groups for ids, _ in group)
            print(f"{count} sequences, {name}: {count * tokens / seconds[name][-1]:,.0f} tok/s", flush=True)
        round_s = time.monotonic() - began
    return Timings(seconds)


def tokens_per_s(timings: dict[int, Timings], tokens: Sequence[int]) -> dict[str, float]:
    """Of every arm, by name and number of sequences; each sequence has so many tokens."""
    speeds = {
        (name, count): count * each / found.median_s(name)
        for (count, found), each in zip(sorted(timings.items()), tokens, strict=True)
        for name in found.seconds
    }
    return {f"{name}_{count}_tokens_per_s": speed for (name, count), speed in speeds.items()}


def against_offline(
    arguments: argparse.Namespace, model: Path, args: dict[str, Any], stack: ExitStack, folder: Path
) -> None:
    deadline = time.monotonic() + arguments.limit_s
    offline = Offline(model, args)
    stack.callback(offline.close)
    served = Served(model, {**args, **arguments.server_args}, folder)
    stack.callback(served.close)
    stock = EndlessClient(base_url=served.client.base_url, **CLIENT)
    stock.path = STOCK
    stack.callback(stock.close)
    offline_start_s = offline.start()
    print(f"server up after {served.start_s:.0f} s, offline engine after {offline_start_s:.0f} s", flush=True)

    def ask_stock(asked: Sequence[SamplingRequest], tokens: int) -> list[Group]:
        found = complete_in_order(stock, asked, SamplingParams(max_new_tokens=tokens))
        return [[(completion.token_ids, completion.logprobs) for completion in group] for group in found]

    arms: dict[str, Callable[[Sequence[SamplingRequest], int], list[Group]]] = {
        "server": served.generate,
        "offline": offline.generate,
    }
    check_equal({**arms, "stock": ask_stock}, 64 if not arguments.small else 32)
    arms["offline_bare"] = lambda asked, tokens: offline.generate(asked, tokens, logprobs=False)
    (few, few_tokens), (many, many_tokens) = zip(arguments.sequences, arguments.tokens, strict=True)
    timings = {few: measure({**arms, "stock": ask_stock}, few, few_tokens, arguments.rounds, deadline)}
    timings[many] = measure(arms, many, many_tokens, arguments.rounds, deadline)
    measured = {"server_start_s": served.start_s, "offline_start_s": offline_start_s}
    for count, found in timings.items():
        measured[f"server_vs_offline_{count}"] = 1 / found.ratio("server", "offline")
    measured |= tokens_per_s(timings, arguments.tokens)
    save(
        arguments,
        "generation",
        claim="Sampling through a run's vLLM server, against vLLM's offline engine with logprobs and without text",
        targets=[Target(f"server_vs_offline_{few}", ">=", 0.95), Target(f"server_{many}_tokens_per_s", ">=", 20_000)],
        measured=measured,
        details={count: found.summary("offline") for count, found in timings.items()},
    )


def several_servers(
    arguments: argparse.Namespace, model: Path, args: dict[str, Any], stack: ExitStack, folder: Path
) -> None:
    def start(arm: str) -> Served:
        asked = arguments.servers[arm]
        found = Served(
            asked.get("model", model),
            {**args, **arguments.server_args, **asked.get("args", {})},
            folder / arm,
            asked.get("env", {}),
        )
        stack.callback(found.close)
        print(f"server {arm} up after {found.start_s:.0f} s", flush=True)
        return found

    deadline = time.monotonic() + arguments.limit_s
    if not arguments.small:  # servers that start together cannot measure what is left for their caches
        share_bytes = arguments.share * torch.cuda.get_device_properties(0).total_memory
        args = {**args, "kv_cache_memory_bytes": int(share_bytes - OTHERS_BYTES)}
    with ThreadPoolExecutor(len(arguments.servers)) as threads:
        servers = dict(zip(arguments.servers, threads.map(start, arguments.servers), strict=True))
    baseline = next(iter(servers))
    measured = {f"{arm}_start_s": server.start_s for arm, server in servers.items()}
    ways: dict[str, dict[str, Any]] = {"": {}}
    if arguments.filters:
        ways |= {"_filtered": {**arguments.filters, "needs_alternatives": True}, "_untold": arguments.filters}
    arms = {arm + way: partial(server.generate, **ways[way]) for arm, server in servers.items() for way in ways}
    prompts = prompts_of(arguments.task, arguments.servers[baseline]["model"]) if arguments.task else ()
    timings: dict[int, Timings] = {}
    for count, tokens in zip(arguments.sequences, arguments.tokens, strict=True):
        timings[count] = measure(arms, count, tokens, arguments.rounds, deadline, prompts)
        for arm, server in servers.items():
            for way in list(ways)[1:]:
                measured[f"{arm}{way}_speed_{count}"] = timings[count].ratio(arm, arm + way)
            if sizes := [1 + len(left) for group in server.last for c in group for left in c.alternatives or ()]:
                measured[f"{arm}_set_size"] = statistics.fmean(sizes)
        measured |= {f"{arm}_gain_{count}": timings[count].ratio(baseline, arm) for arm in servers if arm != baseline}
    measured |= tokens_per_s(timings, arguments.tokens)
    targets = [Target(f"fp8_gain_{count}", ">=", 1.12) for count in arguments.sequences if "fp8" in servers]
    for arm in servers if arguments.filters else ():
        targets += [Target(f"{arm}_filtered_speed_{count}", ">=", 0.95) for count in arguments.sequences]
    save(
        arguments,
        "generation_servers",
        claim=f"Servers on one GPU that differ in their options, against {baseline}",
        targets=targets,
        measured=measured,
        details={count: found.summary(baseline) for count, found in timings.items()},
    )


def save(arguments: argparse.Namespace, name: str, **result: Any) -> None:
    shown = {key: value for key, value in vars(arguments).items() if key != "out"}
    rounded = {key: float(f"{value:.4g}") for key, value in result.pop("measured").items()}
    write_result(arguments.out or name, settings=shown, measured=rounded, **result)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--servers",
        type=json.loads,
        default={},
        help='JSON, such as {"runs": {}, "eager": {"args": {"enforce_eager": true}}}',
    )
    parser.add_argument("--filters", type=json.loads, default={}, help="JSON of sampling settings")
    parser.add_argument("--task", help="whose prompts are asked; default: random tokens")
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1024], help="two, but with --servers")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 512], help="of each sequence, for each of --sequences"
    )
    parser.add_argument("--shape", default="0.6b", help="of the model, a name of shapes.py")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.4, help="of the card's memory, for each engine")
    parser.add_argument("--limit-s", type=float, default=330.0, help="no further round is begun that would end later")
    parser.add_argument("--server-args", type=json.loads, default={}, help='JSON, such as {"async_scheduling": true}')
    parser.add_argument("--out", help="name of the result; default: generation")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    os.environ |= {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    args = {**COMMON, "dtype": "bfloat16", "gpu_memory_utilization": arguments.share}
    if arguments.small:
        args |= {**CPU_ARGS, "max_model_len": 4096, "distributed_executor_backend": None}
        args.pop("gpu_memory_utilization")
        arguments.sequences, arguments.tokens = [16, 32], [32, 32]
        os.environ["OMP_NUM_THREADS"] = "1"
    RESULTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        from shapes import save_model  # the offline engine's process imports this file, and may not touch CUDA

        shape = ("small", "float32") if arguments.small else (arguments.shape, "bfloat16")
        model = save_model(Path(folder) / "model", *shape)
        compare = several_servers if arguments.servers else against_offline
        compare(arguments, model, args, stack, Path(folder))


if __name__ == "__main__":
    main()
