"""Weights as folders: without the hub, and with a clear error where there is no room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ZOO
from engines import full_weights
from factories import make_policy, make_qwen2
from peft import LoraConfig, get_peft_model
from peft.utils import save_and_load
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from offline_grpo.checkpoint.pretrained import export_model, find_model
from offline_grpo.model.policy import save_adapter, save_policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.weight_sync.snapshot import Snapshot, save_weights


def test_adapters_are_saved_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: Any, **_: Any) -> bool:
        raise AssertionError(f"the hub was asked for {arguments}")

    monkeypatch.setattr(save_and_load, "check_file_exists_on_hf_hub", ask)
    model: Any = make_qwen2()
    model.name_or_path = "some/model"
    policy = make_policy(get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")), build_char_tokenizer(64))
    policy.model.peft_config["default"].base_model_name_or_path = "some/model"
    num_bytes = save_weights(Snapshot(policy, full_weights, None), tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not (tmp_path / "adapter" / "tokenizer.json").exists()
    names = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert names == sorted(names), "peft keeps a set, whose order is another one in every process"
    assert num_bytes == sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())


@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe", "gemma3"])
def test_an_adapter_for_a_server_is_the_one_that_peft_saves(name: str, tmp_path: Path) -> None:
    model: Any = ZOO[name].build()
    targets = [
        *{name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        - {"lm_head"}
    ]
    targets.append(next(name for name, m in model.named_modules() if isinstance(m, nn.Embedding)).rsplit(".", 1)[-1])
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    policy = make_policy(model, build_char_tokenizer(64))
    for parameter in policy.trained_parameters().values():
        parameter.data.normal_()
    save_adapter(policy, full_weights(policy), tmp_path / "ours")
    save_policy(policy, full_weights(policy), tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("ours", "theirs"))
    assert len(theirs) == len(policy.trained_parameters())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    said, saved = (json.loads((tmp_path / folder / "adapter_config.json").read_text()) for folder in ("ours", "theirs"))
    assert {key for key in said if said[key] != saved[key]} <= {
        "inference_mode",
        "base_model_name_or_path",
        "auto_mapping",
    }


def test_a_generation_config_that_transformers_refuses_to_save_is_the_models_own(tmp_path: Path) -> None:
    model = make_qwen2(vocab_size=97)
    assert model.generation_config is not None
    model.generation_config.update(do_sample=False, temperature=0.6, eos_token_id=[2, 3])
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(str(tmp_path / "refused"))
    policy = make_policy(model, build_char_tokenizer(64))
    save_policy(policy, full_weights(policy), tmp_path / "saved")
    export_model(find_model(str(tmp_path / "saved")), tmp_path / "exported", merge=True, dtype="bf16", card="")
    for folder in ("saved", "exported"):
        written = json.loads((tmp_path / folder / "generation_config.json").read_text())
        assert (written["do_sample"], written["temperature"], written["eos_token_id"]) == (False, 0.6, [2, 3])
    assert model.generation_config.temperature == 0.6
