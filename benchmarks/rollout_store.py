"""What the store of rollouts costs, how fast it is read, and what SIGKILL leaves of it.

Writing is compared with an iteration on one H100 that samples and trains as many tokens as fast as was measured there,
and with the iterations of the default job on this machine, which are about the shortest that a run can have. Reading
(every column, checksums and all checks of values) is compared with a scan by pyarrow's own scanner. Runs are killed at
random moments, and what they leave is compared with an undisturbed run's files. `write_s` are seconds of this process's
processors, because others may use the machine too.

    # five minutes; needs 1.1 GB in the temporary folder
    OMP_NUM_THREADS=1 uv run --group test python benchmarks/rollout_store.py
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.dataset
import torch
from common import Target, alternate, write_result

from offline_grpo.rollouts.store.reader import shards_of
from offline_grpo.rollouts.store.recorder import Origin, Recorder
from offline_grpo.rollouts.store.rows import groups_of
from offline_grpo.types import Completion, FinishReason, Problem, Rollout, RolloutGroup, Score

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SAMPLE_TOKENS_PER_S, TRAIN_TOKENS_PER_S = 22_400, 71_900
"""Of one H100, Qwen3-0.6B's shape: results/h100/generation.json and the README's row of train_speed.py."""
PROBLEMS, MEMBERS, PROMPT_TOKENS, COMPLETION_TOKENS, VOCAB = 32, 8, 200, 1000, 151_936
DEFAULT_ITERATIONS = 100
ORIGIN = Origin("model", "a" * 64, "b" * 64, {"key": "x" * 3000})


def make_groups() -> list[RolloutGroup]:
    """An iteration: token frequencies by Zipf's law, most logprobs near 0 and a tail, as a trained model's are."""
    draw = np.random.default_rng(0)
    frequencies = 1 / np.arange(1, VOCAB + 1)
    frequencies /= frequencies.sum()

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.choice(VOCAB, count, p=frequencies).tolist())

    groups = []
    for number in range(PROBLEMS):
        problem = Problem(f"p{number}", ({"role": "user", "content": "What is it? " * 60},), "42")
        prompt, rollouts = tokens(PROMPT_TOKENS), []
        for _ in range(MEMBERS):
            length = int(draw.integers(COMPLETION_TOKENS // 2, COMPLETION_TOKENS * 3 // 2))
            logprobs = -(
                draw.exponential(0.5, length) * (draw.random(length) < 0.4) + 1e-6 * draw.random(length)
            ).astype(np.float32)
            completion = Completion(tokens(length), tuple(logprobs.tolist()), FinishReason.STOP, (7,) * length)
            score = Score(float(draw.random() < 0.5), True, {"correct": 1.0})
            rollouts.append(
                Rollout.of_one_turn(prompt, completion, temperature=1.0, text="It is 42. " * (length // 3), score=score)
            )
        groups.append(RolloutGroup(problem, tuple(rollouts)))
    return groups


def writing(folder: Path, device: str, rounds: int) -> tuple[dict[str, float], list[float]]:
    """The cost of an iteration's file, weights of a model with 0.6 billion parameters hashed where they are."""
    groups = make_groups()
    num_tokens = sum(r.num_sampled for group in groups for r in group.rollouts)
    size = (1024, 3072) if device == "cuda" else (1024, 64)  # a CPU trains no such model
    weights = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(190)]
    recorder = Recorder(folder, ORIGIN, lambda: (7, weights))
    advantages = [[0.5] * MEMBERS] * PROBLEMS
    seconds, by_the_clock = [], []
    for iteration in range(rounds + 1):
        began, clock = time.process_time(), time.perf_counter()
        recorder.rollouts("train", groups, advantages=advantages, iteration=iteration)
        recorder.log("train", {}, iteration=iteration)
        seconds.append(time.process_time() - began)
        by_the_clock.append(round(time.perf_counter() - clock, 4))
    iteration_s = num_tokens / SAMPLE_TOKENS_PER_S + num_tokens / TRAIN_TOKENS_PER_S
    written_s = statistics.median(seconds[1:])  # the first one imports pyarrow
    num_bytes = (folder / "rollouts" / "iter_000.parquet").stat().st_size
    return {
        "tokens_per_iteration": num_tokens,
        "bytes_per_token": round(num_bytes / num_tokens, 3),
        "write_s": round(written_s, 4),
        "write_by_the_clock_s": statistics.median(by_the_clock[1:]),
        "iteration_s": round(iteration_s, 2),
        "write_frac": round(written_s / iteration_s, 5),
    }, by_the_clock


