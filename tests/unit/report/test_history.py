import json
import math
from pathlib import Path

import pytest

from offline_grpo.errors import GrpoError
from offline_grpo.report.history import load_history


def write(run_dir: Path, files: dict[str, dict[str, float]]) -> None:
    (run_dir / "metrics").mkdir()
    for name, metrics in files.items():
        (run_dir / "metrics" / f"{name}.json").write_text(json.dumps(metrics))


def test_gaps_and_rare_evaluations_keep_their_place(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "train_iter_000": {"reward_mean": 0.0, "time/generate_s": 2.0},
            "train_iter_002": {"reward_mean": 0.2, "time/generate_s": 3.0, "time/eval_s": 1.0},
            "train_iter_1000": {"loss_total": 1.0},
            "eval_init": {"pass@1": 0.1, "pass@1_low": 0.0, "pass@16": 0.3, "pass_ordered@4": 0.1},
            "eval_iter_002": {"pass@1": 0.5, "pass@2": 0.6},
        },
    )
    (tmp_path / "metrics" / "train_iter_003.json.tmp").write_text("{")
    history = load_history(tmp_path)
    reward, passed = history.series("train", "reward_mean"), history.series("eval", "pass@1")
    assert (reward.steps.tolist(), reward.values.tolist()) == ([0, 2], [0.0, 0.2])
    assert (passed.steps.tolist(), passed.values.tolist()) == ([0, 3], [0.1, 0.5]), (
        "before training, and after iterations 0, 1 and 2"
    )
    assert list(history.train) == [0, 2, 1000]
    assert history.eval_ks() == [1, 2, 16]
    assert len(history.series("train", "no such metric")) == 0
    steps, seconds = history.phase_seconds()
    assert steps.tolist() == [0, 2, 1000]
    assert {phase: values.tolist() for phase, values in seconds.items()} == {"generate": [2, 3, 0], "eval": [0, 1, 0]}
    assert history.size == "3 training iterations, 2 evaluations"


def test_a_run_without_metrics_is_empty(tmp_path: Path) -> None:
    history = load_history(tmp_path)
    assert (dict(history.train), dict(history.evals)) == ({}, {})


@pytest.mark.parametrize(
    "content", ["{", "[1]", "", "[" * 100_000, '{"a": null}', '{"a": "1"}', '{"a": 1' + "0" * 400 + "}"]
)
def test_a_broken_record_is_named(tmp_path: Path, content: str) -> None:
    write(tmp_path, {})
    (tmp_path / "metrics" / "train_iter_000.json").write_text(content)
    with pytest.raises(GrpoError, match=r"train_iter_000\.json"):
        load_history(tmp_path)


def test_a_record_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics" / "train_iter_000.json").mkdir(parents=True)
    with pytest.raises(GrpoError, match=r"train_iter_000\.json: cannot be read \(Is a directory\)"):
        load_history(tmp_path)


def test_what_is_not_finite_is_never_best_and_a_metric_that_is_finite_nowhere_is_none(tmp_path: Path) -> None:
    lost = {"pass@1": math.nan, "pass@4": math.nan}
    write(
        tmp_path,
        {
            "eval_init": {"pass@1": 0.5, "pass@4": math.inf},
            "eval_iter_000": lost,
            "eval_iter_001": {"pass@1": math.inf},
        },
    )
    history = load_history(tmp_path)
    assert history.eval_ks() == [1]
    assert (len(history.series("eval", "pass@1")), history.series("eval", "pass@1").best()) == (3, 0)
    assert history.series("eval", "pass@4").best() is None
