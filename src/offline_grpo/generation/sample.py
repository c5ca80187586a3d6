"""From problems to scored rollouts. Training and evaluation both sample this way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from typing import Any

from offline_grpo import progress
from offline_grpo.generation.judging import Judgement
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
    """Sample `group_size` completions of each problem, score them, and yield groups as they become complete, each with
    the index of its draw. Problems with `rules` are episodes, which `play_groups` plays.

    Args:
        draws: problems, each with the seed of its first completion (see `SamplingRequest`).
        on_scored: called with the seconds from the last completion to the last score.
    """
    # Episodes go their own way, after the problems of a single turn.
    played = [index for index, (problem, _) in enumerate(draws) if problem.rules is not None]
    if played:
        from offline_grpo.generation.episodes import play_groups

        single = [index for index, (problem, _) in enumerate(draws) if problem.rules is None]
        how: dict[str, Any] = {"group_size": group_size, "on_scored": on_scored}
        for chosen, sample in ((single, sample_groups), (played, play_groups)):
            own = sample(client, task, codec, [draws[index] for index in chosen], sampling, **how) if chosen else ()
            yield from ((chosen[number], group) for number, group in own)
        return

    # One request for each problem asks for its whole group.
    prompts = [codec.encode_with(problem.messages, problem.pictures, problem.tools) for problem, _ in draws]
    requests = (
        SamplingRequest(
            tuple(prompt.ids), group_size, seed, pictures=problem.pictures, unexpanded_ids=tuple(prompt.unexpanded_ids)
        )
        for prompt, (problem, seed) in zip(prompts, draws, strict=True)
    )
    num_done, num_asked = 0, len(draws) * group_size
    progress.report(num_done, num_asked, "completions")
    waiting: list[tuple[int, list[Completion], list[str], Judgement]] = []

    def group(index: int, completions: list[Completion], texts: list[str], judgement: Judgement) -> RolloutGroup:
        problem, _ = draws[index]
        how: Any = {"temperature": sampling.temperature, "pictures": problem.pictures}
        rollouts = (
            Rollout.of_one_turn(prompts[index].ids, completion, text=text, score=score, **how)
            for completion, text, score in zip(completions, texts, judgement.scores(), strict=True)
        )
        return RolloutGroup(problem, tuple(rollouts))

    came_s = time.perf_counter()
    try:
        # Scoring begins as soon as a group's completions are there. Async scores are awaited while others are sampled.
        with closing(client.generate(requests, sampling)) as answers:
            for index, completions in answers:
                came_s = time.perf_counter()
                num_done += len(completions)
                progress.report(num_done, num_asked, "completions")
                texts = [codec.judged(completion.token_ids, sampling) for completion in completions]
                judgement = Judgement(task, draws[index][0], texts)
                if all(future.done() for future in judgement.futures):
                    yield index, group(index, completions, texts, judgement)
                else:
                    waiting.append((index, completions, texts, judgement))
        # All is sampled. Scores that are still awaited: an error of any is raised at once, before the others are there.
        slow = {future: judgement for *_, judgement in waiting for future in judgement.futures}
        for number, future in enumerate(as_completed(slow), start=1):
            slow[future].check(future)
            progress.report(number, len(slow), "slow completions scored")
        for answered in waiting:
            yield answered[0], group(*answered)
        on_scored(time.perf_counter() - came_s)
    finally:
        for *_, judgement in waiting:
            judgement.cancel()


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
