"""A model by whatever name people have for it: a Hub id, a Hugging Face folder, a peft adapter, a checkpoint, a run
folder; and the folder that is exported for others, without a run's trainer state.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from offline_grpo import hub
from offline_grpo.checkpoint.files import BEST, TrainerState, latest_checkpoint, verified_state
from offline_grpo.disk import OwnFolder, require_new, share
from offline_grpo.errors import ConfigError
from offline_grpo.model.adapters import LanguageModel, unwrapped, warn_of_peft, with_saved_adapter
from offline_grpo.model.device import make_current, torch_dtype
from offline_grpo.model.load import build_on_meta, load_causal_lm, load_tokenizer, read_model_config
from offline_grpo.model.policy import save_model

KEY = "MODEL"
"""What messages call the name that was given, unless that is a setting."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model is, found but not loaded."""

    name: str  # as it was given
    weights: str  # folder or Hub id of a causal language model; of an adapter, that of its base
    adapter: str | None  # folder or Hub id of a peft adapter; None for a whole model
    checkpoint: Path | None  # the folder of one that a run wrote, None for a model from elsewhere
    trust_remote_code: bool  # execute Python code that comes with the model
    # Of the run that wrote the checkpoint; None for a model from elsewhere.
    run_folder: Path | None
    state: TrainerState | None  # the checkpoint's `trainer/state.json`
    config: Mapping[str, Any] | None
    trained_dtype: torch.dtype | None  # that it computed in
    quantization: str | None  # of the base that an adapter was trained on; None where it was not quantised
    key: str = KEY  # what messages call the name

    def tokenizer(self, chat_template: str | None = None) -> PreTrainedTokenizerBase:
        """The one beside the weights, or else that of the base. `chat_template`: see `use_template`."""
        local = Path(self.adapter) if self.adapter is not None else None
        has_own = local is not None and (local / "tokenizer_config.json").exists()
        how = {"key": self.key, "trust_remote_code": self.trust_remote_code, "chat_template": chat_template}
        return load_tokenizer(str(local) if has_own else self.weights, **how)

    def load(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype | None = None,
        attn_implementation: str = "auto",
        merge: bool = False,
    ) -> LanguageModel:
        """The model in eval mode, frozen, in the format of the run that trained it, or of its files, if `dtype` is
        None. Its GPU becomes torch's current one. `merge` adds an adapter to the weights of the base's files in fp32,
        and rounds the sum once.
        """
        make_current(device)
        how: Any = {"key": self.key, "trust_remote_code": self.trust_remote_code}
        how["quantization"] = None if merge else self.quantization
        model = load_causal_lm(self.weights, attn_implementation, device, dtype or self.trained_dtype, **how)
        model.requires_grad_(False)
        if self.adapter is None:
            return model
        own = model.dtype
        adapted = with_saved_adapter(model.float() if merge else model, self.adapter, key=self.key, is_trainable=False)
        if not merge:
            return adapted.eval()
        return adapted.merge_and_unload().to(own).eval()  # type: ignore[return-value, operator]


