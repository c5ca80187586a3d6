"""Environments behind a server of OpenEnv (0.10); each episode is a session of it, over a websocket."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from offline_grpo.errors import ConfigError, ScoreError, reason_of, require
from offline_grpo.installed import install_command
from offline_grpo.interfaces import Chat
from offline_grpo.settings import Range
from offline_grpo.task.environment import ToolEpisodes
from offline_grpo.task.problems import LazyProblems, SystemPrompt, asked
from offline_grpo.types import Problem, Schema, Score, Split

FIRST_SEED = {Split.TRAIN: 0, Split.EVAL: 1_000_000}
NUMBER = Range(f"must be from 1 to {FIRST_SEED[Split.EVAL]:,}", lambda value: 0 < value <= FIRST_SEED[Split.EVAL])
ACTION = "take_action"
"""The one tool of an environment that is none of MCP."""
LARGEST_MESSAGE = 2**27
ROOM_S, LOOK_S = 5.0, 0.1
"""For how long, and how often, a session is asked for while all are taken: a closed one takes a moment to end."""


@dataclass(frozen=True, kw_only=True)
class OpenEnv(ToolEpisodes):
    """Episodes of an environment server. Problem i resets it with seed i. The reward of a step is one of its turn; that
    of the episode is their sum.

    Tools are those that an MCP environment lists, and else `take_action`, whose arguments are an action.
    """

    openenv: Mapping[str, Any]
    prompt: str
    system_prompt: SystemPrompt
    num_train: Annotated[int, NUMBER]
    num_eval: Annotated[int, NUMBER]

    def __post_init__(self) -> None:
        super().__post_init__()
        url = self.openenv["url"]
        require(url.startswith(("http://", "https://")), "task.openenv.url", url, "must begin with http:// or https://")

    def problems(self, split: Split) -> LazyProblems:
        _ = self.rules  # whether the server answers is said now
        return LazyProblems(partial(self._problem, split), range(getattr(self, f"num_{split}")))

    def _problem(self, split: Split, index: int) -> Problem:
        fields = {**self.openenv["reset"], "seed": FIRST_SEED[split] + index}
        return Problem(f"{split}-{index}", asked(self.prompt, self.system_prompt), "", fields, self.rules)

    @property
    def tools(self) -> tuple[Schema, ...]:
        import httpx

        # Ask it for its tools, and for what an action is: that it answers is known now, before a model is loaded.
        url, field = self.openenv["url"].rstrip("/"), self.openenv["text_field"]
        try:
            with closing(_Session(self.openenv)) as session:
                answer = session.ask("step", {"type": "list_tools"})  # an error, where it is none of MCP
            action = httpx.get(f"{url}/schema", timeout=60).raise_for_status().json()["action"]
        except (ScoreError, httpx.HTTPError) as error:
            raise ConfigError(f"task.openenv.url={url}: is no OpenEnv server that answers ({error})") from error
        # With `text_field` a reply itself is the action, and there is no tool.
        fields = {name: value for name, value in action["properties"].items() if name != "metadata"}
        if field is not None:
            require(field in fields, "task.openenv.text_field", field, f"an action has {', '.join(fields)}")
            return ()
        # The tools of an MCP environment, or one that takes an action.
        own = {"name": ACTION, "description": action.get("description", "")}
        listed = answer.get("observation", {}).get("tools")
        found = listed or [{**own, "input_schema": {**action, "properties": fields}}]
        names = {"name": "name", "description": "description", "parameters": "input_schema"}
        functions = ({ours: tool[theirs] for ours, theirs in names.items()} for tool in found)
        return tuple({"type": "function", "function": function} for function in functions)

    def play(self, problem: Problem, chat: Chat) -> Score:
        with closing(_Session(self.openenv)) as session:
            return self.played(session, problem, chat)

    def call(self, world: Any, name: str, arguments: Mapping[str, Any]) -> str:
        is_mcp = name != ACTION
        return world.step({"type": "call_tool", "tool_name": name, "arguments": arguments} if is_mcp else arguments)


class _Session:
    """An environment of the server, as `ToolEpisodes.played` wants it."""

    is_done = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        try:
            from websockets.exceptions import ConnectionClosed, WebSocketException
            from websockets.sync.client import connect
        except ImportError as error:
            raise ConfigError(f"task=openenv: needs {install_command('openenv')} ({error})") from error
        url = f"ws{settings['url'].removeprefix('http').rstrip('/')}/ws"
        self._open = partial(connect, url, max_size=LARGEST_MESSAGE)
        self._errors, self._closed = (OSError, WebSocketException), ConnectionClosed
        self._text_field = settings["text_field"]
        self._socket: Any = None
        self._earned = 0.0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """An observation with reward and done, or an error. Raises ScoreError if the server has no room or is gone."""
        deadline = time.monotonic() + ROOM_S
        try:
            while True:
                self._socket = self._socket or self._open()
                with suppress(self._closed):  # of a server that has no room: it has said so
                    self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(self._socket.recv())["data"]
                if answer.get("code") != "CAPACITY_REACHED":
                    return answer
                fix = "set scoring.episodes to the number of its sessions (max_concurrent_envs)"
                if time.monotonic() > deadline:
                    raise ScoreError(f"the OpenEnv server has no room, {answer['message']} {fix}")
                self.close()
                self._socket = None
                time.sleep(LOOK_S)
        except self._errors as error:
            raise ScoreError(f"the OpenEnv server does not answer: {reason_of(error)}") from error

    def reset(self, **fields: Any) -> str:
        return self._observed("reset", fields)

    def step(self, action: Mapping[str, Any]) -> str:
        """Raises ValueError where the environment refuses the action."""
        if self.is_done:
            raise ValueError("The episode is over.")
        return self._observed("step", action)

    def respond(self, text: str) -> str | None:
        try:
            return None if self._text_field is None else self.step({self._text_field: text})
        except ValueError as error:
            return str(error)

    def get_turn_reward(self) -> float:
        earned, self._earned = self._earned, 0.0
        return earned

    def _observed(self, kind: str, data: Mapping[str, Any]) -> str:
        answer = self.ask(kind, data)
        if "observation" not in answer:
            raise ValueError(
                "; ".join(f"{e['loc']}: {e['msg']}" for e in answer.get("errors", ())) or answer["message"]
            )
        observation = answer["observation"]
        self.is_done = bool(answer.get("done"))
        self._earned += float(answer.get("reward") or 0.0) if kind == "step" else 0.0
        if isinstance(error := observation.get("error"), Mapping):  # of a tool of MCP
            raise ValueError(error.get("message"))
        # The text of a tool's result, a text where there is nothing else, or JSON; metadata where that is all there is.
        hidden = ("metadata", "tool_name")
        found: Any = {k: v for k, v in observation.items() if k not in hidden and v not in (None, "", [], {})}
        found = found or observation.get("metadata") or {}
        [value, *others] = found.values() or [""]
        if not others and isinstance(value, Mapping) and isinstance(value.get("content"), list):  # of a tool of MCP
            return "\n".join(part.get("text", "") for part in value["content"])
        return value if not others and isinstance(value, str) else json.dumps(found, ensure_ascii=False)
