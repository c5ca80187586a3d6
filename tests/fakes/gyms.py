"""Environments of three packages, in the few lines that a user would write; a process with this module reaches no other
machine.
"""

from __future__ import annotations

import socket
from typing import Any

import skyrl_gym
import textarena
from aviary.core import DummyEnv, ToolCall, ToolRequestMessage

connect = socket.socket.connect


def connect_here(self: socket.socket, address: Any) -> None:
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise PermissionError(f"a socket to {address}")
    connect(self, address)


socket.socket.connect = connect_here  # type: ignore[method-assign]


class TextArena:
    def reset(self, game: str, seed: int, **row: Any) -> str:
        self.game, self.reward = textarena.make(f"{game}-raw"), 0.0
        self.game.reset(num_players=1, seed=seed)
        return self._seen()

    def respond(self, text: str) -> str | None:
        is_done, _ = self.game.step(text)
        if not is_done:
            return self._seen()
        self.reward = self.game.close()[0][0]
        return None

    def get_reward(self) -> float:
        return self.reward

    def _seen(self) -> str:
        """What is new, less the policy's own words."""
        messages = self.game.get_observation()[1]
        return "\n".join(text for _, text, kind in messages if kind != textarena.ObservationType.PLAYER_ACTION)


class Aviary:
    async def reset(self, **row: Any) -> str:
        self.world = DummyEnv()
        messages, _ = await self.world.reset()
        return messages[0].content or ""

    async def print_story(self, story: str) -> str:
        """Print a story.

        Args:
            story: Story to print.
        """
        return await self._step("print_story", story=story)

    async def cast_float(self, x: str) -> str:
        """Cast a text to a float.

        Args:
            x: The text.
        """
        return await self._step("cast_float", x=x)

    async def _step(self, name: str, **arguments: Any) -> str:
        call = ToolCall.from_name(name, **arguments)
        messages, *_ = await self.world.step(ToolRequestMessage(tool_calls=[call]))
        return "\n".join(message.content or "" for message in messages)

    @property
    def is_done(self) -> bool:
        return self.world.state.done

    def get_reward(self) -> float:
        return self.world.state.reward


class SkyRL:
    def reset(self, answer: str, **row: Any) -> None:
        self.world = skyrl_gym.make("gsm8k", extras={"reward_spec": {"ground_truth": answer}})
        self.reward = 0.0

    def respond(self, text: str) -> None:
        self.reward = self.world.step(text)["reward"]

    def get_reward(self) -> float:
        return self.reward
