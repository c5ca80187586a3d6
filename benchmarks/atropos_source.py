"""How long the source of `rollouts=atropos` takes for a batch that is there: 256 groups of 16 sequences of 1024 tokens.

A server in another process answers as the API would. The floor is what no source can do without: receiving the bytes,
and parsing them as JSON. Seconds are of this process's processors, because others may use the machine too; the rounds
by the clock are in the details. They are compared with the time in which a GPU trains on as many tokens.

    uv run --group test python benchmarks/atropos_source.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import Target, alternate, write_result
from pydantic_core import from_json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from offline_grpo.model.text import TokenizerCodec
from offline_grpo.rollouts.atropos import Atropos
from offline_grpo.types import SamplingParams

TRAIN_TOKENS_PER_S = 65_000
"""Measured on one H100 with a model of 1.5 billion parameters, compiled. A slower iteration would flatter the source.
"""
VOCAB = 32_000


def make_body(groups: int, members: int, tokens: int) -> bytes:
    """A batch as `run-api` writes it. A quarter of each sequence is its prompt."""
    draw = random.Random(0)
    prompt = tokens // 4

    def group() -> dict[str, Any]:
        rows = [[draw.randrange(300, VOCAB) for _ in range(tokens)] for _ in range(members)]
        keys = (
            "advantages",
            "ref_logprobs",
            "messages",
            "overrides",
            "group_overrides",
            "images",
            "distill_token_ids",
            "distill_logprobs",
        )
        return {
            "tokens": rows,
            "masks": [[-100] * prompt + row[prompt:] for row in rows],
            "scores": [draw.choice([-1.0, 1.0]) for _ in range(members)],
            "inference_logprobs": [
                [1.0] * prompt + [-draw.expovariate(1.0) for _ in range(tokens - prompt)] for _ in range(members)
            ],
            "generation_params": {"temperature": 1.0},
            "env_id": 0,
            **dict.fromkeys(keys),
        }

    kinds = [json.dumps(group(), separators=(",", ":")) for _ in range(min(groups, 8))]
    return f'{{"batch":[{",".join(kinds[index % len(kinds)] for index in range(groups))}]}}'.encode()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges learnt from random words."""
    draw = random.Random(1)
    words = (
        " ".join("".join(draw.choice("etaoinshrdlu") for _ in range(draw.randint(2, 9))) for _ in range(200))
        for _ in range(2000)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def serve(body: bytes, pipe: Any) -> None:
    """The API of one batch, for ever."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    from scripted_server import Reply, ScriptedServer  # pyright: ignore[reportMissingImports]

    owner: dict[str, Any] = {}

    def answer(request: Any) -> Reply:
        if request.path == "/register":
            owner.update(request.body)
        if request.path == "/batch":
            return Reply(body)
        sizes = {name: owner.get(name, -1) for name in ("batch_size", "max_token_len")}
        return Reply({"uuid": 1, "group": owner.get("wandb_group"), "current_step": 0, "queue_size": 0, **sizes})

    with ScriptedServer(answer) as web:
        pipe.send(web.base_url)
        pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    body = make_body(args.groups, args.members, args.tokens)
    tokenizer = make_tokenizer()
    pipe, child = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(body, child), daemon=True)
    process.start()
    source = Atropos(
        url=pipe.recv(),
        problems_per_iteration=args.groups,
        group_size=args.members,
        max_token_len=args.tokens,
        correct_threshold=None,
        num_steps=1,
        save_checkpoint_interval=0,
        wandb_project="benchmark",
        poll_s=1.0,
        connect_timeout_s=30,
        restart_timeout_s=30,
        take_over=False,
        start_api=False,
        environment=None,
        model_id="",
        sampling=SamplingParams(max_new_tokens=args.tokens),
        client=SimpleNamespace(is_local=True),  # type: ignore[arg-type]
        codec=TokenizerCodec(tokenizer),
        vocab_size=tokenizer.vocab_size,
        context=None,
        run_folder=Path("/runs/benchmark"),
        rank=0,
    )
    source.start(0, None)
    source.next(0)  # the batch that came with the registration
    decoding = [list(range(300, 300 + args.tokens - args.tokens // 4))] * (args.groups * args.members)
    processor_s: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            began = time.process_time()
            call()
            processor_s.setdefault(name, []).append(time.process_time() - began)

        return run

    def whole() -> None:
        groups = source.next(1)
        assert sum(len(group.rollouts) for group in groups) == args.groups * args.members

    arms: dict[str, Callable[[], object]] = {
        "source": whole,
        "received": lambda: source._api._call("GET", "/batch"),
        "parsed": lambda: from_json(body),
        "parsed by json": lambda: json.loads(body),
        "decoded": lambda: [TokenizerCodec(tokenizer).decode(ids) for ids in decoding],
    }
    timings = alternate({name: timed(name, arm) for name, arm in arms.items()}, rounds=args.rounds, warmup=0)
    process.kill()
    iteration_s = args.groups * args.members * args.tokens / TRAIN_TOKENS_PER_S
    seconds = {name: statistics.median(rounds) for name, rounds in processor_s.items()}
    measured = {
        "source_s": round(seconds["source"], 2),
        "floor_s": round(seconds["received"] + seconds["parsed"], 2),
        "decode_s": round(seconds["decoded"], 2),
        "iteration_s": round(iteration_s, 1),
        "source_frac": round(seconds["source"] / iteration_s, 4),
        "body_bytes": len(body),
    }
    write_result(
        "atropos_source",
        claim="Beyond waiting, the source of rollouts=atropos takes at most 5% of an iteration.",
        targets=[Target("source_frac", "<=", 0.05)],
        measured=measured,
        settings=vars(args) | {"train_tokens_per_s": TRAIN_TOKENS_PER_S, "vocab_size": tokenizer.vocab_size},
        details={"by_the_clock": timings.summary("source"), "processor_s": processor_s},
    )


if __name__ == "__main__":
    main()
