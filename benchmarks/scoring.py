"""What a slow reward costs an iteration: 256 completions, each scored in 100 ms, while the engine samples.

    python benchmarks/scoring.py [--pairs 4] [--max-new-tokens 256]

One real run on the CPU of a model with random weights, whose completions nearly all have the same length. In every second iteration the
reward function sleeps for 100 ms; in the others it returns at once. Neighbouring iterations are compared. Takes about five minutes on
two cores.
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

from offline_grpo.interfaces import RunListener

SLEEP_S = 0.1
FLAG = "SCORING_BENCHMARK_FLAG"
"""The environment variable that names a file: the reward sleeps while there is one."""


def sleepy(completion: str) -> float:
    """The share of sevens in a completion, perhaps after a sleep."""
    if os.path.exists(os.environ[FLAG]):
        time.sleep(SLEEP_S)
    return completion.count("7") / max(len(completion), 1)


class Toggle(RunListener):
    """Lets the reward sleep in every second iteration."""

    def phase(self, name: str, iteration: int) -> None:
        if name == "generate":
            flag = Path(os.environ[FLAG])
            flag.touch() if iteration % 2 else flag.unlink(missing_ok=True)


def main() -> None:
    from common import Target, write_result

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
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
            "generation.batch_size=32",
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
        records = [json.loads((Path(folder) / f"run/metrics/train_iter_{i:03d}.json").read_text()) for i in range(2, num_iterations)]
    tokens = [record["num_completion_tokens"] for record in records]
    assert max(tokens) < 1.02 * min(tokens)
    assert not any(record["scoring/num_failed"] for record in records)
    seconds = {name: [record["time/iteration_s"] for record in records[start::2]] for name, start in (("none", 0), ("sleeping", 1))}
    pairs = zip(seconds["none"], seconds["sleeping"], strict=True)
    measured = {
        "overhead_frac": statistics.median(slow / fast - 1 for fast, slow in pairs),
        "iteration_s": statistics.median(seconds["none"]),
        "seconds_of_scores": 256 * SLEEP_S,
    }
    write_result(
        "scoring",
        claim="scores of 100 ms each, in 8 workers, cost at most 5 % of an iteration of 256 completions",
        targets=[Target("overhead_frac", "<=", 0.05)],
        settings=vars(arguments),
        measured=measured,
        details={"rounds_s": seconds},
    )


if __name__ == "__main__":
    main()
