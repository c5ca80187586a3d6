"""What is decided about a model before its weights are used: attention kernels, how long its sequences may be, and what
it does to its logits.
"""

import json
from pathlib import Path

import pytest
import torch
from architectures import ZOO
from engines import CPU, full_weights
from factories import make_policy, make_qwen2, make_rollout
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from offline_grpo.errors import ConfigError
from offline_grpo.model.layers import parse_layer_indices
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.load import (
    attention_of,
    context_length,
    load_causal_lm,
    load_policy,
    load_tokenizer,
    prepare,
)
from offline_grpo.model.policy import Policy, save_policy
from offline_grpo.model.scoring import LogitTransform, Scoring, measure_logit_transform
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.settings import ModelConfig
from offline_grpo.train.batch import build_batch


def test_auto_leaves_sdpa_where_it_would_drop_a_softcap():
    assert attention_of(ZOO["gemma2"].config, "auto") == "eager"
    assert attention_of(ZOO["llama"].config, "auto") is None
    assert attention_of(ZOO["llama"].config, "sdpa") == "sdpa"
    with pytest.raises(ConfigError, match=r"^model.attn_implementation=sdpa: .*attn_logit_softcapping=5.0"):
        attention_of(ZOO["gemma2"].config, "sdpa")


MODEL = ModelConfig("x", None, "cpu", "auto", "auto", None, "auto", None, trust_remote_code=False)


def load(folder: Path) -> Policy:
    return load_policy(
        MODEL,
        str(folder),
        layout=None,
        head=TiledHead(tile_width=None),
        device=torch.device("cpu"),
        precision="fp32",
        train_layer_indices=None,
        gradient_checkpointing=False,
        checkpoint=None,
    )


def test_it_loads_and_scores_as_it_was_saved(tmp_path: Path):
    """A model that divides its logits by 7."""
    model = ZOO["granite"].build(logits_scaling=7.0)
    model.save_pretrained(tmp_path)
    build_char_tokenizer(64).save_pretrained(tmp_path)
    policy = load(tmp_path)
    scoring = Scoring(model, policy.scoring.layout, policy.scoring.head, logits=measure_logit_transform(model))
    batch = build_batch([make_rollout([5, 6, 7], [8, 9, 10]), make_rollout([5, 6, 7], [11])])
    assert torch.equal(policy.logprobs(batch), scoring.logprobs(batch))


@pytest.mark.parametrize(
    ("name", "rope", "expected"),
    [
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


def test_a_model_that_says_minus_one_has_no_limit():
    assert context_length(AutoConfig.for_model("xlnet")) is None


def refuse_of_folder(folder: Path, told: str, **key: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_causal_lm(str(folder), "auto", torch.device("cpu"), None, **key)


def test_a_folder_that_is_no_whole_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    refuse_of_folder(tmp_path, "; give the folder of a whole model")
    file.write_text('{"model_type": "new_vl"}')
    refuse_of_folder(tmp_path, r"type `new_vl` .*; choose another model, or a version of transformers that")

    # Weights that are not there are not drawn at random; transformers makes a tokenizer without a vocabulary.
    ZOO["gpt2"].build().save_pretrained(str(tmp_path))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_layer": 3}))
    refuse_of_folder(tmp_path, r"model.ref_id=.*: has no weights for .*which would be random", key="model.ref_id")
    with pytest.raises(ConfigError, match=r"model.train_id=.*: has no tokenizer.*; copy the tokenizer files"):
        load_tokenizer(str(tmp_path))

    # Nor are weights left out that the configuration does not provide for.
    make_qwen2().save_pretrained(tmp_path)
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False}
    file.write_text(json.dumps(json.loads(file.read_text()) | llama))
    bias = "model.layers.0.self_attn.k_proj.bias"
    refuse_of_folder(tmp_path, rf"^model.train_id={tmp_path}: has weights that its config.json does .* {bias};")


def test_ranges_and_lists_of_blocks() -> None:
    model = ZOO["llama"].build(num_hidden_layers=6)
    assert parse_layer_indices("0-2, 5,1", model, key="k") == [0, 1, 2, 5]
    for text in ("6", "3-1", "a", ""):
        with pytest.raises(ConfigError, match=r"train.train_layer_indices="):
            prepare(model, MODEL, text)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_only_the_chosen_blocks_are_trained(name: str) -> None:
    model = prepare(ZOO[name].build(), MODEL, "1")
    assert {key for key, p in model.named_parameters() if p.requires_grad} == {
        key for key, _ in model.named_parameters() if ".1." in key
    }


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5"])
def test_a_head_that_transformers_leaves_out_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    """One for several tokens (MTP), under both names that people have for it. transformers knows one of the two here,
    and has other names for its experts."""
    ZOO[name].build().save_pretrained(tmp_path / "a")
    file = "model.safetensors"
    extra = {
        f"mtp.layers.0.mlp.experts.{i}.{part}_proj.weight": torch.randn(3, 4) for i in (0, 1) for part in ("gate", "up")
    }
    extra |= {"mtp.fc.weight": torch.randn(3).bfloat16(), "model.layers.9.eh_proj.weight": torch.randn(3)}
    save_file(extra | load_file(tmp_path / "a" / file), tmp_path / "a" / file, metadata={"format": "pt"})
    for folder, copy in (("a", "b"), ("b", "c")):
        model = load_causal_lm(str(tmp_path / folder), "auto", CPU.device, None)
        policy = make_policy(model, build_char_tokenizer(64))
        save_policy(policy, full_weights(policy), tmp_path / copy)
    saved = load_file(tmp_path / "c" / file)
    torch.testing.assert_close(saved, load_file(tmp_path / "a" / file), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama", {}, LogitTransform()),
        ("granite", {"logits_scaling": 7.0}, LogitTransform(1 / 7, None)),
        # smaller than any logit's rounding
        ("gemma3_capped", {"final_logit_softcapping": 0.01}, LogitTransform(1.0, 0.01)),
        ("minicpm3", {}, LogitTransform(0.125, None)),  # divides what goes into the head
    ],
)
def test_factor_and_cap_are_measured(name, changes, expected, dtype):
    found = measure_logit_transform(ZOO[name].build(**changes).to(dtype))
    assert found.scale == pytest.approx(expected.scale, rel=1e-6)
    assert found.softcap == (None if expected.softcap is None else pytest.approx(expected.softcap, rel=1e-5))


@pytest.mark.parametrize("bend", [lambda z: z + 0.01 * z.clamp(min=5), lambda z: -z])
def test_anything_else_is_refused(bend):
    model = ZOO["llama"].build()

    def bent(module, args, output):
        output.logits = bend(output.logits)
        return output

    model.register_forward_hook(bent)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM changes its hidden states or logits"):
        measure_logit_transform(model)
