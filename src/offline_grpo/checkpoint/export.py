"""A model folder for others: what transformers, peft and inference servers load, without a run's trainer state."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from offline_grpo.checkpoint.pretrained import ModelSource
from offline_grpo.disk import OwnFolder, require_new
from offline_grpo.errors import ConfigError
from offline_grpo.model.device import torch_dtype


def export_model(source: ModelSource, out: Path, *, merge: bool, dtype: str | None, card: str) -> None:
    """Write the folder `out`, completely or not at all.

    Args:
        merge: add an adapter to its base; otherwise the adapter is written alone.
        dtype: format of the weights, None leaves it as it was trained.
        card: what README.md will say.

    Raises:
        ConfigError: `out` is in the way, or the settings contradict each other.
    """
    require_new(out, f"OUT={out}")
    if source.adapter is not None and not merge and dtype is not None:
        raise ConfigError(f"--dtype={dtype}: an adapter is written as it is; use it with --merge")
    parent = out.resolve().parent
    parent.mkdir(parents=True, exist_ok=True)
    with OwnFolder(parent, ".exporting-") as scratch:
        hidden = scratch / "model"
        hidden.mkdir()
        _write(source, hidden, merge=merge, dtype=dtype)
        (hidden / "README.md").write_text(card)
        hidden.replace(out.resolve())  # a link stays a link


def _write(source: ModelSource, folder: Path, *, merge: bool, dtype: str | None) -> None:
    own = Path(source.adapter or source.weights)
    is_changed = dtype is not None or (source.adapter is not None and merge)
    if own.is_dir() and not is_changed:
        for path in own.iterdir():
            if path.is_file() and path.name != "README.md":  # peft writes one without content
                shutil.copyfile(path, folder / path.name)
        return
    model = source.load(device=torch.device("cpu"), merge=True)
    model.to(torch_dtype(dtype) if dtype is not None else model.dtype)  # type: ignore[arg-type]
    model.save_pretrained(str(folder))
    source.tokenizer().save_pretrained(str(folder))


def push_to_hub(folder: Path, repo: str, *, private: bool) -> str:
    """Upload an exported folder, as the user who is logged in (`hf auth login`). Returns its URL."""
    from huggingface_hub import HfApi

    api = HfApi()
    url = api.create_repo(repo, private=private, exist_ok=True)
    api.upload_folder(repo_id=url.repo_id, folder_path=str(folder))
    return str(url)
