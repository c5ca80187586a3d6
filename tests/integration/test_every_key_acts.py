"""No key is inert: some code reads every leaf of the configuration. A component gets its settings by name; the plain
settings, which the run itself passes on, stand in the tables below, with a changed value and what that must change.
"""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bad_rewards
import pytest
import torch
import worlds
import yaml
from factories import CONF, compose_config, prompt_of, sampled
from gguf_files import write_gguf
from laboratory import Laboratory, Trace

from offline_grpo.config.build import resolve
from offline_grpo.config.compose import typed
from offline_grpo.config.parts import make_plan
from offline_grpo.config.problems import isolated
from offline_grpo.generation import scoring
from offline_grpo.start import serving
from offline_grpo.types import SamplingParams

SOURCE = CONF.parent / "src"

LAST = "train_iter_001.json"

View = Callable[[Trace], Any]


@dataclass(frozen=True)
class Acts:
    """`change` (overrides, blanks between them), on top of `base`, must change what `sees` sees (to `to`, where that is
    said) and must leave alone what `keeps` sees. @model, @done and @elsewhere stand for the folders of another model,
    of a finished run and of nothing, @rows for a data set, @template for a chat template, @gguf for a GGUF file.
    """

    change: str
    sees: View
    base: str = ""
    to: Any = ...
    keeps: View | None = None


def metric(name: str, file: str = LAST) -> View:
    return lambda run: run.metrics[file].get(name)


def error(run: Trace) -> str:
    return run.error


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


def first_samples(run: Trace) -> Any:
    return [sampled(rollout) for group in run.groups[0] for rollout in group.rollouts]


def texts(run: Trace) -> Any:
    return [rollout.text for group in run.groups[0] for rollout in group.rollouts]


def prompts(run: Trace) -> Any:
    return [[prompt_of(group.rollouts[0]) for group in groups] for groups in run.groups]


def answers(run: Trace) -> Any:
    return run.evaluations[0]


def checkpoints(run: Trace) -> set[str]:
    return {Path(file).parts[1] for file in run.files if file.startswith("checkpoints/iter")}


def evaluated(run: Trace) -> set[str]:
    return {name for name in run.metrics if name.startswith("eval")}


def recorded(run: Trace) -> set[str]:
    return {file for file in run.files if file.startswith("rollouts/")}


def adapted(run: Trace) -> set[str]:
    """The layers that have an adapter, such as 0.mlp.up_proj."""
    return {name.partition(".layers.")[2].partition(".lora_")[0] for name in run.end}


def calls(name: str) -> View:
    return lambda run: run.calls[name]


LENIENT = "generation.allow_truncated_sampling=true"
BRIEF = "train.iterations=1 eval.enabled=false checkpoint.enabled=false data.problems_per_iteration=1"
SCORED = (
    f"{BRIEF} data.rollouts_per_problem=2 model.train_id=@model task=dataset task.path=@rows "
    f"task.reward=bad_rewards:expensive"
)
SCORED += " data.num_train_seeds=null"
GOES_ON = "scoring.stop_at_failed_frac=null"
FIRST = "train_iter_000.json"
QUICK = "model.tiny.warm_start_steps=2 model.tiny.warm_start_batch_size=4"
QUERIES = {"0.self_attn.q_proj", "1.self_attn.q_proj"}
LORA = "model/lora=default"
DISTILLED = f"{BRIEF} train/advantage=distill train.advantage.teacher=@model train.kl_coef=0"
GREEDY_BASE = "eval.replicates=1 eval.ks=[1]"