def find_model(name: str, *, trust_remote_code: bool = False, key: str = KEY) -> ModelSource:
    """Find out what `name` is. Of a run folder, the best checkpoint is taken if the run kept it, else the newest.
    `trust_remote_code` is never taken from a checkpoint's own settings. Raises ConfigError or CheckpointError.
    """
    # A run stands for its best checkpoint, which must be as it was written.
    folder = Path(name).expanduser()
    is_run = os.path.isdir(folder / "checkpoints")
    if is_run:
        best = folder / "checkpoints" / BEST
        found = best if best.exists() else latest_checkpoint(folder / "checkpoints")
        if found is None:
            fix = "a run without a checkpoint; give a checkpoint, a model folder or a Hugging Face id"
            raise ConfigError(f"{key}={name}: {fix}")
        folder = found
    elif not any(folder.glob("*config.json")):
        # No model: perhaps a sweep, a folder of runs, or all checkpoints of one.
        found = [*(path.parent for path in folder.glob("*/checkpoints")), *folder.glob("iter_*")]
        if found:
            raise ConfigError(f"{key}={name}: is no model itself; name what is in it, such as {min(found)}")
    checkpoint = folder.resolve() if is_run or os.path.lexists(folder / "trainer") else None
    state = verified_state(checkpoint, key=key) if checkpoint is not None else None
    place = str(checkpoint or folder) if os.path.exists(folder) else name
    hub.need_model(place, key)

    # An adapter names the model that it was trained on; `read_model_config` says if there is no model at all.
    base = None
    with suppress(OSError):
        found = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        if (file := cached_file(place, ADAPTER_CONFIG_NAME, **found)) is not None:
            base = str(json.loads(Path(file).read_text())["base_model_name_or_path"])
    of_base = key if base is None else f"{key}={name}: an adapter, whose base_model_name_or_path"
    read_model_config(base or place, of_base, trust_remote_code=trust_remote_code)
    adapter = place if base is not None else None
    config = None if state is None else state.config
    return ModelSource(
        name=name,
        weights=base or place,
        adapter=adapter,
        checkpoint=checkpoint,
        trust_remote_code=trust_remote_code,
        run_folder=None if checkpoint is None else checkpoint.parent.parent,
        state=state,
        config=config,
        trained_dtype=None if config is None else torch_dtype(config["train"]["precision"]),
        quantization=None if config is None else config["model"].get("quantization"),
        key=key,
    )


def export_model(
    source: ModelSource, out: Path, *, merge: bool, dtype: str | None, card: str, picture: Path | None = None
) -> None:
    """Write the folder `out` for transformers, peft and inference servers, completely or not at all: an adapter added
    to its base (`merge`) or alone; weights as they were trained if `dtype` is None; README.md with `card` and its
    picture.
    """
    require_new(out, f"OUT={out}")
    is_merged = source.adapter is not None and merge
    if source.adapter is not None and not merge and dtype is not None:
        raise ConfigError(f"--dtype={dtype}: an adapter is written as it is; use it with --merge")
    parent, own = out.resolve().parent, Path(source.adapter or source.weights)
    parent.mkdir(parents=True, exist_ok=True)
    with OwnFolder(parent, ".exporting-") as scratch:
        folder = scratch / "model"
        folder.mkdir()
        # Files that need no change are copied; else the model is loaded, changed, and saved.
        if own.is_dir() and dtype is None and not is_merged:
            if source.adapter is not None:  # its tensors against those that its base has room for
                config = read_model_config(source.weights, KEY, trust_remote_code=source.trust_remote_code)
                base = build_on_meta(config, trust_remote_code=source.trust_remote_code)
                warn_of_peft(with_saved_adapter(base, source.adapter, key=KEY, is_trainable=False))
            for path in own.iterdir():
                if path.is_file() and path.name != "README.md":  # peft writes one without content
                    shutil.copyfile(path, folder / path.name)
        else:
            model = source.load(device=torch.device("cpu"), merge=True)
            model.to(torch_dtype(dtype) if dtype is not None else model.dtype)  # type: ignore[arg-type]
            save_model(unwrapped(model), folder)
            source.tokenizer().save_pretrained(str(folder))
        share(folder)
        (folder / "README.md").write_text(card)
        if picture is not None:
            shutil.copyfile(picture, folder / picture.name)
        folder.replace(out.resolve())  # a link stays a link


def push_to_hub(folder: Path, repo: str, *, private: bool) -> str:
    """Upload an exported folder, as the user who is logged in (`hf auth login`). Returns its URL."""
    from huggingface_hub import HfApi

    api = HfApi()
    url = api.create_repo(repo, private=private, exist_ok=True)
    api.upload_folder(repo_id=url.repo_id, folder_path=str(folder))
    return str(url)
