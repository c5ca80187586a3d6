"""A tiny model that sees learns sums in pictures, ours and TRL's GRPOTrainer on the same model, problems, order, reward
and batch, on a CPU; five seeds.

    python benchmarks/learning_pictures.py WORK     # about 12 minutes on two cores

`learning.py --tasks picture_sums` does the same with the model of `witness_vl.py` on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import learning_tasks
import numpy as np
import witness_vl
from common import ROOT, Target, environment, parser_of, write_result

from offline_grpo.eval.statistics import mean_interval

SEEDS, ITERATIONS, INTERVAL, UPDATES, PROMPTS, GROUP, TOKENS, HELD_OUT, SAMPLES = 5, 10, 5, 2, 16, 8, 12, 128, 2
LR = 3e-4
TASK: dict[str, Any] = {"max_operand": 33, "picture_size": 16, "prompt_template": "{a}{op}{b}="}
"""Of conf/task/picture_sums.yaml, whose sums `model=tiny_vl` has seen."""
NAMES = {"updates": UPDATES, "iterations": ITERATIONS, "prompts": PROMPTS, "group": GROUP, "tokens": TOKENS, "lr": LR}


def model_of(work: Path) -> str:
    """The folder of `model=tiny_vl`, which a run makes where it is not there."""
    words = ["model=tiny_vl", "task=picture_sums", "train.iterations=1", "eval.enabled=false"]
    words += [f"cache_dir={work}/cache", f"hydra.run.dir={work}/first", "checkpoint.enabled=false"]
    subprocess.run([sys.executable, ROOT / "run_grpo.py", *words], check=True, env=environment())
    return str(next((work / "cache").glob("tiny_vl-*")))


def ours(work: Path, model: str, seed: int) -> list[float]:
    """Held-out pass@1 before and after each INTERVAL iterations."""
    folder = work / f"ours_{seed}"
    words = f"""
        model=hf model.train_id={model} task=dataset task.path={work}/data task.image_field=images
        task.reward=learning_tasks:last_number generation.max_new_tokens={TOKENS} checkpoint.enabled=false eval.ks=[1]
        seed={seed} train.updates_per_iteration={UPDATES} train.iterations={ITERATIONS} train.lr={LR}
        train.schedule=constant train.kl_coef=0 train.drop_zero_signal_groups=false eval.interval={INTERVAL}
        eval.num_ids={HELD_OUT} eval.replicates={SAMPLES} data.problems_per_iteration={PROMPTS}
        data.rollouts_per_problem={GROUP} train.precision=fp32 model.device=cpu hydra.run.dir={folder}
    """
    subprocess.run([sys.executable, ROOT / "run_grpo.py", *words.split()], check=True, env=environment())
    files = sorted((folder / "metrics").glob("eval_*.json"), key=lambda path: (path.stem != "eval_init", path.stem))
    return [json.loads(file.read_text())["pass@1"] for file in files]


def trl(work: Path, model: str, seed: int) -> list[float]:
    folder = work / f"trl_{seed}"
    folder.mkdir(exist_ok=True)
    settings = {"model": model, "data": str(work / "data"), "reward": "last_number", "seed": seed, **NAMES}
    settings |= {"eval_interval": INTERVAL, "eval_problems": HELD_OUT, "eval_samples": SAMPLES, "kv_bytes": 0}
    settings |= {"max_len": 64, "threshold": 1.0, "microbatch": 64, "on_cpu": True}
    script = Path(__file__).with_name("learning_trl.py")
    subprocess.run([sys.executable, script, folder, json.dumps(settings)], check=True, env=environment())
    return json.loads((folder / "curve.json").read_text())["pass@1"]


def main() -> None:
    args = parser_of(__doc__, "learning_pictures").parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    model = model_of(work)
    witness_vl.TASK |= TASK
    learning_tasks.save(work / "data", "picture_sums")
    curves: dict[str, list[list[float]]] = {"ours": [], "trl": []}
    for seed in range(SEEDS):
        curves["ours"].append(ours(work, model, seed))
        curves["trl"].append(trl(work, model, seed))
        print(seed, {arm: curve[-1] for arm, curve in curves.items()}, flush=True)
    measured: dict[str, float] = {}
    for arm, found in curves.items():
        low, high = mean_interval(np.array(found))
        for at, name in enumerate(("before", "middle", "after")):
            measured |= {
                f"{arm}_{name}": float(np.mean(found, 0)[at]),
                f"{arm}_{name}_half": float((high - low)[at] / 2),
            }
    difference = np.array(curves["ours"])[:, -1] - np.array(curves["trl"])[:, -1]
    low, high = mean_interval(difference)
    measured |= {"difference": float(difference.mean()), "difference_low": float(low), "difference_high": float(high)}
    write_result(
        args.out,
        claim="A tiny model that sees learns sums in pictures as with TRL: held-out pass@1 before, amid and after them",
        targets=[Target("ours_after", ">=", 0.6), Target("difference_high", ">=", 0.0)],
        settings={**NAMES, "seeds": SEEDS, "held_out": HELD_OUT, "samples": SAMPLES, **TASK},
        measured={name: round(value, 4) for name, value in measured.items()},
        details=curves,
    )


if __name__ == "__main__":
    main()
