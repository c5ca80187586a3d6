"""Architectures whose weights vLLM keeps in another way than the checkpoint: what can be compared of them is found
equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import LATENT, WITH_EXPERTS, ZOO, Architecture
from engines import CPU, LORA_ARGS, deploy, distance, load, make_client, make_server, preloaded_python, sample, train
from factories import make_policy, strategy
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from offline_grpo.checkpoint.pretrained import find_model
from offline_grpo.commands.evaluation import check_served_model
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.model.tiny import build_char_tokenizer

pytestmark = pytest.mark.slow  # a start of a server each

LINEAR = {
    "hidden_size": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""Sizes that vLLM's kernels on CPUs take."""
FAMILIES = {
    **ZOO,
    "olmoe": Architecture.of("olmoe", **ZOO["qwen3_moe"].settings),
    "glm4_moe": Architecture.of("glm4_moe", **ZOO["deepseek_v3"].settings),
}


@contextmanager
def served(
    name: str, folder: Path, *, dtype: torch.dtype = torch.float32, args: Any = None, **sizes: Any
) -> Iterator[VllmEngine]:
    """A server of a new model, saved in `folder`, as somebody sees it who found it."""
    model: Any = FAMILIES[name].build(**sizes).to(dtype)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):  # zeros in a new model
            buffer.normal_()
    model.save_pretrained(str(folder))
    build_char_tokenizer(128).save_pretrained(str(folder))
    server = make_server(replace(CPU, dtype=dtype), folder.parent, args=args, python=preloaded_python(folder.parent))
    try:
        server.start(str(folder), {})
        yield make_client(server)
    finally:
        server.stop()


def test_matrices_that_vllm_transposes(tmp_path: Path) -> None:
    """GPT-2's, some of them square."""
    with served("gpt2", tmp_path / "model", args={"max_model_len": 64}) as client:
        check_served_model(find_model(str(tmp_path / "model")), client)
        other = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"), dtype=torch.float32)
        other.transformer.h[1].attn.c_proj.weight.data[3, 4] += 0.01
        other.save_pretrained(str(tmp_path / "model"))
        with pytest.raises(ConfigError, match=r"1 of 28 tensors differ, transformer.h.1.attn.c_proj.weight"):
            check_served_model(find_model(str(tmp_path / "model")), client)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""Of the published DeepSeek-V3. Without it an eager CPU build rotates wrong numbers: its kernel takes the stride of
heads for that of tokens."""


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_loaded_again(name: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """vLLM packs them. What it cannot load again, or keeps in tensors of other names, is refused."""
    sizes = {**WITH_EXPERTS, **({**LATENT, "rope_parameters": YARN} if name == "deepseek_v3" else {})}
    fault = "derives tensors from the weights" if name == "deepseek_v3" else "has no such tensor"
    with served(name, tmp_path / "model", **sizes) as client:
        with (
            subtests.test("shared_vllm"),
            pytest.raises(ConfigError, match=f"the server {fault}"),
        ):
            policy = load(tmp_path / "model", CPU, shared=True)
            deploy(strategy("shared_vllm"), client).connect(policy)
        policy = load(tmp_path / "model", CPU)
        deployment = deploy(strategy("reload"), client)
        deployment.connect(policy)
        policy.make_masters()
        for version in range(2):
            is_left = name == "gpt_oss" and version == 1
            with pytest.raises(EngineError, match="stale weights") if is_left else nullcontext():
                deployment.push(policy, version=version)
                assert distance(policy, sample(client)) < CPU.tolerance_nats
            train(policy, seed=version)


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        ("qwen3_5", torch.float32, {**LINEAR, "head_dim": 32}),  # a fused tensor of other parts than its names say
        ("qwen3_next", torch.bfloat16, {}),  # decays in fp32 beside weights in bf16
    ],
)
def test_a_base_model_of_adapters(
    name: str, dtype: torch.dtype, sizes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(name, tmp_path / "model", dtype=dtype, args=LORA_ARGS, **sizes) as client, caplog.at_level("INFO"):
        model: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"), dtype=dtype)
        adapted: Any = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
        deploy(strategy("lora_hotswap"), client).connect(make_policy(adapted, build_char_tokenizer(128)))
    assert "[OK] base model: " in caplog.text
