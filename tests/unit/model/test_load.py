"""What is decided about a model before its weights are used: attention kernels, and how long its sequences may be."""

import json
import os
from pathlib import Path

import pytest
import torch
from architectures import ZOO
from factories import make_rollout
from safetensors.torch import save_file
from transformers import AutoConfig

from offline_grpo.errors import ConfigError
from offline_grpo.model.char_tokenizer import build_char_tokenizer
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.load import (
    attention_of,
    check_weights,
    context_length,
    load_causal_lm,
    load_policy,
    load_tokenizer,
    read_model_config,
)
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import Scoring
from offline_grpo.settings import ModelConfig
from offline_grpo.train.batch import build_batch

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def test_auto_leaves_sdpa_where_it_would_drop_a_softcap():
    assert attention_of(ZOO["gemma2"].config, "auto") == "eager"
    assert attention_of(ZOO["llama"].config, "auto") is None
    assert attention_of(ZOO["llama"].config, "sdpa") == "sdpa"
    with pytest.raises(
        ConfigError,
        match=r"model.attn_implementation=sdpa: leaves out the model's attn_logit_softcapping=5.0; use auto",
    ):
        attention_of(ZOO["gemma2"].config, "sdpa")


def test_sdpa_does_drop_it():
    """The reason for the refusal above. If this fails, transformers' sdpa has learnt it."""
    ids = torch.arange(3, 15)[None]
    eager = ZOO["gemma2"].build()
    sdpa = ZOO["gemma2"].build()
    sdpa.set_attn_implementation("sdpa")
    assert not torch.allclose(eager(ids).logits, sdpa(ids).logits, atol=1e-3)


def load(folder: Path, *, attention: str = "auto", precision: str = "fp32") -> Policy:
    return load_policy(
        ModelConfig(str(folder), None, "cpu", attention, "auto", None, "auto", None, trust_remote_code=False),
        str(folder),
        layout=None,
        head=TiledHead(tile_width=None),
        device=torch.device("cpu"),
        precision=precision,
        train_layer_indices=None,
        gradient_checkpointing=False,
        checkpoint=None,
    )


def test_a_model_without_sdpa_is_told_what_to_use(tmp_path: Path):
    ZOO["gpt_oss"].build().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model.attn_implementation=sdpa: .*; use auto or eager$"):
        load(tmp_path, attention="sdpa")


def test_a_model_that_does_not_run_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ZOO["llama"].build().save_pretrained(tmp_path)

    def without_kernel(*_, **__):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", without_kernel)
    message = r"LlamaForCausalLM does not run in bfloat16 on cpu \(RuntimeError: no kernel image is available\); try another train.prec"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, precision="bf16")


@pytest.mark.parametrize("name", ["falcon", "bloom", "opt", "gemma2", "granite"])
def test_it_loads_and_scores_as_it_was_saved(name: str, tmp_path: Path):
    model = ZOO[name].build()
    model.save_pretrained(tmp_path)
    build_char_tokenizer(64).save_pretrained(tmp_path)
    policy = load(tmp_path)
    scoring = Scoring(model, policy.scoring.layout, policy.scoring.head, logits=policy.scoring.logits)
    batch = build_batch([make_rollout([5, 6, 7], [8, 9, 10]), make_rollout([5, 6, 7], [11])], mask_truncated=False)
    assert torch.equal(policy.logprobs(batch), scoring.logprobs(batch))


@pytest.mark.parametrize(
    ("name", "rope", "expected"),
    [
        ("llama", {"rope_type": "default"}, 512),
        ("llama", {"rope_type": "linear", "factor": 4.0}, 512),
        ("llama", {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}, 128),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            },
            64,
        ),
    ],
)
def test_angles_that_depend_on_the_batch_limit_its_length(name, rope, expected):
    length = {key: value for key, value in rope.items() if key == "original_max_position_embeddings" and name == "phi3"}
    settings = {**ZOO[name].settings, **length, "rope_parameters": {"rope_theta": 10000.0, **rope}}
    assert context_length(AutoConfig.for_model(name, **settings)) == expected


def test_damaged_weights_are_named_by_their_file(tmp_path):
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "model-00002-of-00002.safetensors"
    save_file({"weight": torch.zeros(9)}, whole)
    check_weights(tmp_path, "fix it")
    cut.write_bytes(whole.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=rf"^{cut}: is damaged \(.*\); fix it$"):
        check_weights(tmp_path, "fix it")
    check_weights("some/hub-id", "fix it")


def test_a_folder_without_tokenizer_files_is_told_what_to_copy(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(vocab_size=50).save_pretrained(tmp_path)  # of which transformers makes a tokenizer without a vocabulary
    with pytest.raises(ConfigError, match=r"model.train_id=.*: has no tokenizer; copy the tokenizer files"):
        load_tokenizer(str(tmp_path))


def test_a_model_without_chat_template_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from factories import compose_config
    from transformers import GPT2Config

    from offline_grpo.model.char_tokenizer import build_char_tokenizer
    from offline_grpo.run.assemble import _check_model
    from offline_grpo.run.config import typed
    from offline_grpo.run.plan import make_plan

    GPT2Config(vocab_size=200).save_pretrained(tmp_path)
    tokenizer = build_char_tokenizer(1024)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    plan = make_plan(typed(compose_config("model=hf", f"model.train_id={tmp_path}")))
    _check_model(plan, str(tmp_path))
    assert "has no chat template" in caplog.text
    caplog.clear()
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    _check_model(plan, str(tmp_path))
    assert not caplog.text


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 3, "n_layer": 3}, "has no weights for .*, which transformers would draw at random"),
        ({"num_hidden_layers": 10**7, "n_layer": 10**7}, "config.json says 10000000 layers, and there are"),
        ({"model_type": "qwen2"}, "has no weights for|config.json says"),
        ({"vocab_size": -1}, "cannot be loaded"),
        ({"hidden_size": "wide", "n_embd": "wide"}, "cannot be loaded"),
        ({"hidden_activation": "none", "activation_function": "none"}, "cannot be loaded"),
        (None, "cannot be loaded"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_its_weights_is_one_line(name, change, words, tmp_path):
    ZOO[name].build().save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change) if change is not None else "[" * 10**5)
    with pytest.raises(ConfigError, match=rf"model.ref_id={tmp_path}: ({words}|cannot be loaded \(.*layer)") as caught:
        load_causal_lm(str(tmp_path), "auto", torch.device("cpu"), None, key="model.ref_id")
    assert "\n" not in str(caught.value)


def test_a_pipe_in_a_model_folder_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"KEY=.*: config.json is a pipe, a device or a broken link"):
        read_model_config(str(tmp_path), "KEY")
