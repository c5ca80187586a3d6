"""Evaluates models on sets of held-out problems, without training: what `offline_grpo.evaluate` does."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict
from rich.console import Console
from safetensors import safe_open
from transformers.utils.hub import cached_file

from offline_grpo import progress
from offline_grpo.checkpoint.pretrained import KEY, ModelSource, export_model, find_model
from offline_grpo.config import compose as conf
from offline_grpo.config.compose import key_of, quoted
from offline_grpo.config.engine_spec import EngineSpec, training_engine
from offline_grpo.config.parts import sampling_of
from offline_grpo.config.problems import build_task, held_out_problems, isolated
from offline_grpo.disk import OwnFolder
from offline_grpo.engine.engine import Engine
from offline_grpo.engine.inside_vllm.offline_grpo_weights import fingerprints, sums
from offline_grpo.errors import ConfigError
from offline_grpo.eval.evaluator import PassAtKEvaluator, recording
from offline_grpo.eval.statistics import PairedResult, compare
from offline_grpo.history.folder import discard_fresh
from offline_grpo.history.records import hide_progress_bars
from offline_grpo.history.resume import LOCAL, SWEEP_KEY, search_path
from offline_grpo.interfaces import Task
from offline_grpo.logger.console import ConsoleLogger
from offline_grpo.logger.samples import FirstLook
from offline_grpo.model.device import resolve_device, torch_dtype
from offline_grpo.model.load import generation_config_of, read_model_config
from offline_grpo.model.pictures import vision_of
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.redaction import redacted
from offline_grpo.report.runs import OF_ADDRESS, read_yaml
from offline_grpo.report.tables import evaluation_lines
from offline_grpo.settings import RunConfig, flat
from offline_grpo.start.prompts import check_episodes, codec_of, have_pictures, without_long
from offline_grpo.train.metrics import score_metrics
from offline_grpo.types import Metrics, Problem, RolloutGroup, SamplingParams

log = logging.getLogger(__name__)

CYCLE = 0  # of the seeds: those of a run's evaluation before training
OF_TRAINING_ALONE = ("resume", "logger", "checkpoint", "hydra", "rollouts")
"""Overrides of a run that say nothing about the evaluation of its checkpoints, beside `OF_RUN`."""
OF_RUN = ("eval.backend", "eval.base_url", "eval.weight_sync")
"""Settings of evaluations that are part of a run. Others ask what `generation` names."""


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out problems: the set's name, what it is made of, and how completions are drawn."""

    name: str
    config: RunConfig
    plain: Mapping[str, Any]
    task: Task
    problems: Sequence[Problem]
    sampling: SamplingParams


@dataclass
class Results:
    """What was measured so far: (model, set) -> metrics and right answers [N]; every model's first comparison is with
    the first one.
    """

    metrics: dict[tuple[str, str], Metrics] = field(default_factory=dict)
    num_correct: dict[tuple[str, str], Any] = field(default_factory=dict)
    comparisons: dict[tuple[str, str], PairedResult] = field(default_factory=dict)
    is_complete: bool = False


