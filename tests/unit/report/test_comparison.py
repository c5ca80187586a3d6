"""The table and the picture of modes that were compared, from metrics that tell them apart."""

import io
import json
from pathlib import Path

import pytest
import rich
from rich.console import Console

from offline_grpo.report.__main__ import main
from offline_grpo.report.sweep import MEASURES, save_comparison


def record(folder: Path, mode: str, *, steps: int = 2, sync_s: float = 8.0) -> None:
    """A run with 100 tokens a step, sampled in 2 s and trained on in 1 s; every second step pushes."""
    (folder / mode / "metrics").mkdir(parents=True)
    for i in range(steps):
        push = sync_s * (i % 2)
        step = {
            "time/generate_s": 2.0,
            "time/sampling_s": 2.0,
            "time/train_s": 1.0,
            "perf/gpu_memory_card_gb": 40.0 + i,
        }
        step |= {"time/sync_s": push, "time/sync_push_s": push, "time/iteration_s": 3 + push}
        step |= {"num_completion_tokens": 100.0, "num_tokens_trained": 80.0, "reward_mean": 0.5 + 0.125 * i}
        step |= {"time/start_s": 30.0} if i == 0 else {}
        (folder / mode / "metrics" / f"train_iter_{i:03d}.json").write_text(json.dumps(step))
    checkpoint = folder / mode / "checkpoints" / "iter_001"
    (checkpoint / "trainer").mkdir(parents=True)
    for name in ("model-1.safetensors", "model-2.safetensors", "trainer/masters.safetensors"):
        (checkpoint / name).write_bytes(b"x" * 10_000)


def test_the_report_prints_a_comparison_with_a_mode_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(rich, "get_console", lambda: Console(file=stream, width=80))
    record(tmp_path, "restart")
    failure = "failed with exit code 1; error: no room"
    save_comparison(tmp_path, {"gpu": None}, {"restart": "done", "lora_hotswap": failure})
    page = tmp_path / "page.html"
    assert main([str(tmp_path), f"--out={page}"]) == 0
    lines = stream.getvalue().splitlines()
    assert "BENCHMARK SUMMARY (restart)" in lines
    assert not any("SUMMARY (lora_hotswap)" in line for line in lines)
    assert next(line for line in lines if line.startswith("overall")).split()[-2:] == ["14", "-"]
    assert f"lora_hotswap: {failure}" in lines
    saved = json.loads((tmp_path / "comparison.json").read_text())["modes"]
    assert saved["restart"]["seconds"] == 14.0
    assert saved["lora_hotswap"] == {"status": failure} | dict.fromkeys(MEASURES)
    assert "| state | done | failed |\n" in (tmp_path / "comparison.md").read_text()
    assert lines[-1] == str(page)
    assert '{"generate":[2.0,2.0],"train":[1.0,1.0],"sync":[0.0,8.0]}' in page.read_text()

    (tmp_path / "restart" / ".hydra").mkdir()
    strategy = "offline_grpo.weight_sync.restart.Restart"
    (tmp_path / "restart" / ".hydra" / "config.yaml").write_text(f"weight_sync: {{_target_: {strategy}}}")
    stream.truncate(0)
    assert main([str(tmp_path / "restart"), "--benchmark"]) == 0
    assert "Total training time:     14.00s (0.23 min)" in stream.getvalue()
    assert not (tmp_path / "restart" / "report.png").exists()
