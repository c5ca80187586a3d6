"""GRPO in one file, made of the project's own parts. Read it from top to bottom; then read `train/loop.py`.

    uv run examples/grpo_in_one_file.py

A tiny model learns to add, from weights that come with the package. What `run_grpo.py` does beyond this: other tasks,
models, losses and servers by configuration, evaluation, checkpoints, several processes, a reference for a KL term, and
a proof that the engine serves the newest weights.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offline_grpo.disk import models_cache
from offline_grpo.generation.sample import sample_in_order
from offline_grpo.generation.transformers_client import TransformersClient
from offline_grpo.loss.grpo import GRPO
from offline_grpo.model.layouts import Padded
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import Scoring
from offline_grpo.model.text import TokenizerCodec
from offline_grpo.model.tiny import TinyModel
from offline_grpo.seeding import derive_seed
from offline_grpo.task.arithmetic import Arithmetic
from offline_grpo.train.advantage import group_advantages
from offline_grpo.train.batch import build_batch, totals_of, with_advantages
from offline_grpo.types import RolloutGroup, SamplingParams, Split

NUM_ITERATIONS = 30
PROBLEMS = 16
"""Problems per iteration, each with ..."""
GROUP_SIZE = 16
"""... so many completions, whose rewards are compared with each other."""
UPDATES = 2
"""Optimizer steps per iteration, on a half of its completions each."""
LEARNING_RATE = 3e-4
MAX_GRAD_NORM = 1.0
SEED = 0


def main(num_iterations: int = NUM_ITERATIONS, cache: Path | None = None, warm_start_steps: int = 1000) -> list[float]:
    """Train, and print a line per iteration. Returns the mean reward of each."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    # A task has problems, and judges what a model says to them: 1 for a right answer, 0.1 for any number.
    task = Arithmetic(max_operand=49, operations=["+"], eval_frac=0.2, prompt_template="{a}{op}{b}=", format_weight=0.1)
    problems = task.problems(Split.TRAIN)

    # The policy: a causal language model, and how its logprobs are computed.
    folder = tiny_model(warm_start_steps).prepare(task, cache or models_cache(None))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    policy = Policy(Scoring(model, Padded(), TiledHead(tile_width=None)), tokenizer)
    masters = policy.make_masters()  # what the optimizer steps on: fp32 copies, where the model has 16 bits
    optimizer = torch.optim.AdamW(masters.parameters.values(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    # The engine that samples, here the same module; elsewhere a server that is sent the weights.
    codec = TokenizerCodec(tokenizer, [tokenizer.eos_token_id])  # from messages to tokens, and back to text
    client = TransformersClient(model=model, tokenizer=tokenizer, batch_size=PROBLEMS * GROUP_SIZE)
    sampling = SamplingParams(max_new_tokens=8, temperature=1.0)

    loss = GRPO(
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        ratio_reference="old",  # the ratio is to the policy before the iteration's first update
        kl_coef=0.0,  # above 0: `TokenBatch.ref_logprobs` come from a frozen copy of the model
        kl_estimator="k3",
        kl_placement="loss",
        kl_importance_weight=True,
        entropy_coef=0.0,
        importance_correction="token_truncate",  # engine and trainer may compute slightly different probabilities
        importance_cap=2.0,
        importance_floor=0.0,
        off_policy_mask=None,
        geometric_bounds=None,
    )

    rewards = []
    for iteration in range(num_iterations):
        # 1. Sample a group of completions of each problem, and score them.
        positions = range(iteration * PROBLEMS, (iteration + 1) * PROBLEMS)
        order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(SEED)).tolist()
        draws = [(problems[order[i % len(problems)]], derive_seed(SEED, "rollout", i)) for i in positions]
        groups = sample_in_order(client, task, codec, draws, sampling, group_size=GROUP_SIZE)
        rewards.append(fmean(rollout.score.reward for group in groups for rollout in group.rollouts))

        # 2. Rewards become advantages; the rest is one flat batch, a token after the other.
        groups, advantages = with_signal(groups)
        if not groups:
            continue
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        batch = with_advantages(build_batch(rollouts), advantages)  # [T]
        batch = batch.with_logprobs(old=policy.scoring.logprobs(batch))  # [T] nats, under the weights as they are

        # 3. Update the policy.
        metrics = {}
        for update in range(UPDATES):
            sequences = range(batch.num_sequences)[update::UPDATES]
            totals = totals_of(batch, sequences, max_new_tokens=sampling.max_new_tokens)
            part = batch.select(sequences)
            output = loss(policy.scoring(part), part, totals)
            output.loss.backward()
            masters.accumulate()  # gradients go to the masters
            grad_norm = torch.nn.utils.clip_grad_norm_(masters.parameters.values(), MAX_GRAD_NORM)
            if torch.isfinite(grad_norm):
                optimizer.step()
                masters.publish()  # masters, rounded, go to the model: the engine has them at once
            optimizer.zero_grad(set_to_none=True)
            metrics = output.metrics
        print(
            f"iteration {iteration + 1:3}  reward {rewards[-1]:.3f}  groups with signal {len(groups):2} of {PROBLEMS}  "
            f"ratio {metrics['ratio_mean']:.3f}  clipped {metrics['clip_frac']:.1%}  entropy {metrics['entropy']:.2f}"
        )
    return rewards


def with_signal(groups: list[RolloutGroup]) -> tuple[list[RolloutGroup], list[float]]:
    """The groups whose rewards differ, and the advantage of each of their rollouts: (reward - mean) / std of its group.
    A group of equal rewards has advantages of 0, and would move the policy nowhere.
    """
    rewards = [[rollout.score.reward for rollout in group.rollouts] for group in groups]
    pairs = zip(groups, group_advantages(rewards, scale="group"), strict=True)
    kept = [(group, own) for group, own in pairs if any(own)]
    return [group for group, _ in kept], [advantage for _, own in kept for advantage in own]


def tiny_model(warm_start_steps: int) -> TinyModel:
    """A Llama of characters; the values are those of conf/model/tiny.yaml."""
    return TinyModel(
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rope_theta=100.0,
        initializer_range=0.06,
        warm_start_steps=warm_start_steps,
        warm_start_batch_size=128,
        warm_start_lr=3e-3,
        noise_frac=0.5,
        seed=0,
    )


if __name__ == "__main__":
    main()
