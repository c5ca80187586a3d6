"""Weights as folders: without the hub, and with a clear error where there is no room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import full_weights
from factories import make_policy, make_qwen2
from peft import LoraConfig, get_peft_model
from peft.utils import save_and_load

from offline_grpo.errors import EngineError
from offline_grpo.model.char_tokenizer import build_char_tokenizer
from offline_grpo.weight_sync.saving import save_weights
from offline_grpo.weight_sync.snapshot import Snapshot


def test_adapters_are_saved_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*arguments: Any, **_: Any) -> bool:
        raise AssertionError(f"the hub was asked for {arguments}")

    monkeypatch.setattr(save_and_load, "check_file_exists_on_hf_hub", ask)
    model: Any = make_qwen2()
    model.name_or_path = "some/model"
    policy = make_policy(get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])), build_char_tokenizer(64))
    policy.model.peft_config["default"].base_model_name_or_path = "some/model"
    num_bytes = save_weights(Snapshot(policy, full_weights, None), tmp_path / "adapter", with_tokenizer=False)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "adapter" / "tokenizer.json").exists()
    assert num_bytes == sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())


def test_weights_replace_what_was_there(tmp_path: Path) -> None:
    policy = make_policy(make_qwen2(), build_char_tokenizer(64))
    (tmp_path / "push").mkdir()
    (tmp_path / "push" / "old").touch()
    save_weights(Snapshot(policy, full_weights, None), tmp_path / "push", with_tokenizer=True)
    assert {path.name for path in (tmp_path / "push").iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert not (tmp_path / "push" / "old").exists()


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(make_qwen2(), build_char_tokenizer(64))

    def save(folder: str, **_: Any) -> None:
        Path(folder).mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(policy.model, "save_pretrained", save)
    with pytest.raises(EngineError, match=r"cannot be saved to .*push \(.*No space left on device\); make room there: /dev/shm"):
        save_weights(Snapshot(policy, full_weights, None), tmp_path / "push", with_tokenizer=True)
    assert not (tmp_path / "push").exists()
