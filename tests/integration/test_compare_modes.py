"""`python -m offline_grpo.compare` with real runs: beside real vLLM servers on the CPU, and killed in the middle."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from engines import preloaded_python, processes_naming, save_model
from runs import five, own_server

from offline_grpo import compare
from offline_grpo.report.sweep import DONE

FAKES = Path(__file__).parents[1] / "fakes"


def words(folder: Path) -> list[str]:
    """Overrides of small runs, but for those that the comparison sets."""
    own = ("train.iterations=", "eval.", "checkpoint.", "generation=")
    return [
        word
        for word in (*five(save_model(folder / "model")), *own_server(preloaded_python(folder)))
        if not word.startswith(own)
    ]


@pytest.mark.slow
def test_the_table_says_what_the_metrics_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKES))  # the runs' task is there
    out = tmp_path / "out"
    compare.run(["steps=2", "modes=shared_vllm", f"out={out}", *words(tmp_path)])
    printed = capsys.readouterr().out
    found = json.loads((out / "comparison.json").read_text())["modes"]["shared_vllm"]
    rows = {line[:23].strip(): line[23:].split() for line in printed.splitlines()}
    steps = [json.loads(path.read_text()) for path in sorted((out / "shared_vllm" / "metrics").glob("train_*.json"))]
    assert len(steps) == 2
    total_s = sum(step["time/iteration_s"] for step in steps)
    tokens = sum(step["num_completion_tokens"] for step in steps)
    assert found["status"] == DONE
    assert found["seconds"] == pytest.approx(total_s)
    assert found["sync_s"] == pytest.approx(sum(step["time/sync_s"] for step in steps))
    assert found["tokens_per_s"] == pytest.approx(tokens / total_s)
    assert found["num_syncs"] == 2
    assert found["reward_last"] == pytest.approx(steps[-1]["reward_mean"])
    assert rows["tokens sampled"] == [f"{tokens:,.0f}"]
    assert rows["seconds per step"] == [f"{total_s / 2:,.2f}"]
    assert rows["reward, last step"] == [f"{found['reward_last']:.3f}"]
    assert re.search(rf"SUMMARY \(shared_vllm\)\n=+\n  Total training time: +{total_s:.2f}s", printed)
    for link in ("vllm_{}.log", "checkpoints_{}", "vllm_bridge_config_{}.json"):
        assert (out / link.format("shared_vllm")).exists()
    assert (out / "pids.txt").read_text().startswith("shared_vllm ")
    assert processes_naming(str(tmp_path)) == []
