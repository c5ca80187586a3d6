"""Two servers of OpenEnv for tests, on two free ports that they print; run with the Python of an environment that has
openenv.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import random
import socket
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Echo(MCPEnvironment):
    """The repository's echo_env, which pays a tenth for each letter and ends after two calls."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("echo")

        @mcp.tool
        def echo_message(message: str) -> str:
            """Echo back the message.

            Args:
                message: The message.
            """
            return message

        super().__init__(mcp)

    def reset(self, seed: int | None = None, **kwargs: Any) -> Observation:
        self._state, self.calls = State(), 0
        return Observation(metadata={"message": f"Ready, {seed}."})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise NotImplementedError

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        found = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            self.calls += 1
            found.reward, found.done = len(action.arguments.get("message", "")) / 10, self.calls == 2
        return found

    @property
    def state(self) -> State:
        return self._state


class Guess(Action):
    number: str


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    """Says higher or lower, three times at most."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, most: int = 9, **kwargs: Any) -> Hint:
        self.number, self.left = random.Random(seed).randint(1, most), 3
        return Hint(hint=f"A number from 1 to {most}?")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.left -= 1
        guess = int(action.number)  # raises where it is none
        reward = float(guess == self.number) - 0.1
        hint = "higher" if guess < self.number else "lower"
        return Hint(hint=hint, reward=reward, done=reward > 0 or self.left == 0)

    @property
    def state(self) -> State:
        return State()


async def main() -> None:
    apps = [
        create_app(Echo, CallToolAction, CallToolObservation, max_concurrent_envs=8),
        create_app(Guessing, Guess, Hint, max_concurrent_envs=2),
    ]
    places = [socket.create_server(("127.0.0.1", 0)) for _ in apps]
    print(*(place.getsockname()[1] for place in places), flush=True)
    servers = [uvicorn.Server(uvicorn.Config(app, log_level="error")) for app in apps]
    await asyncio.gather(*(server.serve([place]) for server, place in zip(servers, places, strict=True)))


if __name__ == "__main__":
    asyncio.run(main())
