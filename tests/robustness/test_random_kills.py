"""SIGKILL at a random moment of a run, then the same command with `resume=auto`: nothing is lost, to the bit."""

import random
import signal
import time
from pathlib import Path

import pytest
from runs import SMALL, metrics_of, printed, run_in_child, start_in_child, weights_of
from worlds import write_sums

WORDS = (*SMALL, "checkpoint.save_interval=1", "checkpoint.keep_last_k=2", "checkpoint.keep_best=pass@1")
PLAYED = (
    *(word for word in WORDS if not word.startswith(("task.", "data.num_train_seeds"))),
    *("task=environment", "task.environment=worlds:Sums", "task.max_environment_tokens=40"),
    *("generation.max_new_tokens=18", "eval.max_new_tokens=18", "task.max_turn_tokens=6"),
    "model.tiny.warm_start_batch_size=32",
)
QUICK, ALL = 1, 2


@pytest.fixture(scope="module", params=["answered", pytest.param("played", marks=pytest.mark.slow)])
def undisturbed(request, cache, tmp_path_factory):
    """The folder of a run that nobody killed, how long it took when it found the tiny model built, and what it was
    given.
    """
    words = WORDS
    if request.param == "played":
        path = tmp_path_factory.mktemp("rows") / "sums.jsonl"
        write_sums(path)
        words = (*PLAYED, f"task.path={path}")
    day = tmp_path_factory.mktemp("undisturbed") / "outputs" / "2026-01-01"
    assert run_in_child(day / "first", cache, *words, "train.iterations=1") == 0, printed(day / "first")
    started = time.monotonic()
    assert run_in_child(day / "run", cache, *words) == 0, printed(day / "run")
    return day / "run", time.monotonic() - started, words


def content(run: Path) -> tuple:
    """What two runs of one configuration have in common."""
    kept = {path.name: path.read_bytes() for folder in ("samples", "rollouts") for path in (run / folder).iterdir()}
    hidden = [str(path.relative_to(run)) for path in run.rglob(".*")]
    rest = {path.name for path in run.iterdir()}
    return metrics_of(run), weights_of(run), kept, hidden, rest, (run / "checkpoints" / "best").readlink()


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= QUICK else []) for seed in range(ALL)]
)
def test_killed_at_a_random_moment_and_resumed(seed, undisturbed, cache, tmp_path):
    expected, duration_s, words = undisturbed
    day = tmp_path / "outputs" / "2026-01-01"
    killed, fresh = day / "00-00-00-000000", day / "00-01-00-000000"
    process = start_in_child(killed, cache, *words)
    process.join(random.Random(seed).uniform(0, 1.1 * duration_s))
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0), printed(killed)
    assert run_in_child(fresh, cache, "resume=auto", *words) == 0, printed(fresh)
    assert content(fresh if fresh.exists() else killed) == content(expected)
