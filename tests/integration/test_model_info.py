"""`python -m offline_grpo.model_info`: what it says is what a model that is really built has, and what the memory plan
of a run says.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from offline_grpo import model_info
from offline_grpo.errors import ConfigError
from offline_grpo.model_info import look_at


def saved(folder: Path, config: GPT2Config | LlamaConfig) -> str:
    """config.json alone, without weights."""
    config.save_pretrained(str(folder))
    return str(folder)


@pytest.mark.parametrize(
    ("config", "prefix"),
    [
        (
            GPT2Config(vocab_size=100, n_embd=32, n_layer=14, n_head=4, architectures=["GPT2LMHeadModel"]),
            "transformer.h.",
        ),
        (
            LlamaConfig(
                vocab_size=100,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=5,
                num_attention_heads=4,
                tie_word_embeddings=False,
            ),
            "model.layers.",
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_numbers_are_those_of_the_built_model(config: GPT2Config | LlamaConfig, prefix: str, tmp_path: Path) -> None:
    info, _ = look_at(saved(tmp_path / "model", config), trust=False)
    weights = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    blocks = [f"{prefix}{i}." for i in range(info["num_blocks"])]
    in_blocks = [sum(p.numel() for name, p in weights.items() if name.startswith(block)) for block in blocks]
    embeddings = [p for n, p in weights.items() if "embed" in n or "wte" in n or "lm_head" in n]
    assert info["num_weights"] == sum(p.numel() for p in weights.values())
    assert info["num_per_block"] == (min(in_blocks), max(in_blocks))
    assert info["num_of_embeddings"] == sum(p.numel() for p in embeddings)
    assert info["is_tied"] == config.tie_word_embeddings
    # 25 and 50% rounded up; the last 12 of enough
    expected = {14: ["10-13", "7-13", "2-13"], 5: ["3-4", "2-4"]}[info["num_blocks"]]
    overrides = [preset["override"] for preset in info["presets"]]
    assert overrides == [f"train.train_layer_indices={indices}" for indices in expected]
    assert info["presets"][0]["num_trained"] == sum(in_blocks[int(expected[0].split("-")[0]) :])
    rows = 16 * sum(sum(p.shape) for name, p in weights.items() if name.startswith(prefix) and p.dim() == 2)
    assert info["adapter_mb"] * 1e6 == pytest.approx(2 * rows)  # A and B in bf16 of every matrix of the blocks


def test_the_page_fits_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model_info.run([saved(tmp_path / "m", LlamaConfig(**sizes, num_attention_heads=4))])
    page = capsys.readouterr().out.splitlines()
    assert max(map(len, page[1:])) <= 80
    assert any(line.split()[:2] == ["full,", "AdamW"] and line.endswith("     0.92     0.92     0.92") for line in page)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MODEL=.*nobody"):
        model_info.run([str(tmp_path / "nobody")])
    (tmp_path / "sweep" / "0" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"sweep: is no model itself; name what is in it, such as .*/sweep/0$"):
        model_info.run([str(tmp_path / "sweep")])
