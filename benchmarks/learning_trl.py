"""A run of `learning.py` by TRL's GRPOTrainer: FOLDER/curve.json, written again at each evaluation.

    python benchmarks/learning_trl.py FOLDER SETTINGS        # JSON, see `Settings`

TRL's defaults (fp32 weights under bf16 autocast, vLLM in the process) with our batch, learning rate, schedule and
correction for the engine.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import learning_tasks
from transformers import AutoTokenizer, TrainerCallback
from trl_arm import IN_PROCESS, make_trainer


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What both trainers are told."""

    model: str
    data: str
    reward: str
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
    microbatch: int
    on_cpu: bool


class HeldOut(TrainerCallback):
    """Evaluates every few iterations, and times what lies between; an iteration may have several steps."""

    def __init__(self, settings: Settings, tokenizer: Any, path: Path) -> None:
        self.settings, self.tokenizer, self.path = settings, tokenizer, path
        rows = [json.loads(line) for line in (Path(settings.data) / "test.jsonl").read_text().splitlines()]
        self.rows = [row for row in rows[: settings.eval_problems] for _ in range(settings.eval_samples)]
        self.curve: dict[str, list[float]] = {"steps": [], "pass@1": [], "seconds": [], "eval_s": []}
        self.iteration_s: list[float] = []
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        iteration, rest = divmod(state.global_step, self.settings.updates)
        if rest:
            return
        self.iteration_s.append(time.perf_counter() - self.since)
        self.since = time.perf_counter()
        if iteration % self.settings.eval_interval == 0:
            self.evaluate(iteration)

    def evaluate(self, iteration: int) -> None:
        started = time.perf_counter()
        prompts = [[{"role": "user", "content": row["prompt"]}] for row in self.rows]
        ids = self.trainer._tokenize_prompts(prompts)[0]
        completions = self.trainer._generate_single_turn(ids, None, {}, 1)[0]  # after a push, if there was a step
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        reward = getattr(learning_tasks, self.settings.reward)
        right = [reward(text, row["answer"]) >= 1 for text, row in zip(texts, self.rows, strict=True)]
        self.curve["steps"].append(iteration)
        self.curve["pass@1"].append(sum(right) / len(right))
        self.curve["seconds"].append(sum(self.iteration_s))
        self.curve["eval_s"].append(time.perf_counter() - started)
        self.path.write_text(json.dumps({**self.curve, "iteration_s": self.iteration_s}))
        self.since = time.perf_counter()


def with_kv_cache(num_bytes: int) -> None:
    """Let vLLM take so much memory. By itself it measures what is left on the card, which other runs share."""
    from trl.generation import vllm_generation

    module: Any = vllm_generation
    module.LLM = functools.partial(module.LLM, kv_cache_memory_bytes=num_bytes)


def main() -> None:
    folder, settings = Path(sys.argv[1]), Settings(**json.loads(sys.argv[2]))
    rows = [json.loads(line) for line in (Path(settings.data) / "train.jsonl").read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    score = getattr(learning_tasks, settings.reward)

    def reward(completions: Any, answer: Any, **_: Any) -> list[float | None]:
        return [score(completion[0]["content"], each) for completion, each in zip(completions, answer, strict=True)]

    on_gpu = {**IN_PROCESS, "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": 512}
    on_gpu |= {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    if not settings.on_cpu:
        with_kv_cache(settings.kv_bytes)
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.model)
    held_out = HeldOut(settings, tokenizer, folder / "curve.json")
    num_sequences = settings.prompts * settings.group
    held_out.trainer = make_trainer(
        settings.model,
        tokenizer,
        rows,
        reward,
        [held_out],
        per_device_train_batch_size=settings.microbatch,
        gradient_accumulation_steps=num_sequences // settings.updates // settings.microbatch,
        steps_per_generation=num_sequences // settings.microbatch,
        num_generations=settings.group,
        max_completion_length=settings.tokens,
        learning_rate=settings.lr,
        logging_steps=settings.updates,
        max_steps=settings.iterations * settings.updates,
        shuffle_dataset=True,
        seed=settings.seed,
        **({} if settings.on_cpu else on_gpu),
    )
    held_out.trainer.train()


if __name__ == "__main__":
    main()