RUNS: dict[str, Acts] = {
    "seed": Acts("seed=1", samples, keeps=lambda run: run.start["model.norm.weight"].tolist()),
    "model.ref_id": Acts("model.ref_id=@model", metric("kl_divergence"), keeps=samples),
    "model.gguf_file": Acts("model.gguf_file=@gguf", lambda run: run.model_dir.name[:6], base=BRIEF, to="small-"),
    "model.quantization": Acts("model.quantization=nf4", samples, base=f"{BRIEF} {LORA}"),
    "model.compile": Acts("model.compile=true", calls("compile"), base=BRIEF, to=4),  # blocks of policy and reference
    "scoring.timeout_s": Acts(
        "scoring.timeout_s=0.2", metric("scoring/num_failed_timeout", FIRST), f"{SCORED} {GOES_ON}", to=2
    ),
    "scoring.on_failure": Acts("scoring.on_failure=zero", metric("reward_mean", FIRST), f"{SCORED} {GOES_ON}", to=0),
    "scoring.stop_at_failed_frac": Acts(GOES_ON, error, base=SCORED, to=""),
    "data.num_train_seeds": Acts(
        "data.num_train_seeds=4", lambda run: len({str(p) for group in prompts(run) for p in group}), to=4
    ),
    "data.max_prompt_tokens": Acts(
        "data.max_prompt_tokens=5", lambda run: {len(p) for group in prompts(run) for p in group}, to={5}
    ),
    "data.shuffle": Acts("data.shuffle=false", prompts),
    "rollouts.record": Acts("rollouts.record=false", recorded, to=set(), keeps=weights),
    "data.soft_overlong_tokens": Acts("data.soft_overlong_tokens=7", metric("reward/overlong"), keeps=prompts),
    "generation.temperature": Acts("generation.temperature=0.3", samples, keeps=prompts),
    "generation.top_p": Acts("generation.top_p=0.5", samples, base=LENIENT),
    "generation.min_p": Acts("generation.min_p=0.5", samples, base=LENIENT),
    "generation.include_stop_str_in_output": Acts(
        "generation.include_stop_str_in_output=true", texts, base='generation.stop=["1"]', keeps=first_samples
    ),
    "generation.skip_special_tokens": Acts(
        "generation.skip_special_tokens=false", texts, base="generation.temperature=30", keeps=first_samples
    ),
    "model.chat_template": Acts("model.chat_template=@template", prompts),
    "model.chat_template_kwargs": Acts(
        "model.chat_template_kwargs={shout:true}", prompts, base="model.chat_template=@template"
    ),
    "task.assistant_prefix": Acts('task.assistant_prefix="1"', texts),
    "generation.stop": Acts('generation.stop=["1"]', samples, keeps=prompts),
    "train.stop_when.metric": Acts(
        "train.stop_when.metric=-pass@1", lambda run: run.iterations, "train.stop_when.threshold=2", to=[0]
    ),
    "train.grad_accum_steps": Acts(
        "train.grad_accum_steps=2",
        metric("num_updates"),
        base="train.updates_per_iteration=null train.batch_size=4 train.grad_accum_steps=1",
        to=2,
    ),
    "train.weight_decay": Acts("train.weight_decay=0.5", weights),
    "train.dither_masters": Acts("train.dither_masters=false", weights, base="train.precision=bf16"),
    "train.schedule": Acts("train.schedule=constant", metric("lr"), to=0.02),
    "train.grad_clip": Acts("train.grad_clip=0.01", weights, keeps=samples),
    "train.gradient_checkpointing": Acts("train.gradient_checkpointing=true", calls("sdpa"), keeps=weights),
    "train.train_layer_indices": Acts("train.train_layer_indices=1", moved, to={"model.layers.1"}),
    "train.mask_truncated": Acts("train.mask_truncated=true", metric("loss_pg"), base="generation.max_new_tokens=1"),
    "train.top_entropy_frac": Acts("train.top_entropy_frac=0.3", weights),
    "train.drop_zero_signal_groups": Acts(
        "train.drop_zero_signal_groups=true", metric("num_groups_trained"), base="task.format_weight=0"
    ),
    "train.advantage.teacher": Acts(
        "train.advantage.teacher=@done/checkpoints/iter_001", metric("distill/reverse_kl", FIRST), base=DISTILLED
    ),
    "train.advantage.weight": Acts("train.advantage.weight=0.1", metric("advantage_std", FIRST), base=DISTILLED),
    "train.advantage.base": Acts(
        "train/advantage@train.advantage.base=group_std", metric("advantage_std", FIRST), base=DISTILLED
    ),
    "train.profile": Acts(
        "train.profile=1", lambda run: "profile/iter_000.json.gz" in run.files, to=True, keeps=weights
    ),
    "eval.interval": Acts("eval.interval=2", evaluated, to={"eval_init.json", "eval_iter_001.json"}),
    "eval.id_seed_start": Acts("eval.id_seed_start=4", answers),
    "eval.do_sample": Acts("eval.do_sample=false", answers, base=GREEDY_BASE, keeps=samples),
    "eval.temperature": Acts("eval.temperature=0.1", answers, keeps=samples),
    "checkpoint.enabled": Acts("checkpoint.enabled=false", checkpoints, to=set()),
    "checkpoint.save_interval": Acts("checkpoint.save_interval=0", checkpoints, to={"iter_001"}),
    "checkpoint.keep_best": Acts(
        "checkpoint.keep_best=pass@1", checkpoints, "checkpoint.save_interval=0", to={"iter_000", "iter_001"}
    ),
    "model.lora.target_modules": Acts("model.lora.target_modules=[q_proj]", adapted, base=LORA, to=QUERIES),
    "model.lora.use_rslora": Acts("model.lora.use_rslora=true", weights, base=LORA),
    "model.lora.layer_indices": Acts(
        "model.lora.layer_indices=1", lambda run: {name[0] for name in adapted(run)}, base=LORA, to={"1"}
    ),
}