def default_job(folder: Path) -> dict[str, float]:
    """The share of the default job's iterations on this machine: of the time for which the run is held up, and, as the
    thread that writes takes processor time too, by how much longer an iteration is than its neighbours that are not
    written."""
    from factories import compose_config

    from offline_grpo.run import app

    seconds: dict[int, float] = {}
    plain, plain_log = Recorder.rollouts, Recorder.log

    def timed(self: Recorder, name: str, groups: Any, *, advantages: Any, iteration: int) -> None:
        began = time.perf_counter()
        if iteration % 2:
            plain(self, name, groups, advantages=advantages, iteration=iteration)
        seconds[iteration] = time.perf_counter() - began

    def timed_log(self: Recorder, name: str, metrics: Any, *, iteration: int) -> None:
        began = time.perf_counter()
        plain_log(self, name, metrics, iteration=iteration)
        seconds[iteration] += time.perf_counter() - began

    words = (
        f"train.iterations={DEFAULT_ITERATIONS}",
        "eval.enabled=false",
        "checkpoint.enabled=false",
        f"cache_dir={folder}/cache",
    )
    with mock.patch.object(Recorder, "rollouts", timed), mock.patch.object(Recorder, "log", timed_log):
        app.run(compose_config(*words), folder / "default")
    metrics = [json.loads(path.read_text()) for path in sorted((folder / "default" / "metrics").glob("train_*.json"))]
    whole = [found["time/iteration_s"] for found in metrics]
    written = range(3, DEFAULT_ITERATIONS - 1, 2)  # the first one imports pyarrow
    longer = [2 * whole[i] / (whole[i - 1] + whole[i + 1]) - 1 for i in written]
    return {
        "default_job_iteration_s": round(statistics.median(whole), 4),
        "default_job_held_s": round(statistics.median(seconds[i] for i in written), 5),
        "default_job_held_frac": round(statistics.median(seconds[i] / whole[i] for i in written), 4),
        "default_job_longer_frac": round(statistics.median(longer), 4),
    }


def reading(folder: Path, gigabytes: float, rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """A store of that size, of copies of one file."""
    store = folder / "rollouts"
    content = (store / "iter_000.parquet").read_bytes()
    for iteration in range(round(gigabytes * 1e9 / len(content))):
        (store / f"iter_{iteration:03d}.parquet").write_bytes(content)
    files = [str(shard.path) for shard in shards_of(folder, key="folder")]
    num_rows = len(files) * PROBLEMS * MEMBERS

    def ours() -> None:
        count = 0
        for shard in shards_of(folder, key="folder"):
            assert shard.origin is not None
            count += shard.table().num_rows
        assert count == num_rows

    def pyarrow_scan() -> None:
        scanner = pyarrow.dataset.dataset(files).scanner()
        assert sum(batch.num_rows for batch in scanner.to_batches()) == num_rows

    timings = alternate({"pyarrow": pyarrow_scan, "store": ours}, rounds=rounds)
    began = time.perf_counter()
    groups = groups_of(
        shards_of(folder, key="folder")[0].table(), [range(start, start + MEMBERS) for start in range(0, 256, MEMBERS)]
    )
    typed_s = time.perf_counter() - began
    speed = 1 / timings.ratio("store", "pyarrow")
    found = {"read_gb": round(len(files) * len(content) / 1e9, 3), "read_s": round(timings.median_s("store"), 3)}
    found |= {"read_speed": round(speed, 3), "typed_objects_s_per_iteration": round(typed_s, 4)}
    assert len(groups) == PROBLEMS
    return found, timings.summary("pyarrow")


def killed(folder: Path, count: int) -> dict[str, int]:
    """Of runs that are killed at random moments: rows of complete iterations that are not there, and files that cannot
    be read.
    """
    from children import SMALL, run_in_child, start_in_child

    words = (f"cache_dir={folder}/cache", *SMALL, "train.iterations=30", "train.schedule=constant", "eval.interval=3")
    assert run_in_child(folder / "warm", *words, "train.iterations=1") == 0
    began = time.monotonic()
    assert run_in_child(folder / "whole", *words) == 0
    duration_s = time.monotonic() - began
    expected = {path.name: path.read_bytes() for path in (folder / "whole" / "rollouts").iterdir()}
    num_lost = num_damaged = num_left = num_interrupted = 0
    for seed in range(count):
        run = folder / f"killed_{seed}"
        process = start_in_child(run, *words)
        process.join(random.Random(seed).uniform(0.25, 1.0) * duration_s)
        process.kill()
        process.join()
        num_interrupted += process.exitcode != 0
        left = {path.name: path.read_bytes() for path in (run / "rollouts").glob("*.parquet")}
        num_left += len(left)
        num_damaged += sum(content != expected[name] for name, content in left.items())
        done = [path.stem.removeprefix("train_") for path in (run / "metrics").glob("train_iter_*.json")]
        num_lost += sum(16 for name in done if f"{name}.parquet" not in left)  # rows of an iteration
    found = {"kills": count, "kills_before_the_end": num_interrupted, "files_left": num_left}
    return found | {"files_damaged": num_damaged, "rows_lost": num_lost}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the hashed weights are: cpu or cuda")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the store that is read")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20, help="0: kill none (needs the tests' packages)")
    parser.add_argument("--out", default="rollout_store", help="name of the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measured, seconds = writing(folder / "store", options.device, 10)
        read, rounds = reading(folder / "store", options.gigabytes, options.rounds)
        measured |= read
        if options.kills:
            measured |= default_job(folder) | killed(folder, options.kills)
    targets = [Target("write_frac", "<=", 0.01), Target("read_speed", ">=", 0.5)]
    if options.kills:
        targets += [
            Target("default_job_held_frac", "<=", 0.01),
            Target("files_damaged", "<=", 0),
            Target("rows_lost", "<=", 0),
        ]
    write_result(
        options.out,
        claim=(
            "Writing takes under 1% of an iteration, reading has half the speed of pyarrow's scan, and SIGKILL "
            "loses nothing."
        ),
        targets=targets,
        measured=measured,
        settings={
            **vars(options),
            "problems": PROBLEMS,
            "members": MEMBERS,
            "completion_tokens": COMPLETION_TOKENS,
            "vocab_size": VOCAB,
        },
        details={"write_by_the_clock_s": seconds, "read": rounds},
    )


if __name__ == "__main__":
    main()
