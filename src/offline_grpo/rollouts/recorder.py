"""Writes the store of a run: a file for each iteration and evaluation, which says where its rollouts come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offline_grpo.disk import write_whole
from offline_grpo.interfaces import RunListener
from offline_grpo.logger import suffix_of
from offline_grpo.types import Metrics, Picture, RolloutGroup

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

FOLDER, IMAGES = "rollouts", "images"
FORMAT = 1  # increased when files of an older version can no longer be read
KEY = "offline_grpo"  # of the JSON in a file's metadata
_LAYERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SHAPE = ("model_type", "vocab_size", *_LAYERS)


@dataclass(frozen=True)
class Origin:
    """Where rollouts come from."""

    model: str  # what the run trained
    architecture: str  # hash of its kind and sizes, which every version of its weights has
    tokenizer: str  # hash of what each token id means
    config: dict[str, Any]  # of the run, resolved, without secrets
    version: int = 0  # updates in the trainer's weights when this was recorded; rows have those that drew a token
    weights: str = ""  # fingerprint of those weights, of the trained ones where others are frozen
    format: int = FORMAT


@dataclass(frozen=True)
class Recorder(RunListener):
    """Writes `rollouts/iter_000.parquet`, ... and, for evaluations, `rollouts/eval_init.parquet`, ...

    A file is complete or absent, and the same again if a resumed run repeats the iteration. It is written in a thread,
    beside the updates. `log` waits for it: as the first listener, the store has every iteration that has metrics.

    Args:
        origin: what all files have in common.
        weights: the version of the trainer's weights, and those that training changes, as they are now.
    """

    output_dir: Path
    origin: Origin
    weights: Callable[[], tuple[int, list[Tensor]]]
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rollouts"), init=False)
    _writing: list[Future[None]] = field(default_factory=list, init=False)

    def rollouts(
        self,
        name: str,
        groups: Sequence[RolloutGroup],
        *,
        advantages: Sequence[Sequence[float | None]] | None,
        iteration: int,
    ) -> None:
        from offline_grpo.engine.inside_vllm.offline_grpo_weights import fingerprints

        # The fingerprint is taken now, before the updates change the weights; the rest is for the thread.
        version, tensors = self.weights()
        origin = replace(self.origin, version=version, weights=json_hash(fingerprints(tensors)))
        self._writing.append(self._thread.submit(self._write, name, groups, advantages, iteration, origin))

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        """Waits until what was sampled so far is on disk. Raises OSError if it cannot be written."""
        while self._writing:
            self._writing.pop(0).result()

    def close(self) -> None:
        """Waits as well, and ignores errors: the iteration has no metrics, so a resumed run repeats it."""
        self._thread.shutdown()

    def _write(
        self,
        name: str,
        groups: Sequence[RolloutGroup],
        advantages: Sequence[Sequence[float | None]] | None,
        iteration: int,
        origin: Origin,
    ) -> None:
        # pyarrow takes half a second, which no start shall wait for.
        from offline_grpo.rollouts.rows import parquet, table_of

        metadata = {KEY: json.dumps(vars(origin), sort_keys=True)}
        content = parquet(table_of(name, groups, advantages, iteration), metadata)
        folder = self.output_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_pictures(folder, (p for group in groups for r in group.rollouts for own in r.pictures for p in own))
        write_whole(folder / f"{'eval_' if name == 'eval' else ''}{suffix_of(iteration)}.parquet", content)


def write_pictures(folder: Path, pictures: Iterable[Picture]) -> None:
    """Each of them once, under its name, into `images/` in the folder."""
    for picture in {each.key: each for each in pictures}.values():
        file = folder / IMAGES / picture.key
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            write_whole(file, picture.data)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | Tokenizer) -> str:
    """SHA-256 of what each token id means. The same whatever the chat template and the special roles."""
    return json_hash(sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])))


def architecture_hash(config: PreTrainedConfig) -> str:
    """SHA-256 of a language model's kind and sizes."""
    text = config.get_text_config()
    return json_hash({name: getattr(text, name, None) for name in _SHAPE})


def json_hash(value: object) -> str:
    """SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
