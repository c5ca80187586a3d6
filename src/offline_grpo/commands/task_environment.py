"""An Atropos environment around any task of this project: asks the task's problems, scores the answers, and sends the
groups to `run-api`.

    python -m offline_grpo.commands.task_environment serve --env.task gsm8k --env.task_overrides 'format_weight=0.2'

A run that starts it (`rollouts.environment`) tells it everything by environment variables: server, API, model, and the
run's folder, whose task, data and sampling it takes over. See docs/atropos.md.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from tenacity import RetryError

from offline_grpo.config import compose as conf
from offline_grpo.config.problems import build_task, held_out_problems, isolated, train_problems, without_held_out
from offline_grpo.errors import require
from offline_grpo.generation.judging import Judgement
from offline_grpo.installed import install_command
from offline_grpo.interfaces import TaskFacts
from offline_grpo.model.load import generation_config_of
from offline_grpo.model.text import use_template
from offline_grpo.rollouts.on_policy import permutation
from offline_grpo.seeding import derive_seed
from offline_grpo.settings import RunConfig
from offline_grpo.start.prompts import codec_of, without_long
from offline_grpo.types import Problem, SamplingParams, Score

try:
    from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
except ModuleNotFoundError as error:
    sys.exit(f"error: atroposlib is not installed ({error}); use `{install_command('atropos')}`")

IGNORED = -100
"""The mask of a token that the model did not write."""
NO_LOGPROB = 1.0
"""In place of its logprob: no logprob is above 0."""


class TaskConfig(BaseEnvConfig):
    """`--env.NAME`, and `env:` in a file given with `--config`, beside what every environment has."""

    task: str | None = Field(default=None, description="An option of conf/task; None: the run's own, or arithmetic.")
    task_overrides: str = Field(
        default="",
        description="Settings of the task ('max_operand=20') and of other groups ('eval.num_ids=64 seed=1').",
    )
    max_token_length: int = Field(default=8, description="Longest completion, in tokens.")
    temperature: float = Field(default=1.0, description="Sampling temperature.")
    eval_temperature: float = Field(default=1.0, description="Sampling temperature of evaluations.")
    stop: list[str] = Field(default=[], description="Strings that end a completion.")
    steps_per_eval: int = Field(default=0, description="Batches between evaluations; 0: none, the trainer has its own.")
    ensure_scores_are_not_same: bool = Field(
        default=False,
        description="Keep back groups whose scores are all the same. The trainer leaves them out, and counts them.",
    )
    use_wandb: bool = Field(default=False, description="Log to the project and group that the trainer has registered.")


class TaskEnvironment(BaseEnv):
    """Groups of completions of a task's training problems, with the token ids and logprobs that the server returned."""

    name = "task"
    env_config_cls = TaskConfig  # type: ignore[assignment] # atroposlib declares an object of it

    def __init__(
        self, config: TaskConfig, server_configs: Sequence[APIServerConfig], slurm: bool = False, testing: bool = False
    ) -> None:
        # BaseEnv prints the configuration, which therefore lacks the key; OpenAI's client insists on one
        key = os.environ.get("OFFLINE_GRPO_SERVER_KEY") or "none"
        common = {"tokenizer_name": config.tokenizer_name, "server_type": "vllm"}
        servers = [server.model_copy(update={**common, "api_key": server.api_key or key}) for server in server_configs]
        super().__init__(config, servers, slurm, testing)
        self.config: TaskConfig = config
        self._server_urls = [server.base_url or "" for server in servers]
        self._position = -1  # not known yet
        self._scores: list[Score] = []
        self._eval_metrics: dict[str, float] = {}

    @classmethod
    def config_init(cls) -> tuple[TaskConfig, list[APIServerConfig]]:
        """Defaults: those of the run whose folder OFFLINE_GRPO_RUN names, or of `run_grpo.py` without arguments."""
        # What a run that starts this environment says, in variables; else the run's defaults.
        run = run_config(None, "")
        model = os.environ.get("OFFLINE_GRPO_MODEL", run.model.train_id or "Qwen/Qwen2.5-1.5B-Instruct")
        config = TaskConfig(
            tokenizer_name=model,
            rollout_server_url=os.environ.get("OFFLINE_GRPO_API_URL", "http://127.0.0.1:8000"),
            group_size=run.data.rollouts_per_problem,
            max_token_length=run.generation["max_new_tokens"],
            temperature=run.generation["temperature"],
            eval_temperature=run.eval.temperature if run.eval.do_sample else 0.0,
            stop=list(run.generation["stop"]),
            total_steps=10**9,
            wandb_name=cls.name,
        )
        server = APIServerConfig(
            base_url=os.environ.get("OFFLINE_GRPO_SERVER_URL", "http://127.0.0.1:9001") + "/v1",
            model_name=os.environ.get("OFFLINE_GRPO_SERVED_NAME", model),
            server_type="vllm",
        )
        return config, [server]  # not in a list, a server would be one of a cluster

    async def setup(self) -> None:
        self._run = run = run_config(self.config.task, self.config.task_overrides)
        use_template(self.tokenizer, run.model.chat_template)
        self._codec = codec_of(run, self.tokenizer, generation_config_of(str(self.config.tokenizer_name)))
        names = ("include_stop_str_in_output", "skip_special_tokens")
        how = {name: run.generation[name] for name in names if name in run.generation}
        self._sampling = SamplingParams(self.config.max_token_length, stop=tuple(self.config.stop), **how)
        # Scores are computed in processes of their own, as in a run.
        task = build_task(run.task)
        fix = "is played in turns, and an Atropos environment asks once; train on it without rollouts=atropos"
        require(not TaskFacts.of(task).plays, "task", run.task["_target_"], fix)
        self._task = isolated(task, run, None, ExitStack())  # its processes end with this one
        # The problems are those of a run with these settings, without those that it evaluates on.
        held_out = held_out_problems(self._task, run)
        train = without_held_out(train_problems(self._task, run), self._task, held_out)
        self._held_out = without_long(held_out, self._codec, run.data, "held-out")
        self._problems = without_long(train, self._codec, run.data, "training")

    async def setup_wandb(self) -> None:
        """Comes before registering, which would fail where there is no API yet."""
        await wait_for(f"{self.config.rollout_server_url}/info")
        for url in self._server_urls:
            await wait_for(url.removesuffix("/v1") + "/health")
        await super().setup_wandb()

    async def get_status(self) -> None:  # type: ignore[override] # the original is decorated
        """Registers once more with an API that was started again, and knows nobody."""
        try:
            await super().get_status()
        except RetryError:
            await wait_for(f"{self.config.rollout_server_url}/info")
            await self.register_env()
            await self.get_server_info()
            await super().get_status()

    async def get_next_item(self) -> Problem:
        """The next problem. The order is that of a run with this seed; the trainer's step says how far it is."""
        if self._position < 0:
            self._position = max(0, self.curr_step * self.config.batch_size // self.config.group_size)
        epoch, offset = divmod(self._position, len(self._problems))
        self._position += 1
        if self._run.data.shuffle:
            offset = permutation(len(self._problems), derive_seed(self._run.seed, "order", epoch))[offset]
        return self._problems[offset]

    async def collect_trajectories(self, item: Problem) -> tuple[ScoredDataGroup | None, list[Any]]:
        """One group. None if the prompt leaves no room below the trainer's limit."""
        # Ask, score, and keep the scores for W&B.
        prompt_ids, outputs, logprobs = await self._ask(item, self.config.group_size, self.config.temperature, "train")
        if not outputs:
            return None, []
        scores = await self._judge(item, outputs)
        self._scores += [score for score in scores if score.is_scored]
        if not all(score.is_scored for score in scores):  # run-api's batches want groups of one size
            return None, []
        num_prompt = len(prompt_ids)
        group = ScoredDataGroup(
            tokens=[prompt_ids + token_ids for token_ids in outputs],
            masks=[[IGNORED] * num_prompt + token_ids for token_ids in outputs],
            scores=[score.reward for score in scores],
            inference_logprobs=[[NO_LOGPROB] * num_prompt + values for values in logprobs],
            generation_params={"temperature": self.config.temperature},
        )  # type: ignore[typeddict-item] # BaseEnv looks into fields that are there, and some must then not be None
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        started = time.time()
        temperature = self.config.eval_temperature

        async def answer(problem: Problem) -> list[Score]:
            _, outputs, _ = await self._ask(problem, 1, temperature, "eval")
            scores = await self._judge(problem, outputs)
            return [score if score.is_scored else replace(score, reward=0.0) for score in scores]

        # One answer to each held-out problem, all at once.
        scores = [score for scores in await asyncio.gather(*map(answer, self._held_out)) for score in scores]
        self._eval_metrics = means("eval", scores) | {"eval/num_problems": float(len(scores))}
        print(" ".join(f"{name}={value:.4g}" for name, value in self._eval_metrics.items()), flush=True)
        if self.config.data_dir_to_save_evals is not None:
            parameters = {"temperature": temperature, "max_tokens": self.config.max_token_length}
            times: dict[str, Any] = {"start_time": started, "end_time": time.time()}
            await self.evaluate_log(self._eval_metrics, **times, generation_parameters=parameters)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        ours = means("train", self._scores) | self._eval_metrics
        self._scores, self._eval_metrics = [], {}
        await super().wandb_log({**(wandb_metrics or {}), **ours})

    async def _ask(
        self, problem: Problem, num_completions: int, temperature: float, split: str
    ) -> tuple[list[int], list[list[int]], list[list[float]]]:
        """Prompt, completions and logprobs, as the server has them; no completions if the prompt is too long."""
        prompt_ids = self._codec.encode_with(problem.messages, problem.pictures, problem.tools).ids
        max_tokens = self.config.max_token_length
        if self.max_token_len > 0:  # BaseEnv drops groups that reach the limit
            max_tokens = min(max_tokens, self.max_token_len - 1 - len(prompt_ids))
        if max_tokens < 1:
            return prompt_ids, [], []
        how: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "split": split}
        how |= {"stop": self.config.stop} if self.config.stop else {}
        request = self.server.tokens_and_logprobs_completion(input_ids=prompt_ids, n=num_completions, **how)
        prompt, outputs, logprobs, _ = await request
        return prompt, outputs, logprobs

    async def _judge(self, problem: Problem, outputs: Sequence[Sequence[int]]) -> list[Score]:
        texts = [self._codec.judged(token_ids, self._sampling) for token_ids in outputs]
        return await asyncio.to_thread(Judgement(self._task, problem, texts).scores)


