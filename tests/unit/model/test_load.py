"""What is decided about a model before its weights are used: attention kernels, and how long its sequences may be."""

from pathlib import Path

import pytest
import torch
from architectures import ZOO
from transformers import AutoConfig

from offline_grpo.errors import ConfigError
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.load import attention_of, context_length, load_policy
from offline_grpo.settings import ModelConfig

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


def test_auto_leaves_sdpa_where_it_would_drop_a_softcap():
    assert attention_of(ZOO["gemma2"].config, "auto") == "eager"
    assert attention_of(ZOO["llama"].config, "auto") is None
    assert attention_of(ZOO["llama"].config, "sdpa") == "sdpa"
    with pytest.raises(ConfigError, match=r"model.attn_implementation=sdpa: leaves out the model's attn_logit_softcapping=5.0; use auto"):
        attention_of(ZOO["gemma2"].config, "sdpa")


def test_sdpa_does_drop_it():
    """The reason for the refusal above. If this fails, transformers' sdpa has learnt it."""
    ids = torch.arange(3, 15)[None]
    eager = ZOO["gemma2"].build()
    sdpa = ZOO["gemma2"].build()
    sdpa.set_attn_implementation("sdpa")
    assert not torch.allclose(eager(ids).logits, sdpa(ids).logits, atol=1e-3)


def test_a_model_without_sdpa_is_told_what_to_use(tmp_path: Path):
    ZOO["gpt_oss"].build().save_pretrained(tmp_path)
    config = ModelConfig(str(tmp_path), None, "cpu", "sdpa", "auto", None, None)
    with pytest.raises(ConfigError, match=r"model.attn_implementation=sdpa: .*; use auto or eager$"):
        load_policy(
            config,
            str(tmp_path),
            layout=None,
            head=TiledHead(tile_width=None),
            device=torch.device("cpu"),
            precision="fp32",
            train_layer_indices=None,
            gradient_checkpointing=False,
            checkpoint=None,
        )


@pytest.mark.parametrize(
    ("name", "rope", "expected"),
    [
        ("llama", {"rope_type": "default"}, 512),
        ("llama", {"rope_type": "linear", "factor": 4.0}, 512),
        ("llama", {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128}, 128),
        (
            "phi3",
            {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
            64,
        ),
    ],
)
def test_angles_that_depend_on_the_batch_limit_its_length(name, rope, expected):
    length = {key: value for key, value in rope.items() if key == "original_max_position_embeddings" and name == "phi3"}
    settings = {**ZOO[name].settings, **length, "rope_parameters": {"rope_theta": 10000.0, **rope}}
    assert context_length(AutoConfig.for_model(name, **settings)) == expected
