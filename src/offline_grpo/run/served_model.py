"""Does a server that was found have the model that an evaluation asks it about?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from offline_grpo.checkpoint.pretrained import KEY, ModelSource
from offline_grpo.engine.engine import ServerEngine
from offline_grpo.engine.inside_vllm.offline_grpo_fingerprint import fingerprints, sums
from offline_grpo.errors import ConfigError
from offline_grpo.model.dtypes import torch_dtype

log = logging.getLogger(__name__)


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
            f"generation.base_url={url}: the server has another model than {KEY}={source.name}: {len(unequal)} of {num_compared} tensors "
            f"differ, {', '.join(unequal[:3])}; start it from that model, or let the evaluation start one (generation.base_url=null)"
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
