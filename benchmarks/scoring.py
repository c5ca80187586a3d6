"""What a slow reward costs an iteration: 256 completions, each scored in 100 ms, while the engine samples.

    python benchmarks/scoring.py [--pairs 8] [--max-new-tokens 256]

One real run on the CPU of a model with random weights, where some completion of every iteration reaches the limit. It
samples in small batches, so that an iteration takes about as long as one on an H100 (7 s on two cores). In every second
iteration the reward function sleeps for 100 ms; in the others it returns at once. Neighbouring iterations are compared.
Takes about three minutes.

What cannot be hidden: the last completion's own score, and scores for which there are too few workers. 8 of them score
80 completions of 100 ms in a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from offline_grpo.generation.judging import Judgement
from offline_grpo.interfaces import RunListener
from offline_grpo.types import Metrics, Score

SLEEP_S = 0.1
FLAG = "SCORING_BENCHMARK_FLAG"
"""The environment variable that names a file: the reward sleeps while there is one."""


def sleepy(completion: str) -> float:
    """The share of sevens in a completion, perhaps after a sleep."""
    if os.path.exists(os.environ[FLAG]):
        time.sleep(SLEEP_S)
    return completion.count("7") / max(len(completion), 1)


class Toggle(RunListener):
    """Lets the reward sleep in every second iteration, and notes how long each iteration waited for scores when it had
    all completions.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        original = Judgement.result

        def result(judgement: Judgement) -> Score:
            started = time.perf_counter()
            score = original(judgement)
            self._waited_s += time.perf_counter() - started
            return score

        Judgement.result = result  # pyright: ignore[reportAttributeAccessIssue]

    def phase(self, name: str, iteration: int) -> None:
        if name == "generate":
            flag = Path(os.environ[FLAG])
            flag.touch() if iteration % 2 else flag.unlink(missing_ok=True)

    def log(self, name: str, metrics: Metrics, *, iteration: int) -> None:
        with open(os.environ[FLAG] + ".waited", "a") as file:
            file.write(f"{self._waited_s}\n")
        self._waited_s = 0.0


def main() -> None:
    from common import Target, write_result

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args()
    here, num_iterations = Path(__file__).parent, 2 * arguments.pairs + 2
    with tempfile.TemporaryDirectory() as folder:
        model = [sys.executable, str(here / "random_model.py"), folder, "--shape", "small", "--dtype", "float32"]
        subprocess.run(model, check=True)
        overrides = [
            "model=hf",
            f"model.train_id={folder}/model",
            "task=dataset",
            f"task.path={folder}/problems.jsonl",
            "task.reward=scoring:sleepy",
            f"train.iterations={num_iterations}",
            "train.precision=fp32",
            "train.lr=1e-12",
            "train.batch_size=32",
            f"generation.max_new_tokens={arguments.max_new_tokens}",
            "generation.batch_size=8",
            "eval.enabled=false",
            "checkpoint.enabled=false",
            "+logger.toggle._target_=scoring.Toggle",
        ]
        places = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, "-m", "offline_grpo", f"hydra.run.dir={folder}/run", *overrides],
            env=os.environ | {FLAG: f"{folder}/flag", "PYTHONPATH": places},
            check=True,
        )
        waited = [float(line) for line in Path(folder, "flag.waited").read_text().split()][3::2]
        records = [
            json.loads((Path(folder) / f"run/metrics/train_iter_{i:03d}.json").read_text())
            for i in range(2, num_iterations)
        ]
    assert all(record["completion_tokens_max"] == arguments.max_new_tokens for record in records)
    assert not any(record["scoring/num_failed"] for record in records)
    seconds = {
        name: [record["time/iteration_s"] for record in records[start::2]]
        for name, start in (("none", 0), ("sleeping", 1))
    }
    pairs = zip(seconds["none"], seconds["sleeping"], strict=True)
    measured = {
        "overhead_frac": statistics.median(slow / fast - 1 for fast, slow in pairs),
        "waited_frac": statistics.median(waited) / statistics.median(seconds["none"]),
        "iteration_s": statistics.median(seconds["none"]),
        "seconds_of_scores": 256 * SLEEP_S,
    }
    write_result(
        "scoring",
        claim="scores of 100 ms each, in 8 workers, cost at most 5% of an iteration of 256 completions",
        targets=[Target("overhead_frac", "<=", 0.05), Target("waited_frac", "<=", 0.05)],
        settings=vars(arguments),
        measured=measured,
        details={"rounds_s": seconds, "waited_s": waited},
    )


if __name__ == "__main__":
    main()
