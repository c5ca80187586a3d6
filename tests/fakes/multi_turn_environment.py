"""An Atropos environment of two turns: the model writes, the environment answers, the model writes again. Run as
`python -m multi_turn_environment serve --config FILE`.

What it sends it also appends to the file that the variable SENT names.
"""

import json
import os
import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

TURN_TOKENS = 6


class MultiTurn(BaseEnv):
    name = "multi_turn"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        return BaseEnvConfig(), [APIServerConfig(server_type="vllm")]

    async def setup(self) -> None:
        self._numbers = random.Random(0)

    async def get_next_item(self) -> int:
        return self._numbers.randint(1, 3)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is held out."""

    async def collect_trajectories(self, item: int) -> tuple[ScoredDataGroup, list[Any]]:
        prompt: list[int] = self.tokenizer.encode(f"What is {item} + 0?")
        group: dict[str, list[Any]] = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
        for member in range(self.config.group_size):
            tokens, masks, logprobs = list(prompt), [-100] * len(prompt), [1.0] * len(prompt)
            for turn in range(2):
                _, [written], [theirs], _ = await self.server.tokens_and_logprobs_completion(
                    input_ids=list(tokens), n=1, max_tokens=TURN_TOKENS, temperature=1.0
                )
                tokens, masks, logprobs = tokens + written, masks + written, logprobs + theirs
                if turn == 0:
                    answer = self.tokenizer.encode("+ 0?" * (1 + member % 2))
                    tokens, masks, logprobs = (
                        tokens + answer,
                        masks + [-100] * len(answer),
                        logprobs + [1.0] * len(answer),
                    )
            for name, value in (
                ("tokens", tokens),
                ("masks", masks),
                ("scores", len(set(written)) + member),
                ("inference_logprobs", logprobs),
            ):
                group[name].append(value)
        with open(os.environ["SENT"], "a") as file:
            file.write(json.dumps(group) + "\n")
        return ScoredDataGroup(**group), []  # type: ignore[typeddict-item]


if __name__ == "__main__":
    MultiTurn.cli()
