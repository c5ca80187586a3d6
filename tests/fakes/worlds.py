"""Environments for tests: some behave."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from offline_grpo.task.environment import Agent, Environment

act: Any = None
"""An agent, which a test puts here."""


def solve(row: dict[str, Any], base_url: str, api_key: str) -> Any:
    return act(row, base_url, api_key)


def agent(name: str = "worlds:solve", **settings: Any) -> Agent:
    """See `environment`."""
    made = environment(**settings)
    shared = {name: value for name, value in vars(made).items() if name in Agent.__dataclass_fields__}
    return Agent(agent=name, **shared)


async def chats(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Two turns through the package of OpenAI."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "1+1="}]
        for text in ("2+2=", "3+3="):
            reply = await client.chat.completions.create(model="any", messages=messages, temperature=0.3)
            message = reply.choices[0].message
            messages += [message.model_dump(), {"role": "user", "content": text}]
    return float(len(messages))


def forks(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Asks the three sums of `Sums`: the second and the third each after the first, and then both with a history of its
    own. Pays for what is right.
    """
    import httpx

    with httpx.Client(timeout=60) as http:

        def say(*messages: Any) -> Any:
            answer = http.post(f"{base_url}/chat/completions", json={"messages": messages})
            return answer.json()["choices"][0]["message"]

        one, two, three = ({"role": "user", "content": f"{each}="} for each in row["sums"])
        first = say(one)
        replies = [first, say(one, first, two), say(one, first, three)]
        own = {"role": "assistant", "content": f"{replies[1]['content']}0"}
        replies += [say(two, own, three), say(one, first, two, replies[1], three)]
    answers = [str(sum(map(int, each.split("+")))) for each in row["sums"]]
    return float(sum(answers[i] == reply["content"] for i, reply in zip((0, 1, 2, 2, 2), replies, strict=True)))


def environment(name: str = "worlds:Talk", **settings: Any) -> Environment:
    rows = {"path": "rows.jsonl", "name": None, "train_split": "train", "eval_split": None, "eval_frac": 0.5}
    limits = {"max_turns": 8, "max_turn_tokens": None, "max_environment_tokens": 100, "episode_timeout_s": 60.0}
    own = {
        "prompt_field": "prompt",
        "image_field": None,
        "examples": [],
        "correct_threshold": 1.0,
        "max_result_chars": 1000,
    }
    return Environment(**{"environment": name, "system_prompt": None, **rows, **limits, **own, **settings})


class Shop:
    """Sells twice, then raises."""

    def reset(self, coins: int, **row: Any) -> str:
        self.sold = 0
        return f"You have {coins} coins."

    async def buy(self, name: str, price: int) -> str:
        """Buy something.

        Args:
            name: What to buy.
            price: Coins to pay.
        """
        self.sold += 1
        if self.sold == 3:
            raise ValueError("sold out")
        return f"Bought {name} for {price}."

    def get_reward(self) -> float:
        return float(self.sold)


class Talk:
    """Says `row` again and again, and pays for each reply of its own length."""

    def reset(self, turns: int, **row: Any) -> None:
        self.left, self.heard = turns, [random.random()]

    def respond(self, text: str) -> str | None:
        self.heard.append(len(text))
        self.left -= 1
        return f"{self.left}+{self.left}=" if self.left else None

    def get_turn_reward(self) -> float:
        return float(self.heard[-1] > 1)

    def get_reward(self) -> float:
        return 0.5 * self.heard[0]


class Sums:
    """Three sums, one after the other, that the tiny model can learn."""

    def reset(self, sums: list[str], **row: Any) -> None:
        self.sums, self.right, self.turn = sums, 0, 0

    def respond(self, text: str) -> str | None:
        a, _, b = self.sums[self.turn].partition("+")
        self.right += text.strip() == str(int(a) + int(b))
        self.turn += 1
        return f"{self.sums[self.turn]}=" if self.turn < len(self.sums) else None

    def get_reward(self) -> float:
        return self.right / len(self.sums)


class PaidSums(Sums):
    """The same, paid at each turn."""

    def get_turn_reward(self) -> float:
        right, self.right = self.right, 0
        return right / len(self.sums)


def write_sums(path: Path, count: int = 300, largest: int = 20) -> None:
    rng = random.Random(0)
    rows = [[f"{rng.randint(0, largest)}+{rng.randint(0, largest)}" for _ in range(3)] for _ in range(count)]
    lines = ({"prompt": f"{own[0]}=", "sums": own, "answer": str(sum(map(int, own[0].split("+"))))} for own in rows)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


class Waits:
    """Says that it plays, and waits for a file."""

    def reset(self, go: str, places: str, **row: Any) -> None:
        self.go = Path(go)
        Path(places, str(os.getpid())).touch()

    def get_reward(self) -> float:
        while not self.go.exists():
            time.sleep(0.05)
        return 1.0


class Bad(Talk):
    """Misbehaves at its second turn, as its row says."""

    def reset(self, turns: int, how: str = "", **row: Any) -> None:
        super().reset(turns)
        self.how = how

    def respond(self, text: str) -> str | None:
        found = super().respond(text)
        return found if self.left > 0 else self._misbehave() if self.left == 0 else None

    def _misbehave(self) -> Any:
        match self.how:
            case "hang":
                while True:
                    pass
            case "sleep":
                time.sleep(60)
            case "raise":
                raise RuntimeError("no")
            case "exit":
                sys.exit(3)
            case "kill":
                os.kill(os.getpid(), 9)
            case "fork":
                if os.fork() == 0:
                    time.sleep(60)
            case "child":
                subprocess.Popen(["sleep", "60"])
            case "print":
                sys.stdout.write("x" * 20_000_000)
            case "bytes":
                return b"\xff" * 10
            case "long":
                return "y" * 10_000_000
            case "recursion":
                return self._misbehave()
            case "memory":
                return bytearray(10**10)
            case "await":
                return asyncio.sleep(0)
        return None

    def get_reward(self) -> float:
        if self.left > 0:
            return 0.0
        return {"nan": float("nan"), "none": None, "text": "much"}.get(self.how, 1.0)  # type: ignore[return-value]
