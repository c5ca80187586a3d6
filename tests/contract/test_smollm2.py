"""A real pretrained model beside a vLLM server on the CPU: its tokenizer, its chat template, its probabilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from children import draw_nothing, metrics_of
from engines import preloaded_python
from factories import compose_config
from served_runs import own_server

from offline_grpo.report import plots
from offline_grpo.run import app

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SMALL = (
    *("train.iterations=2", "data.problems_per_iteration=2", "data.rollouts_per_problem=4", "data.num_train_seeds=8"),
    *("generation.max_new_tokens=24", "train.drop_zero_signal_groups=false", "eval.enabled=false"),
    *("checkpoint.enabled=false", "model.device=cpu", "num_threads=1", "engine.args.max_model_len=256"),
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["reload", "lora_hotswap"])
def test_smollm2_is_trained_on_what_a_server_samples(
    sync: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "save_report", draw_nothing)
    adapted = ("model/lora=default", "train.lr=1e-3") if sync == "lora_hotswap" else ()
    own = own_server(preloaded_python(tmp_path))
    words = ("experiment=chain_sum_smollm2", *own, f"weight_sync={sync}", *adapted, *SMALL, f"cache_dir={cache}")
    app.run(compose_config(*words), tmp_path / "run")
    found = [metrics_of(tmp_path / "run")[f"train_iter_{i:03d}.json"] for i in range(2)]
    assert [each["num_updates"] for each in found] == [1, 2]
    assert found[0]["sync/version"] < found[1]["sync/version"]
    assert max(each["alignment/diff_abs_mean"] for each in found) < 1e-4
    assert max(each["alignment/diff_abs_max"] for each in found) > 0  # it was measured
    sample = json.loads((tmp_path / "run" / "samples" / "iter_001.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith(SYSTEM)
