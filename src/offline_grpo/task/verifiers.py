"""Tasksets of verifiers (0.4); each episode is one of its own, with its harness and its rewards."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, ClassVar

from offline_grpo.errors import ConfigError, ScoreError
from offline_grpo.installed import install_command
from offline_grpo.interfaces import Chat
from offline_grpo.settings import at_least
from offline_grpo.task.environment import Episodes, seed_globally
from offline_grpo.task.problems import Share
from offline_grpo.task.rewards import total
from offline_grpo.task.rows import hold_out
from offline_grpo.types import Message, Problem, Score, Split

try:
    import verifiers.v1 as vf
    from openai import APIStatusError, AsyncOpenAI
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.types import content_text
except ImportError as error:
    raise ConfigError(f"task=verifiers: needs {install_command('verifiers')} ({error})") from error

HARNESS = "offline_grpo_chat"
sys.modules[HARNESS] = sys.modules[__name__]  # verifiers imports a harness by a name without dots
__all__ = ["ChatHarness", "Verifiers"]  # where it looks for the class


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat, with the tools of its task. The one of verifiers (`null`) starts a Python with packages from an index for
    each.
    """

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(  # type: ignore[override]  # as it is called
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Mapping[str, str], data: Any
    ) -> vf.ProgramResult:
        """Chat until a reply calls no tool."""
        messages = [dict(message_to_wire(each)) for each in opening(data)]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            client: Any = await stack.enter_async_context(AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None))
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                try:
                    asked = {"tools": tools} if tools else {}
                    reply = await client.chat.completions.create(model=ctx.model, messages=messages, **asked)
                except APIStatusError as error:  # also after a stop, which verifiers knows of
                    return vf.ProgramResult(1, "", str(error))
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(0, "", "")
                for call in message.tool_calls:
                    name, content = call.function.name, f"Tool {call.function.name} not found."
                    if name in places:
                        content = await call_mcp(connections, places, name, json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "name": name, "content": content})


def opening(data: Any) -> list[Any]:
    own = data.prompt if isinstance(data.prompt, list) else [vf.UserMessage(content=data.prompt or "")]
    return [*([vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []), *own]


@dataclass(frozen=True, kw_only=True)
class Verifiers(Episodes):
    """The tasks of a taskset. `Score.parts` are its rewards with their weights, and `Score.measured` its metrics."""

    verifiers: Mapping[str, Any]
    eval_verifiers: Mapping[str, Any] | None
    eval_frac: Share
    env: Mapping[str, Any]
    max_tasks: Annotated[int, at_least(1)]

    has_address: ClassVar[bool] = True
    worker_imports: ClassVar[tuple[str, ...]] = (__name__,)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._envs

    @cached_property
    def _envs(self) -> Mapping[Split, vf.Env]:
        """One for both splits, unless the evaluation has settings of its own."""
        found: dict[Split, vf.Env] = {}
        for split, changes in ((Split.TRAIN, {}), (Split.EVAL, self.eval_verifiers)):
            if changes is None:
                found[split] = found[Split.TRAIN]
                continue
            settings, agents = {**self.verifiers, **changes}, {}
            try:
                config = vf.resolve_env_config({**self.env, "taskset": settings})
                # Without settings of its own an agent runs here, and chats.
                for name, agent in agent_config_fields(config).items():
                    own: dict[str, Any] = {}
                    if "runtime" not in agent.model_fields_set:
                        own["runtime"] = vf.SubprocessConfig()
                    if agent.harness is None and vf.default_harness_id(settings["id"]) == "bash":
                        own["harness"] = vf.HarnessConfig.model_validate({"id": HARNESS})
                    agents[name] = agent.model_copy(update=own)
                found[split] = vf.load_environment(config.model_copy(update=agents))
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                about = " ".join(str(error).split())
                raise ConfigError(f"task.verifiers={settings}: cannot be loaded: {about}") from error
            policies = [name for name, each in agents.items() if each.client is None]
            fix = "needs exactly one agent without a client of its own, which is the policy"
            self.check("env", len(policies) == 1, f"{fix}; it has {', '.join(policies) or 'none'}")
        return found

    @cached_property
    def _splits(self) -> Mapping[Split, Sequence[Problem]]:
        # A part of the tasks is held out, unless the evaluation has settings of its own.
        splits: dict[Split, list[Problem]] = {}
        for split in Split if self.eval_verifiers is not None else (Split.TRAIN,):
            splits[split] = []
            for index, task in enumerate(islice(self._envs[split].taskset, self.max_tasks)):
                turns = opening(task.data)
                messages: list[Message] = [{"role": t.role, "content": content_text(t.content) or ""} for t in turns]
                fields = {"split": split, "data": task.data.model_dump(mode="json")}
                splits[split].append(Problem(f"{split}-{index}", tuple(messages), "", fields, self.rules))
        if self.eval_verifiers is not None:
            return splits
        train = splits[Split.TRAIN]
        return hold_out(train, [problem.messages for problem in train], self.eval_frac)

    def play(self, problem: Problem, chat: Chat) -> Score:
        seed_globally(chat.seed)
        env = self._envs[Split(problem.fields["split"])]
        # The task as verifiers has it, from what `_splits` kept of it.
        kind: Any = type(env.taskset).task_type()
        task = kind(kind.data_type().model_validate(problem.fields["data"]), env.config.taskset.task)
        client = vf.EvalClientConfig(base_url=chat.base_url, api_key_var="OFFLINE_GRPO_EPISODE")  # the URL has the key
        policy = vf.ModelContext(model="policy", client=client)

        async def run() -> vf.Episode:
            async with env.serving():
                return await env.run_episode(task, policy)

        # An error of the environment is one of this episode; else its rewards and metrics are those of the policy.
        episode = asyncio.run(run())
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise ScoreError("; ".join(f"{error.type}: {error.message}" for error in errors))
        [trace] = [trace for trace in episode.traces if trace.agent.config.client == client]
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        measured = {name: value for name, value in trace.metrics.items() if value is not None}
        return total(rewards, self.correct_threshold, measured)
