"""A taskset of verifiers for tests: sums, for which there is a tool."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    a: int = 0
    b: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, x: int, y: int) -> str:
        """Add two numbers."""
        return str(x + y)


class SumsConfig(vf.TaskConfig):
    has_tool: bool = False
    runs: bool = False


class SumTask(vf.Task[SumData, vf.State, SumsConfig]):
    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())] if config.has_tool else []

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.a + self.data.b) in trace.last_reply)

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return 1 / (1 + len(trace.last_reply))

    @vf.metric
    async def ran(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        """What a program prints that is run where the episode is."""
        if not self.config.runs:
            return 0.0
        done = await runtime.run(["python3", "-c", f"print({self.data.a} + {self.data.b})"], {})
        return float(done.stdout)

    @vf.metric
    async def replies(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class SumsTasksetConfig(vf.TasksetConfig):
    task: SumsConfig = SumsConfig()
    seed: int = 0


class SumsTaskset(vf.Taskset[SumTask, SumsTasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        rng = random.Random(self.config.seed)
        for _ in range(100):
            a, b = rng.randint(0, 20), rng.randint(0, 20)
            yield SumTask(SumData(prompt=f"{a}+{b}=", a=a, b=b), self.config.task)


if __name__ == "__main__":
    Calculator.run()