@cache
def run_config(task: str | None, task_overrides: str) -> RunConfig:
    """The settings of the run that started this environment; where it was started by hand, or another task is named,
    those of a new run. `task_overrides` need no `task.` before settings of the task.
    """
    conf.register()
    words = [
        word if "." in word.partition("=")[0] or word.startswith("seed=") else f"task.{word}"
        for word in shlex.split(task_overrides)
    ]
    stored = Path(os.environ.get("OFFLINE_GRPO_RUN", ""), ".hydra", "config.yaml")
    if task is None and stored.is_file():
        base = OmegaConf.load(stored)
        assert isinstance(base, DictConfig)
        base.merge_with_dotlist(words)
        return conf.typed(base)
    return conf.typed(conf.composed([f"task={task or 'arithmetic'}", *conf.readable(words)]))


async def wait_for(url: str) -> None:
    """Until something answers at `url`; prints once what is waited for."""
    is_told = False
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url):
                    return
            except aiohttp.ClientError as error:
                if not is_told:
                    print(f"waiting for {url}: {error}", flush=True)
                is_told = True
                await asyncio.sleep(1)


def means(prefix: str, scores: Sequence[Score]) -> dict[str, float]:
    """Mean reward and share of right answers; empty for no scores."""
    if not scores:
        return {}
    rewards, right = sum(score.reward for score in scores), sum(score.is_correct for score in scores)
    return {f"{prefix}/reward_mean": rewards / len(scores), f"{prefix}/percent_correct": right / len(scores)}


if __name__ == "__main__":
    TaskEnvironment.cli()
