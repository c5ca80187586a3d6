"""From problems to scored rollouts: the one way in which training and evaluation sample from an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

from offline_grpo import progress
from offline_grpo.generation.judging import Judgement, judging, scores_of
from offline_grpo.interfaces import RolloutClient, Task
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.types import Completion, Problem, Rollout, RolloutGroup, SamplingParams, SamplingRequest


def sample_groups(
    client: RolloutClient,
    task: Task,
    codec: TokenizerCodec,
    draws: Sequence[tuple[Problem, int]],
    sampling: SamplingParams,
    *,
    group_size: int,
    on_scored: Callable[[float], None] = lambda seconds: None,
) -> Iterator[tuple[int, RolloutGroup]]:
    """Sample `group_size` completions of each problem, score them, and yield the index of each draw with its group, in
    any order.

    A group is scored as soon as its completions are there; async scores are awaited while others are sampled.

    Args:
        draws: problems, each with the seed of its first completion (see `SamplingRequest`).
        on_scored: called with the seconds from the last completion to the last score.

    Problems with `rules` are played, see `play_groups`.

    Raises:
        ScoreError: a completion could not be scored.
    """
    played = [index for index, (problem, _) in enumerate(draws) if problem.rules is not None]
    if played:
        from offline_grpo.generation.episodes import play_groups

        how: dict[str, Any] = {"group_size": group_size, "on_scored": on_scored}
        single = [index for index, (problem, _) in enumerate(draws) if problem.rules is None]
        if single:
            own = sample_groups(client, task, codec, [draws[index] for index in single], sampling, **how)
            yield from ((single[number], group) for number, group in own)
        chosen = [draws[index] for index in played]
        own = play_groups(client, task, cast(TokenizerCodec, codec), chosen, sampling, **how)
        yield from ((played[number], group) for number, group in own)
        return
    prompts = [tuple(codec.encode(problem.messages, problem.tools)) for problem, _ in draws]
    requests = (SamplingRequest(prompt, group_size, seed) for prompt, (_, seed) in zip(prompts, draws, strict=True))
    num_done, num_asked = 0, len(draws) * group_size
    progress.report(num_done, num_asked, "completions")
    waiting: list[tuple[int, _Answers]] = []
    came_s = time.perf_counter()
    try:
        with closing(client.generate(requests, sampling)) as answers:
            for index, completions in answers:
                came_s = time.perf_counter()
                num_done += len(completions)
                progress.report(num_done, num_asked, "completions")
                problem = draws[index][0]
                texts = [codec.judged(completion.token_ids, sampling) for completion in completions]
                group = _Answers(completions, texts, [])
                waiting.append((index, group))  # so that all are cancelled if this is interrupted
                group.judgements.extend(judging(task, problem, texts))
                if all(judgement.future.done() for judgement in group.judgements):
                    waiting.pop()
                    yield index, _group(problem, prompts[index], group, sampling)
        slow = {judgement.future: judgement for _, group in waiting for judgement in group.judgements}
        for number, future in enumerate(as_completed(slow), start=1):
            slow[future].results()  # an error is raised at once
            progress.report(number, len(slow), "slow completions scored")
        for index, group in waiting:
            yield index, _group(draws[index][0], prompts[index], group, sampling)
        on_scored(time.perf_counter() - came_s)
    finally:
        for _, group in waiting:
            for judgement in group.judgements:
                judgement.future.cancel()


def sample_in_order(
    client: RolloutClient,
    task: Task,
    codec: TokenizerCodec,
    draws: Sequence[tuple[Problem, int]],
    sampling: SamplingParams,
    *,
    group_size: int,
    on_scored: Callable[[float], None] = lambda seconds: None,
) -> list[RolloutGroup]:
    """All groups of `sample_groups`, in the order of `draws`."""
    groups = dict(sample_groups(client, task, codec, draws, sampling, group_size=group_size, on_scored=on_scored))
    return [groups[index] for index in range(len(draws))]


@dataclass(frozen=True, slots=True)
class _Answers:
    """To one problem; its judgements: see `judging`."""

    completions: Sequence[Completion]
    texts: Sequence[str]
    judgements: list[Judgement]


def _group(problem: Problem, prompt_ids: Sequence[int], answers: _Answers, sampling: SamplingParams) -> RolloutGroup:
    scores = scores_of(answers.judgements, len(answers.texts))
    rollouts = (
        Rollout.of_one_turn(prompt_ids, completion, temperature=sampling.temperature, text=text, score=score)
        for completion, text, score in zip(answers.completions, answers.texts, scores, strict=True)
    )
    return RolloutGroup(problem, tuple(rollouts))
