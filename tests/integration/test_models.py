"""Whole runs, sampled in process, of architectures that are not plain transformers;
tests/unit/model/test_architectures.py has more.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from architectures import ODD, ZOO, save_composite
from factories import CONF, compose_config
from runs import SMALL, metrics_of, printed, run_in_child

from offline_grpo import evaluate
from offline_grpo.errors import ConfigError
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.run import train


def train_named(name: str, tmp_path: Path, *, max_new_tokens: int = 6) -> None:
    """Two iterations, in the folder `run`."""
    tokenizer = build_char_tokenizer(128)
    (ODD | ZOO)[name].build(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    overrides = [o for o in SMALL if not o.startswith("model.tiny")]
    run = (
        *("model=hf", f"model.train_id={tmp_path}/model", "train.iterations=2"),
        *(f"generation.max_new_tokens={max_new_tokens}", "eval.enabled=false"),
    )
    train(
        compose_config(*overrides, *run, f"cache_dir={tmp_path}/cache", "train.gradient_checkpointing=true"),
        tmp_path / "run",
    )


@pytest.mark.parametrize(
    "name", ["gemma4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2", "llama4"))]
)
def test_it_trains_on_what_it_samples(name: str, tmp_path: Path) -> None:
    train_named(name, tmp_path)
    for iteration in range(2):
        found = metrics_of(tmp_path / "run")[f"train_iter_{iteration:03d}.json"]
        assert found["alignment/diff_abs_mean"] < 1e-4
        assert found["num_updates"] == 2


@pytest.mark.parametrize("name", ["doge", "zamba2"])
def test_it_is_refused_before_the_first_iteration(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.train_id=.*ForCausalLM (is not causal|is sampled in process)"):
        train_named(name, tmp_path, max_new_tokens=20)
    assert not list(tmp_path.glob("run/metrics/*"))


PRESETS = {
    "qwen2_5_0_5b": "qwen2",
    "qwen3_0_6b": "qwen3",
    "qwen3_5": "qwen3_5",
    "llama3_2_1b": "llama",
    "gemma3_1b": "gemma3",
    "gemma3_4b": "gemma3",
    "smollm3": "smollm3",
    "mistral": "mistral_window",
}
"""Preset -> its architecture in the zoo, or among composites."""
OF_OTHER_SIZE = {
    "qwen2_5_1_5b": "qwen2_5_0_5b",
    "qwen3_1_7b": "qwen3_0_6b",
    "qwen3_4b": "qwen3_0_6b",
    "qwen3_8b": "qwen3_0_6b",
    "llama3_2_3b": "llama3_2_1b",
}
ARE_COMPOSITES = {"qwen3_5", "gemma3_4b"}
QUICK = {"qwen2_5_0_5b", "qwen3_5"}


def test_every_preset_is_trained_here_or_differs_in_the_model_alone() -> None:
    presets = {path.stem: yaml.safe_load(path.read_text()) for path in (CONF / "model").glob("*.yaml")}
    of_packages = {"smollm2_135m"}  # trained as it is: tests/contract/test_smollm2.py
    assert presets.keys() == {*PRESETS, *OF_OTHER_SIZE, *of_packages, "hf", "tiny", "tiny_moe", "tiny_vl"}
    for preset, other in OF_OTHER_SIZE.items():
        own = {key: presets[preset][key] for key in ("train_id", "defaults")}  # the largest offloads
        assert presets[preset] == {**presets[other], **own}


@pytest.mark.parametrize("preset", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PRESETS])
def test_a_preset_trains_its_architecture(preset: str, tmp_path: Path) -> None:
    tokenizer = build_char_tokenizer(128)
    thinks = "{{ '' if enable_thinking else '=' }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{thinks}"
    if preset in ARE_COMPOSITES:
        save_composite(PRESETS[preset], tmp_path / "model", text={"vocab_size": len(tokenizer)})
    else:
        ZOO[PRESETS[preset]].build(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    small = ("train.iterations=1", "data.problems_per_iteration=2", "data.num_train_seeds=8", "eval.enabled=false")
    small += ("generation.max_new_tokens=6", "train.drop_zero_signal_groups=false", "model.device=cpu")
    cfg = compose_config(f"model={preset}", f"model.train_id={tmp_path}/model", f"cache_dir={tmp_path}/cache", *small)
    assert (cfg.train.lr, cfg.train.precision) == (1e-6, "bf16") or "qwen2_5" in preset
    train(cfg, tmp_path / "run")
    found = metrics_of(tmp_path / "run")["train_iter_000.json"]
    assert found["num_updates"] == 1
    assert found["alignment/diff_abs_mean"] < 0.05  # in bf16


def test_prompts_that_the_tokenizer_cannot_read_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = (
        *(*SMALL, "train.iterations=1", "eval.enabled=false", "model.tiny.warm_start_steps=1"),
        f"cache_dir={tmp_path}/cache",
    )
    train(compose_config(*run, "data.num_train_seeds=20", 'task.prompt_template="¿{a}{op}{b}?"'), tmp_path / "run")
    [told] = [line for line in "".join(capsys.readouterr()).splitlines() if "lacks characters" in line]
    assert re.search(r"lacks characters of 20 prompts, such as '¿\d+.\d+\?'; use another model$", told)


@pytest.mark.parametrize(("name", "option"), [("qwen3_5", "train.kl_coef=0.1"), ("gemma3", "model/lora=default")])
@pytest.mark.slow
def test_a_composite_is_resumed_and_evaluated_as_it_was_trained(name: str, option: str, tmp_path: Path) -> None:
    tokenizer = build_char_tokenizer(128)
    source = save_composite(name, tmp_path / "model", text={"vocab_size": len(tokenizer)})
    overrides = [o for o in SMALL if not o.startswith("model.tiny")]
    words = [*overrides, "model=hf", f"model.train_id={source}", option, "train.iterations=2", "train.lr=1e-3"]
    words += ["generation.max_new_tokens=6", "checkpoint.save_interval=1", "train.entropy_coef=0.01"]
    assert run_in_child(tmp_path / "run", *words) == 0, printed(tmp_path / "run")
    again = tmp_path / "again"
    assert run_in_child(again, *words, f"resume={tmp_path}/run/checkpoints/iter_000") == 0, printed(again)
    last = "train_iter_001.json"
    assert metrics_of(again)[last] == metrics_of(tmp_path / "run")[last]
    assert metrics_of(again)[last]["alignment/diff_abs_mean"] < 1e-4
    asked = ("eval.num", "eval.r", "eval.k", "eval.b", "generation.", "task.", "data.num")
    settings = [word for word in words if word.startswith(asked)]
    evaluate.run([str(source), str(again / "checkpoints" / "iter_001"), *settings, f"--out={tmp_path}/out"])
    before, after = json.loads((tmp_path / "out" / "results.json").read_text())["metrics"]
    expected = metrics_of(tmp_path / "run")["eval_init.json"]
    assert {key: before[key] for key in expected} == expected
    assert after["tasks"] == expected["tasks"]
