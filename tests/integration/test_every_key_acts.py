"""No key is inert: some code reads every leaf of the configuration. A component gets its settings by name; of the plain
settings, which the run itself passes on, those stand in the table below that no other test changes in a whole run, with
a changed value and what that must change.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from factories import CONF, compose_config, prompt_of, sampled
from runs import SMALL, metrics_of
from safetensors.torch import load_file
from torch import nn

from offline_grpo.config.build import resolve
from offline_grpo.eval.evaluator import PassAtKEvaluator
from offline_grpo.model import load, offload, tiles
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.run import train
from offline_grpo.types import SamplingParams

SOURCE = CONF.parent / "src"

FIRST = "train_iter_000.json"

TWO_ITERATIONS = (
    *(*SMALL, "train.iterations=2", "train.lr=0.02", "eval.interval=1", "checkpoint.save_interval=1"),
    "model.device=cpu",
)


@dataclass
class Trace:
    """What a run did, seen from outside and through spies on the seams between its parts."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)  # file name -> metrics
    files: set[str] = field(default_factory=set)  # paths in the run folder
    start: dict[str, torch.Tensor] = field(default_factory=dict)  # the weights that training started from
    end: dict[str, torch.Tensor] = field(default_factory=dict)  # the weights of the last checkpoint
    model_dir: Path = Path()
    groups: list[list[Any]] = field(default_factory=list)  # RolloutGroups of each iteration
    evaluations: list[list[tuple[int, ...]]] = field(default_factory=list)  # of each evaluation, every completion
    calls: Counter[str] = field(default_factory=Counter)


