"""POST /generate, which environments ask, against vLLM's own /v1/completions, on the same vLLM server with the same
requests.

    uv run --group test python benchmarks/generate_endpoint.py [--base-url http://127.0.0.1:9001]

The server is a vLLM server on the CPU with the tiny model of the default job; without --base-url the script starts and
stops it. Both arms send requests that were encoded before the clock starts, as many at a time, and parse the answers.
Before the timing, both must return the same tokens, and logprobs that agree to 1e-4.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from typing import Any

from client_overhead import PROMPT_TOKENS, VOCAB, LoadGenerator, served
from common import Target, alternate, write_result


def check_equal(generated: Sequence[Any], completed: Sequence[Any], tokens: int) -> None:
    for ours, theirs in zip(generated, completed, strict=True):
        choices = sorted(theirs["choices"], key=lambda choice: choice["index"])
        assert ours["token_ids"] == [choice["token_ids"] for choice in choices]
        assert ours["text"] == [choice["text"] for choice in choices]
        for positions, choice in zip(ours["logprobs"], choices, strict=True):
            assert len(positions) == tokens
            logprobs = [
                next(iter(position.values())) for [position] in positions
            ]  # the last bits depend on the rest of the batch
            assert all(
                math.isclose(a, b, abs_tol=1e-4)
                for a, b in zip(logprobs, choice["logprobs"]["token_logprobs"], strict=True)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base-url", help="of a server of a run or of `python -m offline_grpo.engine.serve`; default: start one"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens per completion")
    parser.add_argument("--batch-size", type=int, default=64, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(args.prompts)]
    same = {"n": args.group_size, "max_tokens": args.tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    asked = [same | {"seed": index} for index in range(args.prompts)]
    with served(args.base_url) as server:
        name = server.api.get("/v1/models").json()["data"][0]["id"]
        bodies = {
            "/generate": [
                body | {"prompt": {"prompt_token_ids": prompt}} for body, prompt in zip(asked, prompts, strict=True)
            ],
            "/v1/completions": [
                body | {"prompt": prompt, "model": name, "return_token_ids": True}
                for body, prompt in zip(asked, prompts, strict=True)
            ],
        }
        arms = {
            path: LoadGenerator(server.base_url + path, [json.dumps(body).encode() for body in them], args.batch_size)
            for path, them in bodies.items()
        }
        check_equal(arms["/generate"].run(), arms["/v1/completions"].run(), args.tokens)
        timings = alternate({path: load.run for path, load in arms.items()}, rounds=args.rounds)
    num_tokens = args.prompts * args.group_size * args.tokens
    measured = {
        "ratio": timings.ratio("/generate", "/v1/completions"),
        "generate_tokens_per_s": num_tokens / timings.median_s("/generate"),
        "completions_tokens_per_s": num_tokens / timings.median_s("/v1/completions"),
    }
    write_result(
        "generate_endpoint",
        claim="POST /generate takes no longer than vLLM's own endpoint for the same completions, up to noise.",
        targets=[Target("ratio", "<=", 1.02)],
        settings=vars(args),
        measured={key: float(f"{value:.4g}") for key, value in measured.items()},
        details={"timings": timings.summary("/v1/completions")},
    )


if __name__ == "__main__":
    main()