def evaluate_and_print(
    names: Mapping[str, str], words: Sequence[str], out: Path, console: Console, *, trust: bool
) -> None:
    """Evaluate the models with these names, print the table, and leave `results.json` and a file of records for each
    model and set, also after an interruption.
    """
    hide_progress_bars()
    models = {letter: find_model(name, trust_remote_code=trust) for letter, name in names.items()}
    run_folder = next((source.run_folder for source in models.values() if source.run_folder is not None), None)
    base = saved_overrides(run_folder, words)
    if base:
        print(f"settings of {run_folder}, and on top of them the command line's", file=sys.stderr)
    sets = evaluation_sets(base, words)
    spec = engine_spec(sets[0].config, models.values())
    out.mkdir(parents=True, exist_ok=True)
    results, display = Results(), ConsoleLogger(refresh_per_s=4.0, names="default")
    display.console = console
    try:
        with progress.followed(), closing(display):
            progress.tell([display])
            evaluate(models, sets, spec, out, results)
    finally:
        # The record, unless no problem was asked.
        named = {letter: str(source.checkpoint or source.name) for letter, source in models.items()}
        record = {
            "models": named,
            "overrides": [*base, *words],
            "sets": {each.name: each.plain for each in sets},
            "is_complete": results.is_complete,
            "metrics": [{"model": m, "set": name, **found} for (m, name), found in results.metrics.items()],
            "compared_with_the_first": [
                {"model": m, "set": name, **asdict(found)} for (m, name), found in results.comparisons.items()
            ],
        }
        if any(out.iterdir()):
            (out / "results.json").write_text(json.dumps(redacted(record), indent=1) + "\n")
        discard_fresh(out)

        # The table.
        lines: list[str] = []
        if results.metrics:
            has_other_seeds = run_folder is not None and sets[0].config.eval.do_sample
            note = ["drawn with other seeds than in the run's evaluation, so the numbers differ a bit"]
            ks = {each.name: each.config.eval.ks for each in sets}
            lines = evaluation_lines(named, results.metrics, ks, results.comparisons, note * has_other_seeds)
        if out.exists():
            end = "" if results.is_complete else " (not complete: the problems that were judged are there)"
            print("\n".join([*lines, "", f"files  {out}{end}"]))


def saved_overrides(run_folder: Path | None, words: Sequence[str]) -> list[str]:
    """The overrides of the run that wrote a checkpoint, but for those that do not matter or that `words` replace, and
    the folders in which they were found. Its relative paths are absolute."""
    if run_folder is None or not (run_folder / ".hydra" / "overrides.yaml").exists():
        return []
    # Another `generation` brings its own engine; otherwise the run's words choose it.
    groups = _options(words)
    served = ("engine", "weight_sync") if "generation" in groups else ()
    own = read_yaml(run_folder / ".hydra" / "overrides.yaml") or []
    # The server of a sweep has ended with it.
    of_sweep = OF_ADDRESS if any(SWEEP_KEY in word for word in own) else ()
    is_left_out = re.compile(rf"({'|'.join([*OF_TRAINING_ALONE, *OF_RUN, *groups, *served, *of_sweep])})([.@]|$)").match
    stored = flat(read_yaml(run_folder / ".hydra" / "config.yaml"))
    found = [] if _search_path(words) else search_path(run_folder)  # Hydra reads one
    for word in own:
        key = key_of(word)
        if key.rpartition(".")[2] in LOCAL and isinstance(stored.get(key), str):
            word = f"{word.partition('=')[0]}={quoted(stored[key])}"
        if not is_left_out(key):
            found.append(word)
    return found


def evaluation_sets(base: Sequence[str], words: Sequence[str]) -> list[EvaluationSet]:
    """A set for every combination of the values that `words` give, as in a sweep; one if each key has one value.

    Args:
        base: overrides that come before those of the command line.

    Raises ConfigError for a key that cannot differ between sets.
    """
    conf.register()
    choices = []
    for override in OverridesParser.create().parse_overrides(list(words)):
        key, word = override.get_key_element(), str(override.input_line)
        if not override.is_sweep_override():
            choices.append([(word, "")])
            continue
        if key != "task" and not key.startswith(("task.", "eval.")):
            raise ConfigError(f"{word}: sets of problems can differ in task and eval alone; give one value")
        values = list(override.sweep_string_iterator())
        choices.append([(f"{key}={value}", value if key == "task" else f"{key}={value}") for value in values])
    found = []
    for chosen in product(*choices):
        own_words, name = [word for word, _ in chosen], " ".join(name for _, name in chosen if name)
        cfg = conf.composed([*base, *own_words])
        if (option := _options(own_words).get("task")) is not None:
            # an `experiment` of the run may have settings of its own task, which the one that `words` choose lacks
            of_option = conf.composed([*_search_path([*base, *own_words]), f"task={option}"]).task
            own = {*of_option, *(key.split(".")[1] for key in map(key_of, own_words) if key.startswith("task."))}
            with open_dict(cfg.task):
                for other in {*cfg.task} - own:
                    del cfg.task[other]
        config = conf.typed(cfg)
        task = build_task(config.task)
        problems, sampling = held_out_problems(task, config), sampling_of(config, "eval")
        name = name or type(task).__name__.lower()
        found.append(EvaluationSet(name, config, conf.as_plain(cfg), task, problems, sampling))
    return found


