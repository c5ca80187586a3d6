"""A run of `learning.py` by TRL's GRPOTrainer: FOLDER/curve.json, written again at each evaluation.

    python benchmarks/learning_trl.py FOLDER SETTINGS        # JSON, see `Settings`

TRL's defaults (fp32 weights under bf16 autocast, vLLM in the process) with our batch, learning rate, schedule, order of
problems and correction for the engine. Without a reward, the class that its rows name is TRL's `environment_factory`.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import learning_tasks
from transformers import TrainerCallback
from trl_arm import IN_PROCESS, make_trainer, opened, reader_of, with_pictures

from offline_grpo.rollouts.on_policy import permutation
from offline_grpo.seeding import derive_seed
from offline_grpo.task.rewards import imported

RESULT_TOKENS = 32
"""Of two results of a calculation, which TRL counts as completion and our runs do not."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What both trainers are told."""

    model: str
    data: str
    reward: str | None
    seed: int
    lr: float
    iterations: int
    updates: int
    prompts: int
    group: int
    tokens: int
    eval_interval: int
    eval_problems: int
    eval_samples: int
    kv_bytes: int
    max_len: int
    threshold: float
    microbatch: int
    on_cpu: bool


class HeldOut(TrainerCallback):
    """Evaluates every few iterations, and times what lies between; an iteration may have several steps."""

    def __init__(self, settings: Settings, tokenizer: Any, path: Path) -> None:
        self.settings, self.tokenizer, self.path = settings, tokenizer, path
        rows = rows_of(settings, "test")[: settings.eval_problems]
        self.rows = [row for row in rows for _ in range(settings.eval_samples)]
        self.curve: dict[str, list[float]] = {"steps": [], "pass@1": [], "seconds": [], "eval_s": []}
        self.iteration_s: list[float] = []
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        iteration, rest = divmod(state.global_step, self.settings.updates)
        if rest:
            return
        if self.trainer.use_vllm:  # which the evaluation would do otherwise, outside of the iteration's time
            self.trainer.vllm_generation.sync_weights()
            self.trainer._last_loaded_step = state.global_step
        self.iteration_s.append(time.perf_counter() - self.since)
        self.since = time.perf_counter()
        if iteration % self.settings.eval_interval == 0 or iteration == self.settings.iterations:
            self.evaluate(iteration)

    def evaluate(self, iteration: int) -> None:
        started = time.perf_counter()
        right = self.judged() if self.settings.reward else self.played()
        self.curve["steps"].append(iteration)
        self.curve["pass@1"].append(sum(right) / len(right))
        self.curve["seconds"].append(sum(self.iteration_s))
        self.curve["eval_s"].append(time.perf_counter() - started)
        self.path.write_text(json.dumps({**self.curve, "iteration_s": self.iteration_s}))
        self.since = time.perf_counter()

    def judged(self) -> list[bool]:
        """Which completions of the held-out prompts are right."""
        asked = self.trainer._tokenize_prompts([with_pictures(row) for row in self.rows])  # ids, pictures, tensors
        completions = self.trainer._generate_single_turn(*asked, 1)[0]  # after a push, if there was a step
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        reward = getattr(learning_tasks, self.settings.reward or "")
        return [reward(text, row["answer"]) >= 1 for text, row in zip(texts, self.rows, strict=True)]

    def played(self) -> list[bool]:
        """Which episodes of the held-out problems are solved: as the trainer plays those that it trains on."""
        trainer, [pool] = self.trainer, self.trainer._environment_pool.values()
        worlds = [type(pool[0])() for _ in self.rows]
        names = [tool.__name__ for tool in trainer.tools]
        trainer.environments, trainer._batch_environments = worlds, [None] * len(worlds)
        trainer._sync_tool_dicts = [{name: getattr(world, name) for name in names} for world in worlds]
        trainer._async_tool_dicts = [{} for _ in worlds]
        prompts = []
        for world, row in zip(worlds, self.rows, strict=True):
            *before, last = row["prompt"]
            prompts.append([*before, {**last, "content": last["content"] + (world.reset(**row) or "")}])
        is_training = trainer.model.training
        trainer.model.eval()
        trainer._generate(prompts)
        trainer.model.train(is_training)
        return [world.get_reward() >= self.settings.threshold for world in worlds]


