"""Verdicts per second of `task=code`, by the number of cores, each of a solution and eight asserts or of a program that
reads a line, beside the same program run bare; right and wrong verdicts are counted.

    python benchmarks/sandbox.py

Cores are those of the process (affinity), with a verdict at a time for each. CPU seconds do not depend on other load.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import Target, parser_of, write_result

from offline_grpo.config import compose as conf
from offline_grpo.config.problems import build_task
from offline_grpo.engine.spawn import adopt_orphans
from offline_grpo.task.code_problems import draw
from offline_grpo.types import Problem

ADD = "print(sum(map(int, input().split())))"


def bare(_: Problem, text: str) -> float:
    """The program in a process of its own, without limits."""
    code = text.removeprefix("```python\n").removesuffix("\n```")
    return float(subprocess.run([sys.executable, "-I", "-c", code], input=b"2 3", capture_output=True).stdout == b"5\n")


def cpu_s() -> float:
    """Of this process and of those that it has ended."""
    usages = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(judge: Callable[[Problem, str], float], asked: list[Any], cores: int) -> dict[str, float]:
    began, spent = time.perf_counter(), cpu_s()
    with ThreadPoolExecutor(cores) as pool:
        found = [*pool.map(lambda each: judge(*each[:2]), asked)]
    per_s, cpu = len(asked) / (time.perf_counter() - began), (cpu_s() - spent) / len(asked)
    num_wrong = sum(reward != expected for reward, (*_, expected) in zip(found, asked, strict=True))
    return {"per_s": round(per_s, 1), "cpu_s": round(cpu, 4), "num_wrong": num_wrong}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--verdicts", type=int, default=200)
    args = parser.parse_args()
    adopt_orphans()  # so that their seconds count
    conf.register()
    task: Any = build_task(conf.typed(conf.composed(["task=code"])).task)
    asserts = []
    for i, row in enumerate(draw(2, args.verdicts)):
        code = row["answer"] if i % 2 else row["answer"].replace("return ", "return [") + "]"
        problem = Problem("asserts", (), "", {"tests": row["tests"]})
        asserts.append((problem, f"```python\n{code}\n```", float(i % 2)))
    pair = {"tests": [{"input": "2 3", "output": "5"}]}
    program = [(Problem("pair", (), "", pair), f"```python\n{ADD}\n```", 1.0)] * args.verdicts
    arms = {"asserts": (asserts, lambda *each: task.score(*each).reward), "bare": (program, bare)}
    arms["program"] = (program, arms["asserts"][1])
    usable, measured, cores = sorted(os.sched_getaffinity(0)), {}, 1
    while cores <= len(usable):
        os.sched_setaffinity(0, usable[:cores])
        for name, (asked, judge) in arms.items():
            measured |= {f"{name}_{cores}/{key}": value for key, value in measure(judge, asked, cores).items()}
        cores *= 2
    measured["asserts_16_estimated/per_s"] = round(16 / measured["asserts_1/cpu_s"], 1)
    targets = [Target(f"{name}_1/num_wrong", "<=", 0) for name in arms]
    of_16 = "asserts_16/per_s" if "asserts_16/per_s" in measured else "asserts_16_estimated/per_s"
    targets.append(Target(of_16, ">=", 100))
    claim = "At least 100 verdicts a second on 16 cores, all of them right"
    write_result("sandbox", claim=claim, targets=targets, settings=args, measured=measured, details={})


if __name__ == "__main__":
    main()
