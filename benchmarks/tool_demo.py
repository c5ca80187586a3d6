"""A pretrained model learns to call a tool on two CPU cores, conversion of its file and evaluations included.

    python benchmarks/tool_demo.py WORK [OVERRIDES]    # `experiment=calculator_smollm2`

Writes each evaluation with its time, and the first held-out problem that was answered wrongly before and rightly after
training, as both episodes were: what the policy sampled, and what was inserted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import ROOT, Target, environment, parser_of, write_result

CLAIM = "SmolLM2-135M-Instruct learns to call a calculator on two CPU cores: held-out pass@1, and minutes in all"


def evaluations(run: Path, start: float) -> list[dict[str, float]]:
    """Those of a run, in their order, with seconds since its start."""
    files = sorted((run / "metrics").glob("eval_*.json"), key=lambda path: path.stat().st_mtime)
    names = ("pass@1", "pass@1_low", "pass@1_high")
    return [
        {"seconds": path.stat().st_mtime - start, **{name: json.loads(path.read_text())[name] for name in names}}
        for path in files
    ]


def episodes(run: Path) -> list[list[tuple[str, str]]]:
    """One of the same problem before and after training, from its question on, as pairs of who and text."""
    files = sorted((run / "samples").glob("eval_*.jsonl"), key=lambda path: path.stat().st_mtime)
    before, after = ([json.loads(line) for line in file.read_text().splitlines()] for file in (files[0], files[-1]))
    right = {each["problem_id"]: each for each in after if each["is_correct"]}
    first = next(each for each in before if not each["is_correct"] and each["problem_id"] in right)
    found = [each["rendered"] for each in (first, right[first["problem_id"]])]
    for turns in found:  # the prompt also has the tool and the worked calls
        turns[0][1] = turns[0][1].rpartition("<|im_start|>user")[2]
    return found


def main() -> None:
    """Run, read what the run wrote, and record it."""
    parser = parser_of(__doc__, "tool_demo")
    args = parser.parse_args()
    run = args.work / "run"
    words = ["experiment=calculator_smollm2", "samples.per_iteration=all"]
    words += [f"cache_dir={args.work}/cache", f"hydra.run.dir={run}", *args.overrides]
    start = time.time()
    subprocess.run([sys.executable, ROOT / "run_grpo.py", *words], check=True, env=environment())
    seconds = time.time() - start
    curve = evaluations(run, start)
    trained = sorted((run / "metrics").glob("train_iter_*.json"))
    records: list[dict[str, Any]] = [json.loads(path.read_text()) for path in trained]
    measured = {f"{when}/{name}": curve[i][name] for when, i in (("first", 0), ("last", -1)) for name in curve[0]}
    measured |= {"minutes": seconds / 60, "iterations": len(records)}
    write_result(
        args.out,
        claim=CLAIM,
        targets=[
            Target("first/pass@1", "<=", 0.5),
            Target("last/pass@1", ">=", 0.95),
            Target("minutes", "<=", 10),
        ],
        settings={"words": " ".join(words).replace(str(args.work), "WORK")},
        measured=measured,
        details={"evaluations": curve, "episodes": episodes(run), "iterations": records},
    )


if __name__ == "__main__":
    main()
