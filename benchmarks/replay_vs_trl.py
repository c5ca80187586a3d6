"""Training throughput on stored rollouts with a skewed length distribution: our updater against TRL's GRPOTrainer, on a CPU.

    python benchmarks/replay_vs_trl.py

A Qwen2 with random weights (H=256, 4 layers, V=32000, tied embeddings; 11 million parameters in float32) makes one update per batch of 32
stored completions, whose lengths are geometrically distributed. The loss is dapo without KL and the optimizer is AdamW. Neither arm
recomputes activations. TRL gets the rollouts from a `rollout_func` and does the rest itself (padding to the longest completion, scoring,
loss, step). In both arms, the time of an update runs from the stored token ids to the changed weights.

Importance correction: TRL corrects for the sampler's probabilities only if vLLM samples. With a `rollout_func` it trains on ratio 1 and
ignores the stored logprobs, so our arm uses importance_correction=none: both take the policy's own logprobs as the old ones.

Before the timing, both arms make one update from the same weights on the same batch: loss, gradient norm and the whole gradient must agree
to 1e-5. Both TRL and our arm use the fastest microbatch size of several that were tried.
Memory is the largest increase of the process's resident memory during one timed update (Linux), with the chosen microbatch sizes.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from common import Target, alternate, write_result
from our_trainer import ADAMW, make_updater
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl_arm import WARMUP_BLOCKS, Interleave, MethodTimes, make_trainer

from offline_grpo.model.char_tokenizer import build_char_tokenizer
from offline_grpo.model.layouts.padded import Padded
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import Scoring
from offline_grpo.train.experience import prepare_batch
from offline_grpo.types import Completion, FinishReason, Problem, Rollout, RolloutGroup, Score

VOCAB, GROUP_SIZE, GROUPS = 32000, 8, 4
MEAN_LENGTH, MAX_LENGTH, GATE = 100, 1024, 1e-5
LR = 1e-5
TRL_PHASES = ("_generate_and_score_completions", "compute_loss", "training_step")


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config)


def stored_rollouts(num_batches: int) -> list[list[RolloutGroup]]:
    """Per batch, 4 groups of 8 completions with geometric lengths of mean 100, truncated at 1024; prompts have 56 to 72 tokens."""
    rng = random.Random(0)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, VOCAB) for _ in range(length))

    def completion() -> Completion:
        length = min(MAX_LENGTH, 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / MEAN_LENGTH)))
        logprobs = tuple(-math.log(VOCAB) + 0.01 * rng.gauss(0, 1) for _ in range(length))
        return Completion(tokens(length), logprobs, FinishReason.STOP, (0,) * length)

    def group(index: int) -> RolloutGroup:
        prompt = tokens(rng.randint(56, 72))
        rollouts = [
            Rollout.of_one_turn(prompt, completion(), temperature=1.0, text="", score=Score(float(rng.random()), False, {}))
            for _ in range(GROUP_SIZE)
        ]
        return RolloutGroup(Problem(str(index), (), ""), tuple(rollouts))

    return [[group(batch * GROUPS + i) for i in range(GROUPS)] for batch in range(num_batches)]


class OurArm:
    def __init__(self, batches: Sequence[list[RolloutGroup]], *, tokens_per_microbatch: int) -> None:
        policy = Policy(Scoring(make_model(), Padded(), TiledHead(tile_width=None)), build_char_tokenizer(2048))
        self._batches = batches
        self.updater = make_updater(
            policy,
            precision="fp32",
            tokens_per_microbatch=tokens_per_microbatch,
            max_new_tokens=MAX_LENGTH,
            lr=LR,
            clip_high=0.2,
            checkpointing=False,
        )
        self._next = 0

    def update(self) -> dict[str, float]:
        """Make one update on the next stored batch."""
        batch, _, _ = prepare_batch(self._batches[self._next % len(self._batches)], self.updater, self.updater.config)
        assert batch is not None
        self._next += 1
        return self.updater.run(batch, iteration=self._next)


def trl_arm(batches: Sequence[list[RolloutGroup]], callbacks: list[Any], *, batch_size: int, num_updates: int) -> Any:
    """A trainer that makes `num_updates` updates on the stored batches in turn, `batch_size` sequences at a time."""
    rollouts = {group.problem.problem_id: group.rollouts for groups in batches for group in groups if group.problem is not None}
    rows = [{"prompt": problem_id} for problem_id in rollouts]

    def stored(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        chosen = [rollouts[prompt][i % GROUP_SIZE] for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [list(r.token_ids[: -r.num_sampled]) for r in chosen],
            "completion_ids": [list(r.token_ids[-r.num_sampled :]) for r in chosen],
            "logprobs": [list(r.logprobs[-r.num_sampled :]) for r in chosen],
            "stored_reward": [r.score.reward for r in chosen],
        }

    return make_trainer(
        make_model(),
        build_char_tokenizer(2048),
        rows,
        lambda stored_reward, **_: stored_reward,
        callbacks,
        rollout_func=stored,
        max_steps=num_updates,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=GROUPS * GROUP_SIZE // batch_size,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_LENGTH,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        scale_rewards="group",
        learning_rate=LR,
        weight_decay=0.0,
        adam_beta1=ADAMW["beta1"],
        adam_beta2=ADAMW["beta2"],
        max_grad_norm=1.0,
        logging_steps=1,
    )


def check_equal(batches: Sequence[list[RolloutGroup]], *, batch_size: int, tokens_per_microbatch: int) -> dict[str, float]:
    """Relative differences in loss, gradient norm and gradient between one update of both arms; raises if one exceeds GATE."""
    ours = OurArm(batches, tokens_per_microbatch=tokens_per_microbatch)
    trainer = trl_arm(batches, [], batch_size=batch_size, num_updates=1)
    trainer.create_optimizer()
    gradients: dict[str, Tensor] = {}
    for name, optimizer, model in (("ours", ours.updater.optimizer, ours.updater.policy.model), ("trl", trainer.optimizer, trainer.model)):
        optimizer.register_step_pre_hook(lambda *_, name=name, model=model: gradients.update({name: flat_gradient(model)}))
    metrics = ours.update()
    trainer.train()
    logged = trainer.state.log_history[0]
    differences = {
        "loss": abs(metrics["loss_total"] / logged["loss"] - 1),
        "gradient_norm": abs(metrics["grad_norm"] / logged["grad_norm"] - 1),
        "gradient": float((gradients["ours"] - gradients["trl"]).norm() / gradients["trl"].norm()),
    }
    if not max(differences.values()) <= GATE:
        raise AssertionError(f"the arms differ by more than {GATE}: {differences}")
    return differences


def flat_gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def seconds_by_microbatch(batches: Sequence[list[RolloutGroup]], args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Time the second update on the same batch with every candidate: sequences per backward pass for TRL, tokens for our arm."""

    def time_trl(batch_size: int) -> float:
        trainer = trl_arm(batches[:1], [], batch_size=batch_size, num_updates=2)
        steps_s = MethodTimes(trainer, ["training_step"]).seconds["training_step"]
        trainer.train()
        return sum(steps_s[len(steps_s) // 2 :])

    def time_ours(tokens_per_microbatch: int) -> float:
        ours = OurArm(batches[:1], tokens_per_microbatch=tokens_per_microbatch)
        return alternate({"ours": ours.update}, rounds=1).min_s("ours")

    return {
        "trl_sequences": {size: time_trl(size) for size in args.trl_batch_sizes},
        "our_tokens": {size: time_ours(size) for size in args.tokens_per_microbatch},
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--trl-batch-sizes", type=int, nargs="+", default=[4, 8, 32], help="candidates: sequences per backward pass")
    parser.add_argument("--tokens-per-microbatch", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="candidates for our arm")
    parser.add_argument("--batches", type=int, default=4, help="different batches of 32 rollouts")
    parser.add_argument("--blocks", type=int, default=4, help="timed updates per arm")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    batches = stored_rollouts(args.batches)
    candidates = seconds_by_microbatch(batches, args)
    batch_size, tokens_per_microbatch = (min(seconds, key=seconds.__getitem__) for seconds in candidates.values())
    differences = check_equal(batches, batch_size=batch_size, tokens_per_microbatch=tokens_per_microbatch)

    ours = OurArm(batches, tokens_per_microbatch=tokens_per_microbatch)
    interleave = Interleave(ours.update, updates_per_block=1)
    trainer = trl_arm(batches, [interleave], batch_size=batch_size, num_updates=args.blocks + WARMUP_BLOCKS)
    phases = MethodTimes(trainer, TRL_PHASES)
    trainer.train()

    lengths = [[(len(r.token_ids) - r.num_sampled, r.num_sampled) for group in groups for r in group.rollouts] for groups in batches]
    timed = [lengths[(WARMUP_BLOCKS + i) % len(lengths)] for i in range(args.blocks)]
    num_trained = sum(completion for batch in timed for _, completion in batch)
    num_tokens = sum(prompt + completion for batch in timed for prompt, completion in batch)
    timings = interleave.timings
    total_s = {arm: sum(seconds) for arm, seconds in timings.seconds.items()}
    per_update = {name: sum(seconds) / (args.blocks + WARMUP_BLOCKS) for name, seconds in phases.seconds.items()}
    measured = {
        "throughput_ratio": 1 / timings.ratio("ours", "trl"),
        **{f"{arm}_trained_tokens_per_s": num_trained / total_s[arm] for arm in total_s},
        **{f"{arm}_tokens_per_s": num_tokens / total_s[arm] for arm in total_s},
        "memory_ratio": interleave.peak_extra_bytes("ours") / interleave.peak_extra_bytes("trl"),
        **{f"relative_difference_{key}": value for key, value in differences.items()},
    }
    write_result(
        "replay_vs_trl",
        claim="On a CPU, training on stored rollouts of skewed length handles 2.5 times the tokens per second of TRL's GRPOTrainer.",
        targets=[Target("throughput_ratio", ">=", 2.5)],
        settings={**vars(args), "trl": version("trl"), "lengths": lengths},
        measured={key: float(f"{value:.4g}") for key, value in measured.items()},
        details={
            "seconds_by_microbatch_size": candidates,
            "chosen_microbatch_size": {"trl_sequences": batch_size, "our_tokens": tokens_per_microbatch},
            "trl_seconds_per_update": per_update,
            "peak_extra_bytes": {arm: interleave.peak_extra_bytes(arm) for arm in total_s},
            "timings": timings.summary("trl"),
        },
    )


if __name__ == "__main__":
    main()
