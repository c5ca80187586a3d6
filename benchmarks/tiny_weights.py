"""Makes the weights of tiny models that are in the package: src/offline_grpo/model/warm_started/NAME.safetensors. It
takes a minute, on one core.

    python benchmarks/tiny_weights.py [OVERRIDES]       # of run_grpo.py; without any, those of the default run
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from offline_grpo.config.build import build
from offline_grpo.config.compose import composed, register, typed
from offline_grpo.config.problems import build_task
from offline_grpo.model import tiny


def make(overrides: Sequence[str], target: Path) -> Path:
    """The new file in `target`, made by a warm start, whatever is in the package."""
    register()
    config = typed(composed(overrides))
    torch.set_num_threads(1)
    with TemporaryDirectory() as cache, patch.object(tiny, "SHIPPED", Path(cache)):
        folder = build(config.model.tiny, key="model.tiny").prepare(build_task(config.task), Path(cache))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    file = target / f"{folder.name}.safetensors"
    save_file(dict(model.named_parameters()), file)
    return file


if __name__ == "__main__":
    tiny.SHIPPED.mkdir(exist_ok=True)
    print(make(sys.argv[1:], tiny.SHIPPED))
