"""`python -m offline_grpo.play [GROUP=OPTION] [KEY=VALUE]...`: play one problem of a run, by its model or by hand, and
show tokens and reward (in Python: `play`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from rich.console import Console
from rich.text import Text

from offline_grpo.commands import cli
from offline_grpo.config.build import build
from offline_grpo.config.parts import sampling_of
from offline_grpo.disk import models_cache
from offline_grpo.engine.engine import LocalEngine
from offline_grpo.errors import ScoreError
from offline_grpo.history.records import hide_progress_bars, told_on
from offline_grpo.logger import output_console
from offline_grpo.logger.samples import POLICY, print_rows, text_from, visible
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.score import ROW, chosen, show, trial
from offline_grpo.types import Completion, CompletionStream, FinishReason, Rollout, SamplingParams, SamplingRequest


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.play", description=__doc__)
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help="settings as of a run; another seed draws others")
    about = "you reply, or a pipe, a line each; no weights are read"
    parser.add_argument("--typed", action="store_true", help=about)
    parser.add_argument("--row", type=int, default=0, metavar="N", help=ROW)
    options = parser.parse_intermixed_args(arguments)
    typed = (line.decode(errors="replace").rstrip("\r\n") for line in sys.stdin.buffer)
    with told_on(Console(stderr=True)) as log:
        log.info("offline-grpo: loading ...%s", " then each line that you type is a reply" if options.typed else "")
        rollout = play(options.words, options.row, typed if options.typed else None)
    if not rollout.score.is_scored:
        raise ScoreError("the episode has no reward, see above")


def play(words: Sequence[str], row: int = 0, replies: Iterable[str] | None = None) -> Rollout:
    """Play a problem (see `score.trial`) as a run with these overrides would, and print it.

    Args:
        replies: in place of the model's, of which no weights are read; where they end the episode is cut.
    """
    with trial(words) as (config, task, problems):  # whose processes start while transformers is imported
        problem, model, sampling = chosen(problems, row), config.model, sampling_of(config, "generation")
        hide_progress_bars()
        from offline_grpo.checkpoint.pretrained import find_model
        from offline_grpo.generation.sample import sample_groups
        from offline_grpo.generation.transformers_client import TransformersClient
        from offline_grpo.model.device import resolve_device, torch_dtype
        from offline_grpo.model.gguf import convert
        from offline_grpo.model.load import generation_config_of
        from offline_grpo.start.prompts import check_episodes, codec_of

        # 1. The tokenizer, and the model where that replies. A tiny one is built only then.
        tiny = None if model.train_id or model.gguf_file else build(model.tiny, key="model.tiny")
        client = None
        if tiny is not None and replies is not None:
            codec = codec_of(config, tiny.tokenizer())
        else:
            cache = models_cache(config.cache_dir)
            name = tiny.prepare(task, cache) if tiny else model.train_id or convert(str(model.gguf_file), cache)
            source = find_model(str(name), trust_remote_code=model.trust_remote_code, key="model.train_id")
            codec = codec_of(config, source.tokenizer(model.chat_template), generation_config_of(source.weights))
            if replies is None:
                how: Any = {"device": resolve_device(model.device), "dtype": torch_dtype(config.train.precision)}
                own = source.load(**how, attn_implementation=model.attn_implementation)
                client = TransformersClient(model=own, tokenizer=codec.tokenizer, batch_size=1)
        check_episodes(codec, [problem])
        if problem.rules is not None and client is None:  # a person may take longer than an episode
            problem = replace(problem, rules=replace(problem.rules, timeout_s=inf))

        # 2. The episode, which is printed as it goes; then its reward.
        player, began = Player(codec, iter(replies or ()), client), time.perf_counter()
        [(_, group)] = sample_groups(player, task, codec, [(problem, config.seed)], sampling, group_size=1)
        other_s = time.perf_counter() - began - player.busy_s
    [rollout] = group.rollouts
    show(problem.problem_id, problem, rollout.score)
    ended = "at a limit, or the last reply," if rollout.finish_reason is FinishReason.LENGTH else "by itself"
    print(f"  ended {ended} after {player.busy_s:.2f} s of the policy, {other_s:.2f} s of the environment", flush=True)
    return rollout


@dataclass
class Player(LocalEngine):
    """A client that answers requests one by one, from another client or with these replies, and prints both."""

    codec: TokenizerCodec
    replies: Iterator[str]
    client: Any
    busy_s: float = 0.0

    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        known: tuple[int, ...] = ()
        for index, request in enumerate(request for request in requests if request is not None):
            # What is new for the policy: all, where the history was rewritten.
            prompt = request.prompt_ids
            start = len(known) if prompt[: len(known)] == known else 0
            self.show("inserted" if start else "prompt", prompt, start)
            began = time.perf_counter()
            if self.client is not None:
                [(_, [completion])] = self.client.generate([request], sampling)
            else:
                completion = self.typed(request.max_new_tokens or sampling.max_new_tokens)
            self.busy_s += time.perf_counter() - began
            known = prompt + completion.token_ids
            self.show(POLICY, known, len(prompt))
            yield index, [completion]

    def typed(self, limit: int) -> Completion:
        """The next reply, up to the first token that ends it; where there is none, an empty one that is cut."""
        tokenizer: Any = self.codec.tokenizer
        text = next(self.replies, None)
        whole = [] if text is None else [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        length = next((place for place, token in enumerate(whole, 1) if token in self.codec.end_ids), 0)
        ids = tuple(whole[: min(length, limit)])
        end = FinishReason.STOP if 0 < length <= limit else FinishReason.LENGTH
        return Completion(ids, (0.0,) * len(ids), end, (0,) * len(ids))

    def show(self, who: str, ids: Sequence[int], start: int) -> None:
        """Print the tokens from `start` on."""
        text = text_from(partial(self.codec.decode, skip_special_tokens=False), ids, start)
        lines = "\n".join(visible(line, full=True) for line in text.split("\n"))
        ids_line = Text(" ".join(map(str, ids[start:])), "dim")
        whole = Text(lines, "green" if who == POLICY else "cyan")
        print_rows(output_console(), [(who, whole), (f"{len(ids) - start} ids", ids_line)])


if __name__ == "__main__":
    cli.run_command(run)