def launcher_effect(overrides: str) -> Any:
    return make_plan(typed(compose_config(*overrides.split()))).engine.launcher


def cluster_effect(overrides: str) -> Any:
    """What is asked of which Ray cluster."""
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(
            serving,
            "RayCluster",
            lambda *words, **size: asked.append((words, size)) or SimpleNamespace(close=list, server=None),
        )
        serving.server_maker(make_plan(typed(compose_config(*overrides.split()))), [], stack)
    return asked


def scorers_effect(overrides: str) -> Any:
    """Which processes score: those of this machine, or those of which Ray cluster."""
    config, asked = typed(compose_config(*overrides.split())), []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        for name in ("Scorers", "ClusterScorers"):
            patch.setattr(
                scoring, name, lambda *words, name=name: asked.append((name, words)) or SimpleNamespace(close=list)
            )
        isolated(bad_rewards.Measuring(), config, None, stack, on_cluster=config.placement.score_on_cluster)
    return asked


def live_effect(overrides: str) -> Any:
    """How many episodes are played at a time."""
    config, task = typed(compose_config(*overrides.split())), worlds.environment()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(scoring, "Scorers", lambda setup: SimpleNamespace(close=list, setup=setup))
        return isolated(task, config, None, stack).num_live


OWN_SERVER = "generation=vllm_server weight_sync=reload engine.api_key=ours"  # else each run makes one up
ASSEMBLED: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "engine": (launcher_effect, OWN_SERVER, "engine=sglang"),
    "model.trust_remote_code": (launcher_effect, OWN_SERVER, "model.trust_remote_code=true"),
    "placement.address": (cluster_effect, f"{OWN_SERVER} placement=ray", "placement.address=local"),
    "scoring.episodes": (live_effect, "", "scoring.episodes=3"),
    "placement.score_on_cluster": (scorers_effect, "placement=ray", "placement.score_on_cluster=true"),
}
"""Key: what sees it, on top of which overrides, its change."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    num_threads = torch.get_num_threads()
    laboratory = Laboratory(tmp_path_factory.mktemp("laboratory"))
    shutil.copytree(laboratory("model.tiny.seed=7 " + QUICK).model_dir, laboratory.root / "other_model")
    write_gguf(laboratory.root / "small.gguf")
    (laboratory.root / "template.jinja").write_text("{{ messages[0].content }}{{ '!' if shout }}=")
    laboratory("train.iterations=2 train.schedule=constant")  # builds the model that the other runs find in the cache
    shutil.copytree(laboratory.root / "run_1", laboratory.root / "done")
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
    *(f"{what}_{how}_weight" for what in ("prompt", "instruction") for how in ("strict", "loose")),
}
"""Settings that the run reads for any source or task, or whose names are put together."""


def test_every_key_is_read() -> None:
    """The cheap half: some code reads each setting, in the classes of its component or, of plain settings, anywhere."""
    everywhere = "\n".join(path.read_text() for path in SOURCE.rglob("*.py") if path.name != "settings.py")
    unread = set()
    for cls, name in in_conf():
        own = [
            base
            for base in getattr(cls, "__mro__", ())
            if base.__module__.startswith(("offline_grpo", "hydra_plugins"))
        ]
        text = "\n".join(Path(inspect.getfile(base)).read_text() for base in own) if own else everywhere
        is_sampling = name in SamplingParams.__dataclass_fields__ or name == "allow_truncated_sampling"
        if not re.search(rf"\.{name}\b|[\"']{name}[\"']|[(, =]{name}[,)]", everywhere if is_sampling else text):
            unread |= {(cls, name)} if name not in READ_OTHERWISE else set()
    assert not unread


@pytest.mark.slow
def test_equal_runs_are_equal(run: Laboratory) -> None:
    """Else the differences below would prove nothing."""
    first, second = run(""), run("seed=0")
    assert {f.name for f in fields(Trace) if str(getattr(first, f.name)) != str(getattr(second, f.name))} == set()
    assert first.error == ""
    assert len(first.groups) == 2
    assert len(first.evaluations) == 3


@pytest.mark.slow  # a hundred runs
@pytest.mark.parametrize("key", RUNS)
def test_a_run_changes_with(key: str, run: Laboratory) -> None:
    row = RUNS[key]
    before, after = run(row.base), run(f"{row.base} {row.change}".strip())
    assert row.sees(before) != row.sees(after)
    assert row.to is ... or row.sees(after) == row.to
    assert row.keeps is None or row.keeps(before) == row.keeps(after)
    assert after.error == ""


@pytest.mark.parametrize("key", ASSEMBLED)
def test_a_run_is_put_together_otherwise_with(key: str) -> None:
    effect, base, change = ASSEMBLED[key]
    before = effect(base)
    assert before == effect(base) != effect(f"{base} {change}")