class Laboratory:
    """Runs the application with spies in it; equal overrides run once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._traces: dict[str, Trace] = {}

    def __call__(self, overrides: str) -> Trace:
        if overrides not in self._traces:
            self._traces[overrides] = self._run(overrides, self.root / f"run_{len(self._traces)}")
        return self._traces[overrides]

    def _run(self, overrides: str, run_dir: Path) -> Trace:
        trace = Trace()
        for place, path in (("@model", "other_model"), ("@template", "template.jinja")):
            overrides = overrides.replace(place, str(self.root / path))
        with pytest.MonkeyPatch.context() as patch:
            watch(patch, trace)
            cache = f"cache_dir={self.root}/cache"
            train(compose_config(*TWO_ITERATIONS, cache, *overrides.split()), run_dir)
        trace.files = {path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file()}
        trace.metrics = metrics_of(run_dir)
        for file in sorted(run_dir.glob("checkpoints/iter_*/*.safetensors")):
            trace.end = load_file(file)
        trace.start = load_file(trace.model_dir / "model.safetensors")
        return trace


def watch(patch: pytest.MonkeyPatch, trace: Trace) -> None:
    """Note in `trace` what passes between the parts of a run."""

    def after(owner: Any, name: str, note: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            note(result, *args)
            return result

        patch.setattr(owner, name, spy)

    after(load, "load_policy", lambda _policy, _config, model_id: setattr(trace, "model_dir", Path(model_id)))
    after(OnPolicy, "next", lambda groups, *_: trace.groups.append(groups))
    after(
        PassAtKEvaluator,
        "sample",
        lambda groups, *_: trace.evaluations.append([sampled(each) for group in groups for each in group.rollouts]),
    )
    after(nn.functional, "scaled_dot_product_attention", lambda *_: trace.calls.update(["attend"]))
    after(offload, "host_memory", lambda *_: trace.calls.update(["host"]))
    after(tiles.Tiles, "_each", lambda *_: trace.calls.update(["tile"]))
    # without compiling anything, which takes most of a minute
    patch.setattr(nn.Module, "compile", lambda *_, **__: trace.calls.update(["compile"]))


View = Callable[[Trace], Any]
BRIEF = "train.iterations=1 eval.enabled=false"


@dataclass(frozen=True)
class Acts:
    """`change` (overrides, blanks between them), on top of `base`, must change what `sees` sees (to `to`, where that is
    said) and must leave alone what `keeps` sees. @model stands for the folder of another model, @template for a chat
    template.
    """

    change: str
    sees: View
    base: str = BRIEF
    to: Any = ...
    keeps: View | None = None


def metric(name: str, file: str = FIRST) -> View:
    return lambda run: run.metrics[file].get(name)


def weights(run: Trace) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in run.end.items()}


def moved(run: Trace) -> set[str]:
    """The parts of the model that training changed."""
    return {
        ".".join(name.split(".")[:3]) for name, tensor in run.end.items() if not torch.equal(tensor, run.start[name])
    }


def samples(run: Trace) -> Any:
    """The completions of the first iteration, and their prompts."""
    return [(prompt_of(r), sampled(r)) for group in run.groups[0] for r in group.rollouts]


def texts(run: Trace) -> Any:
    return [rollout.text for group in run.groups[0] for rollout in group.rollouts]


def prompts(run: Trace) -> Any:
    return [[prompt_of(group.rollouts[0]) for group in groups] for groups in run.groups]


def answers(run: Trace) -> Any:
    return run.evaluations[0]


def checkpoints(run: Trace) -> set[str]:
    return {Path(file).parts[1] for file in run.files if file.startswith("checkpoints/iter")}


def adapted(run: Trace) -> set[str]:
    """The layers that have an adapter, such as 0.mlp.up_proj."""
    return {name.partition(".layers.")[2].partition(".lora_")[0] for name in run.end}


def calls(name: str) -> View:
    return lambda run: run.calls[name]


ONE_PROBLEM = f"{BRIEF} data.problems_per_iteration=1"
TEMPLATE = f"{BRIEF} model.chat_template=@template"
LORA = f"{ONE_PROBLEM} model/lora=default"
QUERIES = {"0.self_attn.q_proj", "1.self_attn.q_proj"}

RUNS: dict[str, Acts] = {
    "model.ref_id": Acts("model.ref_id=@model", metric("kl_divergence"), keeps=samples),
    "model.quantization": Acts("model.quantization=nf4", samples, base=LORA),
    "data.shuffle": Acts("data.shuffle=false", prompts),
    "generation.temperature": Acts("generation.temperature=0.3", samples, keeps=prompts),
    "generation.top_p": Acts("generation.top_p=0.5", samples, keeps=prompts),
    "generation.stop": Acts('generation.stop=["1"]', samples, keeps=prompts),
    "model.chat_template": Acts("model.chat_template=@template", prompts),
    "model.chat_template_kwargs": Acts("model.chat_template_kwargs={shout:true}", prompts, base=TEMPLATE),
    "task.assistant_prefix": Acts('task.assistant_prefix="1"', texts),
    "train.weight_decay": Acts("train.weight_decay=0.5", weights),
    "train.grad_clip": Acts("train.grad_clip=0.01", weights, keeps=samples),
    "train.gradient_checkpointing": Acts("train.gradient_checkpointing=true", calls("attend"), keeps=weights),
    "train.activation_offload": Acts(
        "train.activation_offload=true", calls("host"), base=f"{BRIEF} train.gradient_checkpointing=true", keeps=weights
    ),
    "model.mlp_tile_tokens": Acts("model.mlp_tile_tokens=8", calls("tile")),
    "train.top_entropy_frac": Acts("train.top_entropy_frac=0.3", weights),
    "eval.id_seed_start": Acts("eval.id_seed_start=4", answers, base="train.iterations=1"),
    "eval.temperature": Acts("eval.temperature=0.1", answers, base="train.iterations=1", keeps=samples),
    "model.lora.target_modules": Acts("model.lora.target_modules=[q_proj]", adapted, base=LORA, to=QUERIES),
    "model.lora.use_rslora": Acts("model.lora.use_rslora=true", weights, base=LORA),
}
TOGETHER: dict[str, tuple[View, Any]] = {
    "data.num_train_seeds=4": (lambda run: len({str(p) for group in prompts(run) for p in group}), 4),
    "rollouts.record=false": (lambda run: {file for file in run.files if file.startswith("rollouts/")}, set()),
    "train.schedule=constant": (metric("lr", "train_iter_001.json"), 0.02),
    "train.train_layer_indices=1": (moved, {"model.layers.1"}),
    "train.profile=1": (lambda run: "profile/iter_000.json.gz" in run.files, True),
    "eval.interval=2": (
        lambda run: {name for name in run.metrics if name.startswith("eval")},
        {"eval_init.json", "eval_iter_001.json"},
    ),
    "checkpoint.save_interval=0": (checkpoints, {"iter_001"}),
}
BESIDE: dict[str, tuple[View, Any]] = {
    "data.max_prompt_tokens=5": (lambda run: {len(p) for group in prompts(run) for p in group}, {5}),
    "data.soft_overlong_tokens=7": (lambda run: run.metrics[FIRST]["reward/overlong"] < 0, True),
    "model.compile=true": (calls("compile"), 4),  # blocks of policy and reference
    "checkpoint.enabled=false": (checkpoints, set()),
}
"""Overrides of one run, and what each alone must change."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    num_threads = torch.get_num_threads()
    laboratory = Laboratory(tmp_path_factory.mktemp("laboratory"))
    other = laboratory("model.tiny.seed=7 model.tiny.warm_start_steps=2 model.tiny.warm_start_batch_size=4")
    shutil.copytree(other.model_dir, laboratory.root / "other_model")
    (laboratory.root / "template.jinja").write_text("{{ messages[0].content }}{{ '!' if shout }}=")
    laboratory(f"{BRIEF} seed=1")  # builds the model that the other runs find in the cache
    yield laboratory
    torch.set_num_threads(num_threads)