def rows_of(settings: Settings, split: str) -> list[dict[str, Any]]:
    """Problems, each with its messages as `prompt`."""
    rows = [json.loads(line) for line in (Path(settings.data) / f"{split}.jsonl").read_text().splitlines()]
    for row in rows:
        prompt = row.get("messages") or row["prompt"]
        row["prompt"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if "images" in row:
            row["images"] = opened(row["images"], Path(settings.data))
    return rows


def in_our_order(rows: Sequence[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """As many as all iterations take, in the order in which a run of ours with this seed has them."""
    epochs = -(-settings.iterations * settings.prompts // len(rows))
    orders = [permutation(len(rows), derive_seed(settings.seed, "order", epoch)) for epoch in range(epochs)]
    return [rows[i] for order in orders for i in order][: settings.iterations * settings.prompts]


def with_kv_cache(num_bytes: int) -> None:
    """Let vLLM take so much memory. By itself it measures what is left on the card, which other runs share."""
    from trl.generation import vllm_generation

    module: Any = vllm_generation
    module.LLM = functools.partial(module.LLM, kv_cache_memory_bytes=num_bytes)


def check_prompt(trainer: Any, row: dict[str, Any]) -> None:
    """Raise AssertionError unless the first prompt that TRL tokenizes is the one of our runs."""
    trainer._batch_environments = [None]
    theirs = trainer._tokenize_prompts([trainer.train_dataset[0]["prompt"]])[0][0]
    how: dict[str, Any] = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}
    ours = trainer._tokenizer.apply_chat_template(row["prompt"], tools=json.loads(row["schemas"]), **how)
    assert theirs == ours, f"prompts differ: {trainer._tokenizer.decode(theirs)}, {trainer._tokenizer.decode(ours)}"


def main() -> None:
    folder, settings = Path(sys.argv[1]), Settings(**json.loads(sys.argv[2]))
    rows = in_our_order(rows_of(settings, "train"), settings)
    score: Any = getattr(learning_tasks, settings.reward or "", None)

    def reward(completions: Any, answer: Any, **_: Any) -> list[float | None]:
        return [score(completion[0]["content"], each) for completion, each in zip(completions, answer, strict=True)]

    on_gpu = {**IN_PROCESS, "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": settings.max_len}
    on_gpu |= {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    if "images" in rows[0]:  # vLLM counts no part of a picture that this processor does not cut in tiles, and ends
        on_gpu = {"use_cpu": False, "bf16": True}
    if not settings.on_cpu:
        with_kv_cache(settings.kv_bytes)
    tokenizer = reader_of(settings.model, rows)
    own: dict[str, Any] = {}
    if score is None:
        from trl.chat_template_utils import qwen3_template

        episodes = learning_tasks.episodes(Path(settings.data))
        tokenizer.chat_template = (Path(settings.data) / learning_tasks.TEMPLATE).read_text()
        tokenizer.response_template = qwen3_template  # how calls are read, which TRL knows of its own templates alone
        own["environment"] = imported(episodes["world"], "world", "class")
        own["max_tool_calling_iterations"] = episodes["limits"]["max_turns"] - 1
        if not settings.on_cpu:
            own["generation_kwargs"] = {"max_tokens": episodes["limits"]["max_turn_tokens"]}  # of one reply
    held_out = HeldOut(settings, tokenizer, folder / "curve.json")
    num_sequences = settings.prompts * settings.group
    held_out.trainer = make_trainer(
        settings.model,
        tokenizer,
        rows,
        reward if score else None,
        [held_out],
        per_device_train_batch_size=settings.microbatch,
        gradient_accumulation_steps=num_sequences // settings.updates // settings.microbatch,
        steps_per_generation=num_sequences // settings.microbatch,
        num_generations=settings.group,
        num_generations_eval=1,
        max_completion_length=settings.tokens + (0 if score else RESULT_TOKENS),
        learning_rate=settings.lr,
        logging_steps=settings.updates,
        max_steps=settings.iterations * settings.updates,
        seed=settings.seed,
        **own,
        **({} if settings.on_cpu else on_gpu),
    )
    if score is None:
        check_prompt(held_out.trainer, rows[0])
    held_out.trainer.train()


if __name__ == "__main__":
    main()
