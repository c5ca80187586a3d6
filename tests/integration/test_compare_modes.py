"""`python -m offline_grpo.compare` with real runs: beside real vLLM servers on the CPU, and killed in the middle."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from engines import preloaded_python, processes_naming, save_model
from served_runs import five, own_server

from offline_grpo import compare
from offline_grpo.report.comparison import DONE

TESTS = Path(__file__).parents[1]


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
    monkeypatch.setenv("PYTHONPATH", str(TESTS))  # the runs' task is there
    out = tmp_path / "out"
    compare.run(["steps=3", "modes=shared_vllm,lora_hotswap", f"out={out}", *words(tmp_path)])
    printed = capsys.readouterr().out
    modes = json.loads((out / "comparison.json").read_text())["modes"]
    rows = {line[:23].strip(): line[23:].split() for line in printed.splitlines()}
    for place, name in enumerate(("shared_vllm", "lora_hotswap")):
        steps = [json.loads(path.read_text()) for path in sorted((out / name / "metrics").glob("train_*.json"))]
        assert len(steps) == 3
        total_s = sum(step["time/iteration_s"] for step in steps)
        tokens = sum(step["num_completion_tokens"] for step in steps)
        assert modes[name]["status"] == DONE
        assert modes[name]["seconds"] == pytest.approx(total_s)
        assert modes[name]["sync_s"] == pytest.approx(sum(step["time/sync_s"] for step in steps))
        assert modes[name]["tokens_per_s"] == pytest.approx(tokens / total_s)
        assert modes[name]["num_syncs"] == 3
        assert rows["tokens sampled"][place] == f"{tokens:,.0f}"
        assert rows["seconds per step"][place] == f"{total_s / 3:,.2f}"
        assert modes[name]["reward_last"] == pytest.approx(steps[-1]["reward_mean"])
        assert rows["reward, last step"][place] == f"{modes[name]['reward_last']:.3f}"
        assert re.search(rf"SUMMARY \({name}\)\n=+\n  Total training time: +{total_s:.2f}s", printed)
    assert modes["lora_hotswap"]["checkpoint_mb"] < modes["shared_vllm"]["checkpoint_mb"]
    first = [json.loads((out / name / "metrics" / "train_iter_000.json").read_text())["reward_mean"] for name in modes]
    assert first[0] == first[1], "the same model, problems and seeds"
    assert (out / "shared_vllm" / "vllm_bridge_config.json").exists()
    assert processes_naming(str(tmp_path)) == []
