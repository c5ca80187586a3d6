"""What runs leave behind, made without a run: checkpoints without weights, stores of rollouts and the source that
replays them, and folders to report on.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from factories import compose_config, make_completion
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offline_grpo.checkpoint.files import STATE, TrainerState, write_manifest
from offline_grpo.config.build import build
from offline_grpo.config.compose import as_plain, typed
from offline_grpo.config.problems import source_node
from offline_grpo.formats import utf8
from offline_grpo.interfaces import Source
from offline_grpo.rollouts.recorder import Origin, Recorder
from offline_grpo.rollouts.replay import Replay
from offline_grpo.rollouts.rows import parquet, table_of
from offline_grpo.train.schedule import LrSchedule, UpdateCounters
from offline_grpo.types import FinishReason, Problem, Rollout, RolloutGroup, Score


def config_of(**train: Any) -> dict[str, Any]:
    """What is read of the configuration in a checkpoint, with these settings of `train`."""
    stop_when = {"metric": "pass@1", "threshold": None, "patience": None}
    return {
        "task": {"_target_": "offline_grpo.task.arithmetic.Arithmetic"},
        "data": {"problems_per_iteration": 2, "rollouts_per_problem": 2},
        "eval": {"temperature": 1.0, "enabled": True, "interval": 10},
        "generation": {"max_new_tokens": 8},
        "model": {"train_id": None},
        "train": {"iterations": 10, "precision": "fp32", "stop_when": stop_when, **train},
    }


def state_of(iteration: int = 0, **changes: Any) -> TrainerState:
    """After `iteration`, with one update in each."""
    num_updates = iteration + 1
    values: dict[str, Any] = {
        "iteration": iteration,
        "counters": UpdateCounters(num_updates),
        "lr_schedule": LrSchedule(kind="constant", num_updates=100, warmup_steps=0),
        "source": {},
        "milestones": {},
        "config": config_of(),
    }
    return TrainerState(**(values | changes))


def make_checkpoint(folder: Path, state: TrainerState | None = None) -> Path:
    """Add the trainer state and the manifest to a folder; returns it."""
    (folder / "trainer").mkdir(parents=True, exist_ok=True)
    (folder / STATE).write_text(json.dumps(asdict(state or state_of())))
    write_manifest(folder)
    return folder


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


HOSTILE = (
    '</script><script>alert(1)</script><img src=x onerror="alert(2)">&lt;b&gt; \udc80 \x00 \u202e ' + "x" * 1_000_000
)


def make_run(
    folder: Path,
    *,
    iterations: int = 12,
    solved: int = 3,
    seed: int = 0,
    loss: str = "grpo",
    text: str = "four",
    **metrics: float,
) -> Path:
    """A run of which `solved` of four held-out problems are solved at the end; the model writes `text`."""
    (folder / "metrics").mkdir(parents=True)
    (folder / "rollouts").mkdir()
    for index in range(iterations):
        train = {"reward_mean": index / iterations, "entropy": 0.5, "clip_frac": 0.0}
        train |= {"time/generate_s": 2.0, "time/train_s": 1.0, "time/iteration_s": 3.0}
        _write(folder / "metrics" / f"train_iter_{index:03d}.json", train | metrics)
        _store(folder, "train", index, [_group(text, index, [(1.0, True), (0.0, False)])], [[0.7, -0.7]])
    for name, share in (("init", 0.0), (f"iter_{iterations - 1:03d}", solved / 4)):
        interval = {"pass@1_low": share - 0.01, "pass@1_high": share + 0.01}
        _write(folder / "metrics" / f"eval_{name}.json", {"pass@1": share} | interval)
    _store(folder, "eval", iterations - 1, [_group(text, i, [(1.0, i < solved)]) for i in range(4)], None)
    make_settings(folder, iterations=iterations, seed=seed, loss=loss)
    return folder


def make_settings(folder: Path, *, iterations: int, seed: int, loss: str) -> None:
    """What Hydra stores about a run."""
    train = {"iterations": iterations, "lr": 1e-3, "loss": {"_target_": loss}}
    config = {"train": train, "seed": seed, "model": {"train_id": None}, "logger": {"api_key": "secret-key"}}
    choices = {"task": "arithmetic", "model": "tiny", "train/loss": loss, "hydra/launcher": "basic"}
    files: dict[str, Any] = {
        "config": config,
        "hydra": {"hydra": {"runtime": {"choices": choices}}},
        "overrides": [f"seed={seed}", f"train/loss={loss}"],
    }
    (folder / ".hydra").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / ".hydra" / f"{name}.yaml").write_text(yaml.safe_dump(content))


def _group(text: str, number: int, scores: list[tuple[float, bool]]) -> RolloutGroup:
    problem = Problem(f"{text[:200]} {number}", ({"role": "user", "content": f"2+2= {utf8(text)} {number}"},), "4")
    rollouts = [
        Rollout.of_one_turn(
            (1, 2), make_completion((3,)), temperature=1.0, text=f"{text} {number}", score=Score(reward, is_correct, {})
        )
        for reward, is_correct in scores
    ]
    return RolloutGroup(problem, tuple(rollouts))


def _store(
    folder: Path, phase: str, iteration: int, groups: list[RolloutGroup], advantages: list[list[float]] | None
) -> None:
    name = f"{'eval_' if phase == 'eval' else ''}iter_{iteration:03d}.parquet"
    (folder / "rollouts" / name).write_bytes(parquet(table_of(phase, groups, advantages, iteration), {}))


def _write(path: Path, metrics: dict[str, float]) -> None:
    path.write_text(json.dumps(metrics))
