"""A real pretrained model beside a vLLM server on the CPU: its tokenizer, its chat template, its probabilities."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from children import draw_nothing, metrics_of
from engines import preloaded_python
from factories import compose_config
from served_runs import own_server
from transformers import AutoTokenizer

from offline_grpo.report import plots
from offline_grpo.run import app

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SMALL = (
    *("train.iterations=2", "data.problems_per_iteration=2", "data.rollouts_per_problem=4", "data.num_train_seeds=8"),
    *("generation.max_new_tokens=16", "train.drop_zero_signal_groups=false", "eval.enabled=false"),
    *("checkpoint.enabled=false", "model.device=cpu", "num_threads=1", "engine.args.max_model_len=512"),
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
    words = ("experiment=ifeval_smollm2", *own, f"weight_sync={sync}", *adapted, *SMALL, f"cache_dir={cache}")
    app.run(compose_config(*words), tmp_path / "run")
    found = [metrics_of(tmp_path / "run")[f"train_iter_{i:03d}.json"] for i in range(2)]
    assert [each["sync/version"] for each in found] == [1, 2]
    assert max(each["grad_norm"] for each in found) > 0
    assert 0 < max(each["alignment/diff_abs_mean"] for each in found) < 1e-4
    [folder] = cache.iterdir()
    rows = pq.read_table(tmp_path / "run" / "rollouts" / "iter_001.parquet").to_pylist()
    assert len(rows) == 8
    assert all(AutoTokenizer.from_pretrained(folder).decode(row["prompt_ids"]).startswith(SYSTEM) for row in rows)
