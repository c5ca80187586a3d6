"""Training throughput on stored rollouts with a skewed length distribution: our updater against TRL's GRPOTrainer.

    python benchmarks/replay_vs_trl.py                   # on a CPU
    python benchmarks/replay_vs_trl.py --device cuda     # on one GPU of 80 GB, about three minutes
    # the GPU's arms on a CPU, about two minutes
    python benchmarks/replay_vs_trl.py --shape tiny --completions 16 --name /tmp/tiny

A model with random weights makes one update per batch of stored completions, whose lengths are geometrically
distributed. The loss is dapo without KL and the optimizer is AdamW. TRL gets the rollouts from a `rollout_func` and
does the rest itself (padding to the longest completion, scoring, loss, step). In both arms, the time of an update runs
from the stored token ids to the changed weights.

    cpu     a Qwen2 of 11 million parameters (H=256, 4 layers, V=32000, tied embeddings) in float32; neither arm
            recomputes activations
    cuda    Qwen3-0.6B's shape. TRL: bf16 weights and optimizer, with and without recomputation. Ours: bf16 weights,
            fp32 masters and
            optimizer, no recomputation; layout, compiled blocks and loss head are what a run chooses on that GPU by
            itself

Importance correction: TRL corrects for the sampler's probabilities only if vLLM samples. With a `rollout_func` it
trains on ratio 1 and ignores the stored logprobs, so our arm uses importance_correction=none: both take the policy's
own logprobs as the old ones.

Each candidate of an arm (how much a backward pass takes, and whether TRL recomputes) first makes two updates on one
batch, alone on the machine. The second gives its time and peak memory: on a CPU the increase of the process's resident
memory (Linux), on a GPU all that is in tensors. Candidates that run out of memory are passed over. The fastest of each
arm are compared, if their first updates, from the same weights, agree in loss, gradient norm and the whole gradient.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from common import Target, expect_made_up_logprobs, write_result
from our_trainer import ADAMW, make_updater
from shapes import SIZES
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl_arm import WARMUP_BLOCKS, Interleave, MethodTimes, Trial, fastest, make_trainer

from offline_grpo.model.device import torch_dtype
from offline_grpo.model.layouts import layout_named, layouts_for
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.policy import Policy
from offline_grpo.model.proof import settle_compile, settle_layout
from offline_grpo.model.scoring import Scoring
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.train.experience import prepare_batch
from offline_grpo.types import Completion, FinishReason, Problem, Rollout, RolloutGroup, Score

Batches = Sequence[Sequence[RolloutGroup]]
GROUP_SIZE, LR = 8, 1e-5


@dataclass(frozen=True)
class Setup:
    """What differs between a CPU, whose values are the defaults, and a GPU. The command line sets some of the
    fields.
    """

    device: str = "cpu"
    name: str = "replay_vs_trl"
    threads: int | None = 1  # None: as many as torch takes
    shape: str = "11m"
    precision: str = "fp32"
    layout: str = "padded"  # of our arm, a model.layout
    completions: int = 32  # of a batch
    prompt_tokens: tuple[int, int] = (56, 72)  # shortest and longest
    mean_length: int = 100
    max_length: int = 1024
    trl_batch_sizes: Sequence[int] = (4, 8, 32)
    trl_recomputed_batch_sizes: Sequence[int] = ()
    tokens_per_microbatch: Sequence[int] = (512, 1024, 2048, 4096)
    batches: int = 4
    blocks: int = 4
    number_gate: float = 1e-5  # how far loss and gradient norm of the arms' first updates may be apart, relative
    gradient_gate: float = 1e-5  # the same for the whole gradient


ON_GPU = Setup(
    device="cuda",
    name="h100/replay_vs_trl",
    threads=None,
    shape="0.6b",
    precision="bf16",
    layout="auto",
    completions=64,
    prompt_tokens=(200, 200),
    mean_length=600,
    max_length=4096,
    trl_batch_sizes=(4, 8),
    trl_recomputed_batch_sizes=(8, 32),
    tokens_per_microbatch=(16384,),
    blocks=2,
    number_gate=0.02,  # TRL's gradient norm is a bf16 number
    # rounding alone: 0.02 on a CPU, through 28 layers; without one completion of 64: 0.3; see also model/proof.py
    gradient_gate=0.06,
)


def make_model(setup: Setup) -> PreTrainedModel:
    """The same weights each time."""
    torch.manual_seed(0)
    with torch.device(setup.device):
        return AutoModelForCausalLM.from_config(copy.deepcopy(SIZES[setup.shape]), dtype=torch_dtype(setup.precision))


def stored_rollouts(setup: Setup) -> Batches:
    """Batches of groups of 8 completions of random tokens, whose geometric lengths are truncated."""
    rng, vocab_size = random.Random(0), SIZES[setup.shape].vocab_size

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(10, vocab_size) for _ in range(length))

    def completion() -> Completion:
        length = min(setup.max_length, 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / setup.mean_length)))
        logprobs = tuple(-math.log(vocab_size) + 0.01 * rng.gauss(0, 1) for _ in range(length))
        return Completion(tokens(length), logprobs, FinishReason.STOP, (0,) * length)

    def group(index: int) -> RolloutGroup:
        prompt = tokens(rng.randint(*setup.prompt_tokens))
        rollouts = [
            Rollout.of_one_turn(
                prompt, completion(), temperature=1.0, text="", score=Score(float(rng.random()), False, {})
            )
            for _ in range(GROUP_SIZE)
        ]
        return RolloutGroup(Problem(str(index), (), ""), tuple(rollouts))

    num_groups = setup.completions // GROUP_SIZE
    return [[group(batch * num_groups + i) for i in range(num_groups)] for batch in range(setup.batches)]


class OurArm:
    def __init__(self, setup: Setup, batches: Batches, *, tokens_per_microbatch: int) -> None:
        device, layout = torch.device(setup.device), layout_named(setup.layout)
        first_layout = layouts_for(layout, device, torch_dtype(setup.precision))[0]
        scoring = Scoring(make_model(setup), first_layout, TiledHead(tile_width=None, kept_gib=3.0))
        settle_layout(scoring, layout, device)
        settle_compile(scoring, "auto", device)
        self._batches = itertools.cycle(batches)
        self.updater = make_updater(
            Policy(scoring, build_char_tokenizer(2048)),
            precision=setup.precision,
            tokens_per_microbatch=tokens_per_microbatch,
            max_new_tokens=setup.max_length,
            lr=LR,
            clip_high=0.2,
            checkpointing=False,
        )

    def update(self) -> dict[str, float]:
        """Make one update on the next stored batch."""
        batch, _, _ = prepare_batch(next(self._batches), self.updater, self.updater.config)
        assert batch is not None
        return self.updater.run(batch, iteration=0)

    def described(self) -> dict[str, Any]:
        """What it has chosen by itself."""
        scoring = self.updater.policy.scoring
        return {
            "layout": type(scoring.layout).__name__,
            "compiled": any(m._compiled_call_impl is not None for m in scoring.modules()),
        }


def trl_arm(
    setup: Setup, batches: Batches, callbacks: list[Any], *, batch_size: int, recomputed: bool, num_updates: int
) -> Any:
    """A trainer that makes `num_updates` updates on the stored batches in turn, `batch_size` sequences at a time."""
    rollouts = {
        group.problem.problem_id: group.rollouts for groups in batches for group in groups if group.problem is not None
    }
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
        make_model(setup),
        build_char_tokenizer(2048),
        rows,
        lambda stored_reward, **_: stored_reward,
        callbacks,
        rollout_func=stored,
        use_cpu=setup.device == "cpu",
        bf16=setup.precision == "bf16",
        gradient_checkpointing=recomputed,
        max_steps=num_updates,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=setup.completions // batch_size,
        num_generations=GROUP_SIZE,
        max_completion_length=setup.max_length,
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


def try_trl(setup: Setup, batches: Batches, **settings: Any) -> Trial:
    trial = Trial(settings)
    trainer = trl_arm(setup, batches[:1], [trial], num_updates=2, **settings)
    trainer.create_optimizer()
    trial.keep_gradient(trainer.optimizer, trainer.model.parameters())
    trainer.train()
    trial.loss, trial.gradient_norm = (trainer.state.log_history[0][key] for key in ("loss", "grad_norm"))
    return trial


def try_ours(setup: Setup, batches: Batches, **settings: Any) -> Trial:
    trial = Trial(settings)
    ours = OurArm(setup, batches[:1], **settings)
    trial.keep_gradient(ours.updater.optimizer, ours.updater.policy.masters.parameters.values())
    metrics = []
    for _ in range(2):
        metrics.append(ours.update())
        trial.on_step_end()
    trial.loss, trial.gradient_norm = metrics[0]["loss_total"], metrics[0]["grad_norm"]
    return trial


def check_equal(setup: Setup, ours: Trial, trl: Trial) -> dict[str, float]:
    """Relative differences between the first updates of both arms; raises if one exceeds its gate."""
    differences = ours.differences_from(trl)
    gates = {"loss": setup.number_gate, "gradient_norm": setup.number_gate, "gradient": setup.gradient_gate}
    if not all(differences[name] <= gate for name, gate in gates.items()):
        raise AssertionError(f"the arms differ by more than {gates}: {differences}")
    return differences


def parse_args() -> Setup:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, argument_default=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--shape", choices=list(SIZES), help="of the model, see shapes.py; all else is as on a GPU then"
    )
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--completions", type=int, help="per update")
    parser.add_argument("--trl-batch-sizes", type=int, nargs="*", help="candidates: sequences per backward pass")
    parser.add_argument(
        "--trl-recomputed-batch-sizes", type=int, nargs="*", help="the same with gradient checkpointing"
    )
    parser.add_argument("--tokens-per-microbatch", type=int, nargs="+", help="candidates for our arm")
    parser.add_argument("--batches", type=int, help="different batches of rollouts")
    parser.add_argument("--blocks", type=int, help="timed updates per arm, an even number")
    parser.add_argument("--name", help="of the result, below results/")
    given = vars(parser.parse_args())
    return replace(ON_GPU if given["device"] == "cuda" or "shape" in given else Setup(), **given)


def main() -> None:
    setup = parse_args()
    expect_made_up_logprobs()
    torch.set_num_threads(setup.threads or torch.get_num_threads())
    batches = stored_rollouts(setup)
    trl_candidates = [{"batch_size": size, "recomputed": False} for size in setup.trl_batch_sizes]
    trl_candidates += [{"batch_size": size, "recomputed": True} for size in setup.trl_recomputed_batch_sizes]
    our_candidates = [{"tokens_per_microbatch": size} for size in setup.tokens_per_microbatch]
    trl, trl_report = fastest(lambda **settings: try_trl(setup, batches, **settings), trl_candidates)
    ours, our_report = fastest(lambda **settings: try_ours(setup, batches, **settings), our_candidates)
    differences = check_equal(setup, ours, trl)

    arm = OurArm(setup, batches, **ours.settings)
    interleave = Interleave(arm.update, updates_per_block=1)
    trainer = trl_arm(setup, batches, [interleave], num_updates=setup.blocks + WARMUP_BLOCKS, **trl.settings)
    phases = MethodTimes(trainer, ("_generate_and_score_completions", "training_step"))
    trainer.train()

    lengths = [
        [(len(r.token_ids) - r.num_sampled, r.num_sampled) for group in groups for r in group.rollouts]
        for groups in batches
    ]
    timed = [lengths[(WARMUP_BLOCKS + i) % len(lengths)] for i in range(setup.blocks)]
    num_trained = sum(completion for batch in timed for _, completion in batch)
    num_tokens = sum(prompt + completion for batch in timed for prompt, completion in batch)
    timings = interleave.timings
    total_s = {name: sum(seconds) for name, seconds in timings.seconds.items()}
    measured = {
        "throughput_ratio": 1 / timings.ratio("ours", "trl"),
        **{f"{name}_trained_tokens_per_s": num_trained / total_s[name] for name in total_s},
        **{f"{name}_tokens_per_s": num_tokens / total_s[name] for name in total_s},
        "memory_ratio": ours.peak_bytes / trl.peak_bytes,
        **{f"relative_difference_{key}": value for key, value in differences.items()},
    }
    where = "a CPU" if setup.device == "cpu" else "one GPU"
    write_result(
        setup.name,
        claim=(
            f"On {where}, training on stored rollouts of skewed length handles 2.5 times the tokens per second "
            f"of TRL's GRPOTrainer."
        ),
        targets=[Target("throughput_ratio", ">=", 2.5)],
        settings={**asdict(setup), "trl": version("trl"), "lengths": lengths},
        measured={key: float(f"{value:.4g}") for key, value in measured.items()},
        details={
            "candidates": {"trl": trl_report, "ours": our_report},
            "chosen": {"trl": trl.settings, "ours": ours.settings | arm.described()},
            "trl_seconds_per_update": {
                name: sum(s) / (setup.blocks + WARMUP_BLOCKS) for name, s in phases.seconds.items()
            },
            "timings": timings.summary("trl"),
        },
    )


if __name__ == "__main__":
    main()
