"""TRL's GRPOTrainer as the other arm of a benchmark, with the settings that all of them share."""

from __future__ import annotations

import logging
import os
import tempfile
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from offline_grpo.model.layers import text_parameters

IN_PROCESS: dict[str, Any] = {"use_cpu": False, "bf16": True, "use_vllm": True, "vllm_mode": "colocate"}
"""Settings for a GPU, with vLLM in the trainer's process."""


class MethodTimes:
    """Wall-clock seconds of each call to the given methods of an object. The methods may call each other."""

    def __init__(self, target: Any, names: Sequence[str]) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        for name in names:
            setattr(target, name, self._timed(name, getattr(target, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[name].append(time.perf_counter() - started)

        return call


def reader_of(model: str, rows: Sequence[dict[str, Any]]) -> Any:
    """The `processing_class` of a model."""
    return (AutoProcessor if "images" in rows[0] else AutoTokenizer).from_pretrained(model)


def opened(paths: str | Sequence[str], folder: Path) -> list[Image.Image]:
    """The pictures of a row."""
    return [Image.open(folder / path).convert("RGB") for path in ([paths] if isinstance(paths, str) else paths)]


def with_pictures(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt of a row, whose pictures TRL puts in their places."""
    if "images" not in row:
        return row["prompt"]
    from trl.data_utils import prepare_multimodal_messages

    return prepare_multimodal_messages(row["prompt"], row["images"])


def make_trainer(
    model: str,
    tokenizer: Any,
    rows: Sequence[dict[str, Any]],
    reward: Callable[..., list[float | None]] | None,
    callbacks: Sequence[TrainerCallback],
    environment: Callable[[], Any] | None = None,
    **settings: Any,
) -> Any:
    """A GRPOTrainer that only trains, by default on the CPU in float32: no evaluation, no checkpoints, no output;
    metrics stay in memory. Of a model that sees, the text model is trained.

    Args:
        rows: rows of the dataset, visited in this order, each with a "prompt".
        environment: the environment_factory, which may have the reward.
        settings: GRPOConfig settings that override those chosen here.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore", module="trl|transformers|torch|accelerate")
    for name in ("trl", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from datasets import Dataset, fingerprint
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    # `datasets` names what it caches by hashes of pickled objects, which some versions of dill cannot pickle. Here it
    # caches nothing.
    fingerprint.Hasher.hash = classmethod(lambda cls, value: uuid.uuid4().hex[:16])  # type: ignore[method-assign]
    chosen: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="trl-"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "logging_strategy": "steps",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "dataloader_pin_memory": False,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "loss_type": "grpo",
        "temperature": 1.0,
        "beta": 0.0,
        "max_grad_norm": 1.0,
    }
    config = GRPOConfig(**chosen | settings)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        callbacks=list(callbacks),
        environment_factory=environment,
    )
    if "images" in rows[0]:  # as in our runs
        lm: Any = trainer.model
        trained = text_parameters(lm)
        for name, weight in lm.named_parameters():
            weight.requires_grad_(name in trained)
    trainer.remove_callback(PrinterCallback)
    return trainer