def leaves(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, dict):
        for name, child in node.items():
            yield from leaves(child, f"{prefix}.{name}" if prefix else name)
    elif not prefix.endswith("_target_"):
        yield prefix


def option_node(path: Path) -> dict[str, Any]:
    """What an option's file sets, with the files of its group that it includes. Read as plain YAML: composing each
    takes Hydra a second.
    """
    node = yaml.safe_load(path.read_text())
    for included in node.pop("defaults", []):
        if isinstance(included, str) and included != "_self_" and included[0] != "/":
            node = option_node(path.with_name(f"{included}.yaml")) | node
    return node


def in_conf() -> Iterator[tuple[type | None, str]]:
    """Every leaf of every option: the class of the component that it is a setting of, None for plain settings, and the
    name of the setting. What is below a setting (`args.dtype`) is passed on by it.
    """
    for path in sorted(CONF.glob("*/**/*.yaml")):
        group = path.parent.relative_to(CONF).as_posix()
        if group.partition("/")[0] in ("experiment", "mode") or path.stem.startswith("_"):
            continue
        node = option_node(path)
        for part in node.values() if group == "logger" else [node]:
            target = part.get("_target_") if isinstance(part, dict) else None
            cls = None if target is None else resolve(part, group)
            for name in part if cls is not None else [key.rpartition(".")[2] for key in leaves(part, "")]:
                if name != "_target_" and not isinstance(part.get(name), dict):
                    yield cls, name


READ_OTHERWISE = {
    "record",
    "assistant_prefix",
    "in_flight",
    "enable_thinking",
    *("num_train", "num_eval"),  # of the split that is asked for
    *(f"{what}_{how}_weight" for what in ("prompt", "instruction") for how in ("strict", "loose")),
}
"""Settings that the run reads for any source or task, or whose names are put together."""


def test_every_key_is_read() -> None:
    """The cheap half: some code reads each setting, in the classes of its component or, of plain settings, anywhere."""
    everywhere = "\n".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "settings.py")
    unread = set()
    for cls, name in {*in_conf()}:
        own = [
            base
            for base in getattr(cls, "__mro__", ())
            if base.__module__.startswith(("offline_grpo", "hydra_plugins"))
        ]
        text = "\n".join(Path(inspect.getfile(base)).read_text() for base in own) if own else everywhere
        is_sampling = name in SamplingParams.__dataclass_fields__ or name in (
            "allow_truncated_sampling",
            "batch_invariant",
        )
        if not re.search(rf"\.{name}\b|[\"']{name}[\"']|[(, =]{name}[,)]", everywhere if is_sampling else text):
            unread |= {(cls, name)} if name not in READ_OTHERWISE else set()
    assert not unread


@pytest.mark.slow
def test_equal_runs_are_equal(run: Laboratory) -> None:
    """Else the differences below would prove nothing."""
    first, second = run(BRIEF), run(f"{BRIEF} seed=0")
    assert {f.name for f in fields(Trace) if str(getattr(first, f.name)) != str(getattr(second, f.name))} == set()
    assert len(first.groups) == 1


@pytest.mark.slow  # twenty runs
@pytest.mark.parametrize("key", RUNS)
def test_a_run_changes_with(key: str, run: Laboratory) -> None:
    row = RUNS[key]
    before, after = run(row.base), run(f"{row.base} {row.change}")
    assert row.sees(before) != row.sees(after)
    assert row.to is ... or row.sees(after) == row.to
    assert row.keeps is None or row.keeps(before) == row.keeps(after)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "changes"), [("", TOGETHER), (BRIEF, BESIDE)])
def test_one_run_shows_the_changes_of_many_keys(
    base: str, changes: dict[str, tuple[View, Any]], run: Laboratory
) -> None:
    after = run(" ".join([base, *changes]).strip())
    found = {change: sees(after) for change, (sees, _) in changes.items()}
    assert found == {change: expected for change, (_, expected) in changes.items()}
