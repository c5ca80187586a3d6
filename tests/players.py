"""Clients that answer episodes without a model, and what plays them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from bad_rewards import scoring_config, setup_of
from factories import make_completion

from offline_grpo.engine.streaming import Streaming
from offline_grpo.generation.sample import sample_in_order
from offline_grpo.generation.scoring import IsolatedTask, Scorers
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.task.environment import EpisodeTask
from offline_grpo.task.rows import Row
from offline_grpo.train.advantage import GroupStd
from offline_grpo.types import (
    Completion,
    CompletionStream,
    FinishReason,
    Problem,
    Rollout,
    SamplingParams,
    SamplingRequest,
    ServedWeights,
)

TOKENIZER = build_char_tokenizer(64)
EOS = int(TOKENIZER.eos_token_id)  # type: ignore[arg-type]
CODEC = TokenizerCodec(TOKENIZER, [EOS])
SAMPLING = SamplingParams(max_new_tokens=40)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def answer(request: SamplingRequest) -> Completion:
    """A few digits that the request's seed decides, and EOS; cut at its limit."""
    rng = random.Random(request.seed)
    whole = [*ids(str(rng.randrange(10 ** rng.randrange(1, 4)))), EOS]
    limit = request.max_new_tokens or 100
    reason = FinishReason.STOP if len(whole) <= limit else FinishReason.LENGTH
    return replace(make_completion(tuple(whole[:limit])), finish_reason=reason)


class InProcess:
    """Answers what is there, the last first."""

    is_local: ClassVar[bool] = True

    def __init__(self) -> None:
        self.weights, self.sizes = ServedWeights(), []

    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        first, waiting = 0, []
        for request in requests:
            if request is not None:
                waiting.append(request)
                continue
            self.sizes.append(len(waiting))
            yield from [(first + i, [answer(each)]) for i, each in reversed(list(enumerate(waiting)))]
            first, waiting = first + len(waiting), []
        assert not waiting

    def close(self) -> None: ...


class Scripted:
    """Replies what it is told, one turn after the other."""

    is_local: ClassVar[bool] = True

    def __init__(self, replies: list[list[int]]) -> None:
        self.replies, self.weights = list(replies), ServedWeights()

    def generate(self, requests: Iterable[SamplingRequest | None], sampling: SamplingParams) -> CompletionStream:
        for index, _ in enumerate(request for request in requests if request is not None):
            ids = self.replies.pop(0)
            yield index, [Completion(tuple(ids), (-1.0,) * len(ids), FinishReason.STOP, (0,) * len(ids))]

    def close(self) -> None:
        pass


class Server(Streaming):
    """Answers after a while."""

    is_local: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__("a server", 3)
        self.weights = ServedWeights()

    async def ask(self, request: SamplingRequest, sampling: SamplingParams) -> list[Completion]:
        await asyncio.sleep(0.003 * (request.seed % 5))
        return [answer(request)]


def problem_of(task: EpisodeTask, **row: Any) -> Problem:
    return task.problem_of("train-0", Row("row 1", 0, {"prompt": "1+1=", **row}))


def sampled(client: Any, task: Any, problems: Sequence[Problem], **settings: Any) -> list[list[Rollout]]:
    draws = [(problem, 100 * seed) for seed, problem in enumerate(problems)]
    groups = sample_in_order(client, task, CODEC, draws, SAMPLING, **{"group_size": 3, **settings})
    return [list(group.rollouts) for group in groups]


def isolated(make: Callable[[], Any], printed: Path | None = None, **settings: Any) -> IsolatedTask:
    config = scoring_config(**{"workers": 6, "episodes": 6, "timeout_s": 2.0, **settings})
    return IsolatedTask(make(), Scorers(setup_of(make, config, printed)), config, 6)


class Digits:
    """A codec of one prompt, whose texts are the token ids."""

    def encode(self, messages: Any, tools: Any = ()) -> list[int]:
        return [1]

    def judged(self, token_ids: Sequence[int], sampling: Any) -> str:
        return "".join(map(str, token_ids))


PROBLEMS = [Problem(f"p{i}", ({"role": "user", "content": str(i)},), str(i)) for i in range(40)]


def on_policy(**changes: Any) -> dict[str, Any]:
    """What `OnPolicy` is made of, for groups of `PROBLEMS`."""
    off = dict.fromkeys(("pass_rate", "pass_rate_from", "soft_overlong_tokens"))
    off |= dict.fromkeys(("resample_zero_signal", "penalize_length_if_solved"), False)
    sizes = {"problems_per_iteration": 8, "group_size": 4, "max_resamples": 3, "pass_rate_decay": 0.5}
    parts = {"problems": PROBLEMS, "codec": Digits(), "sampling": SamplingParams(8), "advantage": GroupStd()}
    where = {"shuffle": True, "seed": 5, "on_failure": "exclude", "rank": 0, "world_size": 1}
    return {**off, **sizes, **parts, **where, **changes}
