"""A real pretrained model beside a vLLM server on the CPU: its tokenizer, its chat template, its probabilities."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from engines import preloaded_python
from factories import compose_config
from runs import draw_nothing, metrics_of, own_server
from transformers import AutoTokenizer

from offline_grpo.report import plots
from offline_grpo.run import train
from offline_grpo.weight_sync import proof

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SMALL = (
    *("train.iterations=1", "data.problems_per_iteration=1", "data.rollouts_per_problem=2", "data.num_train_seeds=8"),
    *("generation.max_new_tokens=8", "train.drop_zero_signal_groups=false", "eval.enabled=false"),
    *("train.kl_coef=0", "train.entropy_coef=0.1", "train.gradient_checkpointing=false"),
    *("checkpoint.enabled=false", "model.device=cpu", "num_threads=1", "engine.args.max_model_len=512"),
)


@pytest.mark.slow
def test_smollm2_is_trained_on_what_a_server_samples(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "save_report", draw_nothing)
    monkeypatch.setattr(proof, "PROBE_PROMPTS", 2)  # of 160 tokens, which take seconds
    words = ("experiment=ifeval_smollm2", *own_server(preloaded_python(tmp_path)), "weight_sync=reload", *SMALL, cache)
    train(compose_config(*words), tmp_path / "run")
    found = metrics_of(tmp_path / "run")["train_iter_000.json"]
    assert (found["sync/version"], found["grad_norm"] > 0) == (1, True)
    assert 0 < found["alignment/diff_abs_mean"] < 1e-4
    assert 0 < found["sync/probe_diff_abs_mean"] < 1e-4, "of the weights that were trained"
    [folder] = Path(cache.partition("=")[2]).glob("SmolLM2*")
    rows = pq.read_table(tmp_path / "run" / "rollouts" / "iter_000.parquet").to_pylist()
    assert len(rows) == 2
    assert all(AutoTokenizer.from_pretrained(folder).decode(row["prompt_ids"]).startswith(SYSTEM) for row in rows)
