"""`python -m offline_grpo.play [GROUP=OPTION] [KEY=VALUE]...`: play one problem of a run, by its model or by hand, and
show tokens and reward (in Python: `play`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from offline_grpo import hub
from offline_grpo.commands import cli
from offline_grpo.config.build import build
from offline_grpo.config.parts import sampling_of
from offline_grpo.errors import ScoreError
from offline_grpo.history.records import hide_progress_bars, told_on
from offline_grpo.logger import output_console
from offline_grpo.logger.samples import POLICY, text_from, visible
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.score import ROW, configured, judging, problem_of, shown
from offline_grpo.seeding import derive_seed
from offline_grpo.types import (
    Completion,
    CompletionStream,
    FinishReason,
    Rollout,
    SamplingParams,
    SamplingRequest,
    ServedWeights,
)


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.play", description=__doc__)
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="settings as of a run; another seed draws others")
    about = "you reply, or a pipe: a line each, which a backslash at its end continues; no weights are read"
    parser.add_argument("--typed", action="store_true", help=about)
    parser.add_argument("--row", type=int, default=0, metavar="N", help=ROW)
    options = parser.parse_intermixed_args(arguments)
    with told_on(Console(stderr=True)) as log:
        log.info("offline-grpo: loading ...")
        rollout = play(options.words, options.row, typed() if options.typed else None)
    if not rollout.score.is_scored:
        raise ScoreError("the episode has no reward, see above")


def typed() -> Iterator[str]:
    """The replies on standard input."""
    reply, ask = "", "your reply: " if sys.stdin.isatty() else ""
    while True:
        print(ask, end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline().decode(errors="replace")
        reply += line.rstrip("\r\n")
        if line and reply.endswith("\\"):
            reply = f"{reply[:-1]}\n"
        elif line or reply:
            yield reply
            reply = ""
        else:
            return


def play(words: Sequence[str], row: int = 0, replies: Iterable[str] | None = None) -> Rollout:
    """Play a problem, see `problem_of`, as a run with these overrides would, and print it.

    Args:
        replies: in place of the model's, of which no weights are read; where they end the episode is cut.
    """
    config, task = configured(words, in_turns=True)
    model, sampling = config.model, sampling_of(config, "generation")
    if model.train_id is not None:
        hub.need_model(model.train_id, "model.train_id")  # before imports that take seconds
    with judging(config, task) as judged:  # whose processes start while transformers is imported
        problem = problem_of(task, row)
        hide_progress_bars()
        from offline_grpo.checkpoint.pretrained import find_model
        from offline_grpo.generation.sample import sample_groups
        from offline_grpo.generation.transformers_client import TransformersClient
        from offline_grpo.model.device import resolve_device, torch_dtype
        from offline_grpo.model.gguf import convert
        from offline_grpo.model.load import generation_config_of
        from offline_grpo.model.tiny import build_char_tokenizer
        from offline_grpo.start.prompts import check_episodes, codec_of, encoded

        # 1. The model; of a tiny one that shall not reply, the tokenizer alone.
        cache, source = Path(config.cache_dir), None
        tiny = None if model.train_id or model.gguf_file else build(model.tiny, key="model.tiny")
        if tiny is not None and replies is not None:
            codec = codec_of(config, build_char_tokenizer(tiny.max_position_embeddings))
        else:
            name = tiny.prepare(task, cache) if tiny else model.train_id or convert(str(model.gguf_file), cache)
            source = find_model(str(name), trust_remote_code=model.trust_remote_code, key="model.train_id")
            codec = codec_of(config, source.tokenizer(model.chat_template), generation_config_of(source.weights))
        encoded(codec, problem)
        check_episodes(codec, [problem])

        # 2. What replies. A person may take longer than an episode.
        player = Player(codec, iter(replies or ()))
        if replies is None and source is not None:
            dtype, device = source.trained_dtype or torch_dtype(config.train.precision), resolve_device(model.device)
            own = source.load(device=device, dtype=dtype, attn_implementation=model.attn_implementation)
            player.client = TransformersClient(model=own, tokenizer=codec.tokenizer, batch_size=1)
        elif problem.rules is not None:
            problem = replace(problem, rules=replace(problem.rules, timeout_s=inf))

        # 3. The episode, which is printed as it goes; then its reward.
        began, draw = time.perf_counter(), (problem, derive_seed(config.seed, "play"))
        [(_, group)] = sample_groups(player, judged, codec, [draw], sampling, group_size=1)
        other_s = time.perf_counter() - began - player.busy_s
    [rollout] = group.rollouts
    if rollout.finish_reason is FinishReason.LENGTH:
        print("cut by a limit (generation.max_new_tokens, task.max_...), or by the last reply")
    print(*shown(problem.problem_id, task, problem, rollout.score), sep="\n")
    print(f"  seconds: {player.busy_s:.2f} of the policy, {other_s:.2f} of the environment", flush=True)
    return rollout


@dataclass
class Player:
    """A client that answers requests one by one, from another client or with these replies, and prints both."""

    codec: TokenizerCodec
    replies: Iterator[str]
    client: Any = None
    busy_s: float = 0.0
    is_local: ClassVar[bool] = True
    weights: ServedWeights = field(default_factory=ServedWeights)

    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        known: list[tuple[int, ...]] = [()]
        for index, request in enumerate(request for request in requests if request is not None):
            # What is new for the policy: all, where the history was rewritten.
            prompt = request.prompt_ids
            start = max(len(ids) for ids in known if prompt[: len(ids)] == ids)
            self.show("inserted" if start else "prompt", prompt, start)
            began = time.perf_counter()
            if self.client is not None:
                [(_, [completion])] = self.client.generate([request], sampling)
            else:
                completion = self.typed(request.max_new_tokens or sampling.max_new_tokens)
            self.busy_s += time.perf_counter() - began
            known.append(prompt + completion.token_ids)
            self.show(POLICY, known[-1], len(prompt))
            yield index, [completion]

    def typed(self, limit: int) -> Completion:
        """The next reply, and the token that ends it; where there is none, an empty one that is cut."""
        tokenizer: Any = self.codec.tokenizer
        whole: list[int] = []
        if (text := next(self.replies, None)) is not None:
            whole = tokenizer.encode(text.encode(errors="replace").decode(), add_special_tokens=False)
            whole += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        end = FinishReason.STOP if 0 < len(whole) <= limit else FinishReason.LENGTH
        ids = tuple(whole[:limit])
        return Completion(ids, (0.0,) * len(ids), end, (0,) * len(ids))

    def show(self, who: str, ids: Sequence[int], start: int) -> None:
        """Print the tokens from `start` on."""
        text = text_from(partial(self.codec.decode, skip_special_tokens=False), ids, start)
        grid = Table.grid(padding=(0, 2), pad_edge=True)
        grid.add_column(style="dim", no_wrap=True, width=10)
        grid.add_column(overflow="fold")
        for number, line in enumerate(text.split("\n")):
            grid.add_row("" if number else who, Text(visible(line, full=True), "green" if who == POLICY else "cyan"))
        grid.add_row(f"{len(ids) - start} ids", Text(" ".join(map(str, ids[start:])), "dim"))
        output_console().print(grid)

    def close(self) -> None:
        """It has no connection."""


if __name__ == "__main__":
    cli.run_command(run)