def _search_path(words: Sequence[str]) -> list[str]:
    return [word for word in words if key_of(word) == "hydra.searchpath"]


def _options(words: Sequence[str]) -> dict[str, str]:
    """The groups that `words` choose an option of."""
    pairs = ((key_of(word), word.partition("=")[2]) for word in words)
    return {key: value for key, value in pairs if value and (conf.folder() / key).is_dir()}


def engine_spec(config: RunConfig, models: Collection[ModelSource]) -> EngineSpec:
    """What samples: the group `generation`, without the settings that say how training samples. Raises ConfigError for
    a server that is not installed, or one that is running for several models or an adapter.
    """
    spec = training_engine(config)
    # A server that is running has one whole model.
    if spec.base_urls:
        fix = ""
        if len(spec.base_urls) > 1:
            fix = "an evaluation asks one server; name one"
        elif len(models) > 1:
            fix = f"that server has one model and {len(models)} are named; evaluate one at a time"
        elif any(source.adapter is not None for source in models):
            fix = "MODEL is a LoRA adapter, and that server would answer with its base model; use generation.base_url="
            fix += "null, or serve the merged model (python -m offline_grpo.export MODEL OUT) and name its folder"
        if fix:
            raise ConfigError("generation.base_url", spec.base_url, fix)
    if spec.launcher is not None:
        spec.launcher.check_installed()
    return spec


def evaluate(
    models: Mapping[str, ModelSource], sets: Sequence[EvaluationSet], spec: EngineSpec, out: Path, results: Results
) -> None:
    """Ask every model, by its short name, every problem. Fills `results` as it goes, so that they are there after an
    interruption too. The folder `out` gets the records and a server's log.
    """
    first = next(iter(models))
    for letter, source in models.items():
        with ExitStack() as of_model:
            with progress.phase(f"load {letter}"):
                codec, engine = sampler_of(source, sets, spec, out, of_model)

            # Every model is asked the same, so the first one's tokens say which problems are too long.
            if letter == first:
                sets = [
                    replace(each, problems=without_long(each.problems, codec, each.config.data, "held-out"))
                    for each in sets
                ]
            check_episodes(codec, [problem for each in sets for problem in each.problems])

            look = FirstLook(codec.tokenizer, codec.end_ids, shows=letter == first)
            for number, chosen in enumerate(sets, 1):
                key, settings = (letter, chosen.name), chosen.config.eval
                asked = f"{len(chosen.problems)} problems, {settings.replicates} completions each"
                log.info("%s on %s: %s", letter, chosen.name, asked)
                # the number keeps sets apart whose names differ in other signs than letters
                file = out / f"{letter}-{number}-{re.sub(r'[^a-zA-Z0-9_.=-]+', '_', chosen.name)}.jsonl"
                with progress.phase(f"{letter} on {chosen.name}"):
                    groups, metrics = answers_to(chosen, codec, engine, file)

                # The metrics, and problem by problem how this model differs from the first one.
                results.metrics[key] = {**metrics, **score_metrics(groups)}
                correct = np.array([sum(r.score.is_correct for r in group.rollouts) for group in groups])
                results.num_correct[key] = correct
                if letter != first:
                    pair = results.num_correct[first, chosen.name], correct
                    results.comparisons[key] = compare(*pair, settings.replicates)
                look.rollouts("eval", groups, advantages=None, iteration=-1)
    results.is_complete = True


