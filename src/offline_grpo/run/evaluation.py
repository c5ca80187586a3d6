"""Evaluates models on sets of held-out problems, without training: what `offline_grpo.evaluate` does."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils.hub import cached_file

from offline_grpo import progress
from offline_grpo.checkpoint.export import export_model
from offline_grpo.checkpoint.pretrained import KEY, ModelSource
from offline_grpo.disk import OwnFolder
from offline_grpo.engine.engine import ServerEngine, engine_of
from offline_grpo.engine.inside_vllm.offline_grpo_fingerprint import fingerprints, sums
from offline_grpo.engine.server import Server
from offline_grpo.errors import ConfigError, require
from offline_grpo.eval.evaluator import PassAtKEvaluator
from offline_grpo.eval.paired import PairedResult, compare
from offline_grpo.eval.records import recording
from offline_grpo.interfaces import RolloutClient
from offline_grpo.model.device import resolve_device, torch_dtype
from offline_grpo.model.load import read_model_config
from offline_grpo.model.text import TokenizerCodec, end_ids
from offline_grpo.run.build import build
from offline_grpo.run.engine_spec import EngineSpec, training_engine
from offline_grpo.run.evaluation_sets import EvaluationSet
from offline_grpo.run.task_data import isolated
from offline_grpo.seeding import derive_seed
from offline_grpo.settings import RunConfig
from offline_grpo.train.experience import score_metrics
from offline_grpo.types import Metrics, RolloutGroup, SamplingParams

log = logging.getLogger(__name__)

_SHOWN_CHARS = 40  # of a set's name beside its progress: a line of a terminal has room for both

CYCLE = 0  # of the seeds: those of a run's evaluation before training


@dataclass
class Results:
    """What was measured so far: (model, set) -> metrics and right answers [N]; every model's first comparison is with
    the first one.
    """

    metrics: dict[tuple[str, str], Metrics] = field(default_factory=dict)
    num_correct: dict[tuple[str, str], Any] = field(default_factory=dict)
    comparisons: dict[tuple[str, str], PairedResult] = field(default_factory=dict)
    is_complete: bool = False

    def as_plain(self) -> dict[str, Any]:
        """For results.json."""
        return {
            "is_complete": self.is_complete,
            "metrics": [{"model": model, "set": name, **metrics} for (model, name), metrics in self.metrics.items()],
            "compared_with_the_first": [
                {"model": m, "set": name, **asdict(result)} for (m, name), result in self.comparisons.items()
            ],
        }


def engine_spec(config: RunConfig, models: Collection[ModelSource]) -> EngineSpec:
    """What samples: the group `generation`, without the settings that say how training samples.

    Raises:
        ConfigError: no such client, a server that is not installed, or one that is running for several models or an
        adapter.
    """
    names = {*SamplingParams.__dataclass_fields__, "allow_truncated_sampling"}
    spec = training_engine(config, {name: value for name, value in config.generation.items() if name not in names})
    if spec.needs_server and spec.base_url is not None:
        several = f"that server has one model and {len(models)} are named; evaluate one at a time"
        require(len(models) == 1, "generation.base_url", spec.base_url, several)
        adapter = (
            "MODEL is a LoRA adapter, and that server would answer with its base model; use "
            "generation.base_url=null, or serve the merged "
            "model (python -m offline_grpo.export MODEL OUT) and name its folder"
        )
        require(all(source.adapter is None for source in models), "generation.base_url", spec.base_url, adapter)
    require(len(spec.base_urls) <= 1, "generation.base_url", spec.base_url, "an evaluation asks one server; name one")
    if spec.launcher is not None:
        spec.launcher.check_installed()
    return spec


def evaluate(models: Mapping[str, ModelSource], sets: Sequence[EvaluationSet], out: Path, results: Results) -> None:
    """Ask every model every problem. Fills `results` as it goes, so that they are there after an interruption too.

    Args:
        models: by the short names that the results call them.
        out: the folder for the records and for a server's log.
    """
    spec = engine_spec(sets[0].config, models.values())
    for letter, source in models.items():
        with ExitStack() as stack:
            with progress.phase(f"load {letter}"):
                client, codec = stack.enter_context(_served(source, sets[0], spec, out))
            for number, held_out in enumerate(sets, 1):
                log.info(
                    "%s on %s: %d problems, %d completions each",
                    letter,
                    held_out.name,
                    len(held_out.problems),
                    held_out.config.eval.replicates,
                )
                with progress.phase(f"{letter} on {held_out.name}"[:_SHOWN_CHARS]):
                    _evaluate(letter, client, codec, held_out, out / _file_name(letter, number, held_out.name), results)
    results.is_complete = True


def _file_name(letter: str, number: int, set_name: str) -> str:
    """Of a model's records on a set; the number keeps sets apart whose names differ in other signs than letters."""
    return f"{letter}-{number}-{re.sub(r'[^a-zA-Z0-9_.=-]+', '_', set_name)}.jsonl"


