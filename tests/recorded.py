"""Small stores of rollouts, written by the run's own recorder, and the source that replays them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from factories import compose_config, make_completion
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offline_grpo.config.build import build
from offline_grpo.config.compose import as_plain, typed
from offline_grpo.config.problems import source_node
from offline_grpo.interfaces import Source
from offline_grpo.rollouts.recorder import Origin, Recorder
from offline_grpo.rollouts.replay import Replay
from offline_grpo.types import FinishReason, Problem, Rollout, RolloutGroup, Score

ORIGIN = Origin("first/model", "a" * 64, "b" * 64, {"seed": 0}, 0, "c" * 64)
VOCAB, CONTEXT = 40, 30


class Lengths:
    """A task whose reward is the length of the text."""

    def score(self, problem: Problem, text: str) -> Score:
        return Score(float(len(text)), len(text) > 1, {"length": float(len(text))})


def made_groups(iteration: int) -> list[RolloutGroup]:
    """Two groups of three completions, each with tokens, text and reward of its own; the third completion was cut
    off.
    """
    groups = []
    for number in range(2):
        rollouts = [
            Rollout.of_one_turn(
                (1, 2, number),
                make_completion((10 + iteration, 20 + index), (-0.5, -0.1 * index), _reason(index), version=iteration),
                temperature=0.5,
                text=f"{iteration}.{number}.{index}",
                score=Score((iteration + index) / 10, index == 1, {"correct": (iteration + index) / 10}),
            )
            for index in range(3)
        ]
        problem = Problem(f"p{number}", ({"role": "user", "content": "2+2="},), "4", {"level": number})
        groups.append(RolloutGroup(problem, tuple(rollouts)))
    return groups


def _reason(index: int) -> FinishReason:
    return FinishReason.LENGTH if index == 2 else FinishReason.STOP


def byte_tokenizer(folder: Path) -> Tokenizer:
    """A token for each byte, as byte-level tokenizers have for rare letters; saved as the one of the model in
    `folder`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_store(run_folder: Path, *, iterations: int = 4, origin: Origin = ORIGIN) -> Path:
    """The folder of a run that recorded `made_groups`, and an evaluation."""
    recorder = Recorder(run_folder, origin, lambda: (3, [torch.ones(8)]))
    for iteration in range(iterations):
        recorder.rollouts("train", made_groups(iteration), advantages=[[0.1, -0.2, 0.3]] * 2, iteration=iteration)
    recorder.rollouts("eval", made_groups(9), advantages=None, iteration=iterations - 1)
    recorder.log("eval", {}, iteration=iterations - 1)
    recorder.close()
    return run_folder


def write_groups(run_folder: Path, groups: list[RolloutGroup]) -> str:
    """The folder of a run that sampled these groups in its first iteration."""
    recorder = Recorder(run_folder, ORIGIN, lambda: (0, [torch.ones(1)]))
    recorder.rollouts("train", groups, advantages=[[0.0] * len(each.rollouts) for each in groups], iteration=0)
    recorder.close()
    return str(run_folder)


def make_replay(path: object, *words: str, **given: Any) -> Replay:
    """The source, as a run makes it."""
    config = typed(compose_config("rollouts=replay", f"rollouts.path={path}", *words))
    Replay.check(config)
    runtime = {
        "task": Lengths(),
        "origin": replace(ORIGIN, model="second/model"),
        "vocab_size": VOCAB,
        "context": CONTEXT,
    }
    runtime |= {"run_folder": Path("/nowhere"), "rank": 0, "world_size": 1}
    node = as_plain(compose_config("rollouts=replay", f"rollouts.path={path}", *words))["rollouts"]
    assert source_node(config) == {name: value for name, value in node.items() if name != "record"}
    return build(source_node(config), key="rollouts", protocol=Source, **runtime | given)


def replayed(source: Replay, count: int = 4) -> list[list[tuple[str, float]]]:
    """Text and reward of every completion of the first iterations."""
    source.start(0, None)
    return [[(str(r.text), r.score.reward) for group in source.next(i) for r in group.rollouts] for i in range(count)]