def sampler_of(
    source: ModelSource, sets: Sequence[EvaluationSet], spec: EngineSpec, out: Path, stack: ExitStack
) -> tuple[TokenizerCodec, Engine]:
    """What samples from a model, started: this process, or a server, which has an adapter merged into its base; and
    its codec. `stack` ends it.
    """
    # What the model reads.
    config, trust = sets[0].config, {"trust_remote_code": source.trust_remote_code}
    tokenizer = source.tokenizer(config.model.chat_template)
    model_config = read_model_config(source.weights, "MODEL", **trust)
    has_pictures = any(have_pictures(each.problems) for each in sets)
    vision = vision_of(source.weights, model_config, **trust) if has_pictures else None
    codec = codec_of(config, tokenizer, generation_config_of(source.weights), vision)
    runtime: dict[str, Any] = {"tokenizer": tokenizer, "eos_ids": codec.end_ids, "vocab_size": None}
    runtime |= {"vision": vision, "banned_ids": () if vision is None else vision.stand_ins}

    # Its weights: a folder for the server, or the model here.
    place = source.weights
    if spec.needs_server:
        runtime["vocab_size"] = model_config.get_text_config().vocab_size
    else:
        dtype = source.trained_dtype or torch_dtype(config.train.precision)
        how: Any = {"dtype": dtype, "attn_implementation": config.model.attn_implementation}
        runtime["model"] = source.load(device=resolve_device(config.model.device), **how)
    if spec.needs_server and source.adapter is not None:
        place = str(stack.enter_context(OwnFolder(out, ".merged_")) / "model")
        export_model(source, Path(place), merge=True, dtype=None, card="")

    engine = spec.engine(sampling=sets[0].sampling, is_corrected=True, log_dir=out, **runtime)
    stack.callback(engine.stop)
    engine.start(place, {})
    if spec.base_urls:
        check_served_model(source, engine)
    return codec, engine


def answers_to(
    chosen: EvaluationSet, codec: TokenizerCodec, engine: Engine, file: Path
) -> tuple[list[RolloutGroup], Metrics]:
    """A group for each problem of a set, in their order, and pass@k. Groups come as they are complete; each is on
    record in `file` at once.
    """
    found: dict[int, RolloutGroup] = {}
    with ExitStack() as stack, recording(file) as record:
        evaluator = PassAtKEvaluator.of(
            chosen.config.eval,
            task=isolated(chosen.task, chosen.config, file.parent, stack),
            problems=chosen.problems,
            codec=codec,
            sampling=chosen.sampling,
            rank=0,
            world_size=1,
        )
        for index, group in evaluator.groups(engine, cycle=CYCLE):
            found[index] = group
            record(index, group)
    groups = [found[index] for index in range(len(found))]
    return groups, evaluator.metrics(groups, cycle=CYCLE)


def check_served_model(source: ModelSource, engine: Any) -> None:
    """Compare the server's weights with the model's files, tensor by tensor, where both can be read. Rows and columns
    may be swapped. Raises ConfigError if some differ.
    """
    # Fingerprints of the files, in the format that the server has.
    url = engine.base_url
    others: dict[str, str] = {}
    num_compared = 0
    if engine.lacks("full") is None:
        served = engine.served_bits()
        folder = Path(cached_file(source.weights, "config.json") or "").parent
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in served.fingerprints.keys() & set(file.keys()):
                    num_compared += 1
                    cast = [file.get_tensor(name).to(torch_dtype(served.dtype))]
                    if fingerprints(cast) != [served.fingerprints[name]]:
                        others |= zip([name], sums(cast), strict=True)

    if unequal := engine.other_numbers(others):
        about = f"the server has another model than {KEY}={source.name}"
        differ = f"{len(unequal)} of {num_compared} tensors differ, {', '.join(unequal[:3])}"
        fix = "start it from that model, or let the evaluation start one (generation.base_url=null)"
        raise ConfigError(f"generation.base_url={url}: {about}: {differ}; {fix}")
    if num_compared:
        log.info("%s has the weights of %s: %d tensors equal bit for bit", url, source.name, num_compared)
    else:
        log.info("%s: its weights cannot be compared with those of %s", url, source.name)
