"""Exported folders hold the model that was trained: its logits are those of transformers and peft themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import ZOO
from factories import make_qwen2
from peft import LoraConfig, get_peft_model
from run_folders import config_of, make_checkpoint, state_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from offline_grpo import export
from offline_grpo.checkpoint.pretrained import export_model, find_model, push_to_hub
from offline_grpo.errors import ConfigError
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.report.model_card import model_card
from offline_grpo.report.runs import Run

IDS = torch.arange(4, 20)[None]
CPU = torch.device("cpu")


def checkpoint(folder: Path, model: Any, precision: str = "fp32") -> Path:
    """What a run leaves, as far as an export reads it."""
    model.save_pretrained(str(folder))
    build_char_tokenizer(512).save_pretrained(str(folder))
    return make_checkpoint(folder, state_of(config=config_of(precision=precision)))


def adapted(tmp_path: Path, base: Any) -> Any:
    """A LoRA policy on a saved base, with adapters that do something."""
    base.save_pretrained(str(tmp_path / "base"))
    build_char_tokenizer(512).save_pretrained(str(tmp_path / "base"))
    torch.manual_seed(0)
    policy = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(r=4, use_rslora=True, target_modules="all-linear"),
    )
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return policy.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_merged_adapter_is_the_policy(name: str, tmp_path: Path) -> None:
    policy = adapted(tmp_path, ZOO[name].build())
    source = find_model(str(checkpoint(tmp_path / "run" / "checkpoints" / "iter_000", policy)))
    (tmp_path / "curves.png").write_bytes(b"drawn")
    export_model(source, tmp_path / "out", merge=True, dtype=None, card="card", picture=tmp_path / "curves.png")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(policy), atol=1e-4, rtol=1e-4)
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))).abs().max() > 0.1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert (tmp_path / "out" / "curves.png").read_bytes() == b"drawn"
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # for the same readers
    assert not names & {"trainer", "adapter_config.json"}
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == build_char_tokenizer(512).chat_template
    assert (tmp_path / "out" / "README.md").read_text() == "card"


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_whole_model(dtype: str | None, tmp_path: Path) -> None:
    """Of a run in bf16 the weights that it computed with, not the fp32 masters."""
    policy = make_qwen2(vocab_size=97).to(torch.bfloat16 if dtype is None else torch.float32)
    source = find_model(str(checkpoint(tmp_path / "iter_000", policy, precision="bf16" if dtype is None else "fp32")))
    export_model(source, tmp_path / "out", merge=True, dtype=dtype, card="")
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert out.dtype == torch.bfloat16
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in policy.state_dict().items()}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in out.state_dict().items())


def test_a_push_sends_the_folder_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Api:
        def create_repo(self, repo: str, **settings: Any) -> Any:
            calls.append((repo, settings))
            return SimpleNamespace(repo_id=repo)

        def upload_folder(self, **settings: Any) -> None:
            calls.append(settings)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    push_to_hub(tmp_path, "me/m", private=True)
    settings = {"private": True, "exist_ok": True}
    assert calls == [("me/m", settings), {"repo_id": "me/m", "folder_path": str(tmp_path)}]


def test_only_what_is_pushed_can_be_private(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--private: .* add --push-to-hub USER/MODEL"):
        export.run(["any", str(tmp_path / "out"), "--private"])


def test_the_card_tells_results_and_nothing_private() -> None:
    config = {
        "model": {"train_id": "some/base"},
        "task": {"_target_": "offline_grpo.task.gsm8k.GSM8K", "path": "openai/gsm8k"},
        "data": {"problems_per_iteration": 8, "rollouts_per_problem": 4},
        "eval": {"temperature": 0.7},
        "generation": {"api_key": "sk-314"},
        "cache_dir": "/home/somebody/cache",
    }
    state = {"config": config, "iteration": 9, "counters": {"num_updates": 20}}
    evals = {
        i: {"pass@1": 0.1 * (i + 2), "pass@1_low": 0.05, "pass@1_high": 0.2, "tasks": 5.0, "replicates": 2.0}
        for i in (-1, 9, 19)
    }
    run = Run(Path("run"), train={}, evals=evals)
    card = model_card("m", state=state, run=run, base="some/base", is_adapter=False, versions=["torch 2"])
    for part in ("base_model: some/base\n", "10 iterations, 20 updates", "path: openai/gsm8k", "api_key: '***'"):
        assert part in card
    assert "| pass@1 | 0.100 [0.050, 0.200] | 1.100 [0.050, 0.200] |" in card
    assert "somebody" not in card
    for base in ("/home/somebody/base", "package:p", None):
        card = model_card("m", state=state, run=None, base=base, is_adapter=False, versions=[], picture="a.png")
        assert "base_model" not in card
        assert "somebody" not in card
        assert "](a.png)" in card
    assert "not trained by it" in model_card("m", state=None, run=None, base=None, is_adapter=False, versions=[])