def _evaluate(
    letter: str,
    client: RolloutClient,
    codec: TokenizerCodec,
    held_out: EvaluationSet,
    records_file: Path,
    results: Results,
) -> None:
    settings = held_out.config.eval
    groups: dict[int, RolloutGroup] = {}
    with ExitStack() as stack, recording(records_file) as record:
        evaluator = PassAtKEvaluator.of(
            settings,
            task=isolated(held_out.task, held_out.config, records_file.parent, stack),
            problems=held_out.problems,
            codec=codec,
            sampling=held_out.sampling,
            rank=0,
            world_size=1,
        )
        for index, group in evaluator.groups(client, cycle=CYCLE):
            groups[index] = group
            record(index, group)
    ordered = [groups[index] for index in range(len(groups))]
    key = (letter, held_out.name)
    results.metrics[key] = {**evaluator.metrics(ordered, cycle=CYCLE), **score_metrics(ordered)}
    results.num_correct[key] = np.array([sum(r.score.is_correct for r in group.rollouts) for group in ordered])
    first = next(iter(results.num_correct))[0]
    if letter != first:
        pair = (results.num_correct[first, held_out.name], results.num_correct[key])
        seed = derive_seed(settings.seed_base, "paired")
        results.comparisons[key] = compare(
            *pair, settings.replicates, bootstrap_samples=settings.bootstrap_samples, seed=seed
        )


@contextmanager
def _served(
    source: ModelSource, held_out: EvaluationSet, spec: EngineSpec, out: Path
) -> Iterator[tuple[RolloutClient, TokenizerCodec]]:
    """A client that samples from the model: in this process, or from a server that is started with it."""
    tokenizer, config = source.tokenizer(), held_out.config
    with ExitStack() as stack:
        runtime: dict[str, Any] = {"tokenizer": tokenizer, "server": None}
        place = source.weights
        if spec.needs_server:
            runtime["server"] = Server(
                base_url=spec.base_url, api_key=spec.api_key, launcher=spec.launcher, log_dir=out
            )
            if source.adapter is not None and spec.base_url is None:
                place = str(stack.enter_context(OwnFolder(out, ".merged_")) / "model")
                export_model(source, Path(place), merge=True, dtype=None, card="")
            runtime["eos_ids"] = end_ids(_generation_config(source.weights), tokenizer)
            model_config = read_model_config(source.weights, "MODEL", trust_remote_code=source.trust_remote_code)
            runtime["vocab_size"] = model_config.get_text_config().vocab_size
        else:
            dtype = source.trained_dtype or torch_dtype(config.train.precision)
            attention = config.model.attn_implementation
            runtime["model"] = source.load(
                device=resolve_device(config.model.device), dtype=dtype, attn_implementation=attention
            )
        client = build(spec.client_node, key="generation", protocol=RolloutClient, **runtime)
        engine = engine_of(client, held_out.sampling)
        stack.callback(engine.stop)
        engine.start(place, {})
        if isinstance(engine, ServerEngine) and engine.found_at is not None:
            check_served_model(source, engine)
        yield client, TokenizerCodec(tokenizer)


def _generation_config(model: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return None  # a model without one


def check_served_model(source: ModelSource, engine: ServerEngine) -> None:
    """Compare the server's weights with the model's files, tensor by tensor, where both can be read. Rows and columns
    may be swapped.

    Raises:
        ConfigError: some differ.
    """
    url = engine.server.base_url
    served = engine.control.served_bits() if engine.control.lacks("full") is None else None
    names = set(served.fingerprints) if served is not None else set()
    others: dict[str, str] = {}
    num_compared = 0
    for name, tensor in _tensors(source, names):
        assert served is not None
        num_compared += 1
        cast = [tensor.to(torch_dtype(served.dtype))]
        if fingerprints(cast) != [served.fingerprints[name]]:
            others |= zip([name], sums(cast), strict=True)
    if unequal := engine.control.other_numbers(others):
        raise ConfigError(
            f"generation.base_url={url}: the server has another model than {KEY}={source.name}: {len(unequal)} "
            f"of {num_compared} tensors "
            f"differ, {', '.join(unequal[:3])}; start it from that model, or let the evaluation start one "
            f"(generation.base_url=null)"
        )
    if num_compared:
        log.info(
            "%s has the weights of %s: %d of %d tensors equal bit for bit", url, source.name, num_compared, num_compared
        )
    else:
        log.info("%s: its weights cannot be compared with those of %s; it answers with what it has", url, source.name)


def _tensors(source: ModelSource, names: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Those of the model's files, one after the other."""
    config = cached_file(source.weights, "config.json")
    for path in sorted(Path(config).parent.glob("*.safetensors")):  # type: ignore[arg-type]  # without one, nothing would have been found
        with safe_open(path, "pt") as file:
            for name in names.intersection(file.keys()):
                yield name, file.get_tensor(name)
