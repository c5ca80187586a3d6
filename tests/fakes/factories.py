"""Small real models and trainers, made from nothing, for tests."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from offline_grpo.config.build import build
from offline_grpo.config.compose import as_plain, register
from offline_grpo.interfaces import RolloutClient
from offline_grpo.loss.grpo import GRPO
from offline_grpo.model.layouts import Padded
from offline_grpo.model.lm_head import TiledHead
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import Scoring
from offline_grpo.placement.ranks import Ranks
from offline_grpo.settings import TrainConfig
from offline_grpo.train.advantage import GroupStd
from offline_grpo.train.batch import Passes
from offline_grpo.train.optimizer import AdamW, OffloadedAdamW
from offline_grpo.train.schedule import LrSchedule
from offline_grpo.train.sharding import Sharding
from offline_grpo.train.update import Updater
from offline_grpo.types import (
    Completion,
    FinishReason,
    Problem,
    Rollout,
    RolloutGroup,
    SamplingParams,
    SamplingRequest,
    Score,
    TokenBatch,
)
from offline_grpo.weight_sync.strategy import WeightSync

CONF = Path(__file__).parents[2] / "conf"
VOCAB = 40


SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3}


def make_qwen2(**settings) -> PreTrainedModel:
    """A random Qwen2 with grouped-query attention and tied embeddings."""
    torch.manual_seed(0)
    config = Qwen2Config(**{**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True, **settings})
    return Qwen2ForCausalLM(config).eval()


def make_llama(*, seed: int = 1, **settings) -> LlamaForCausalLM:
    """A random Llama with an output head of its own."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **settings})).eval()


def make_scoring(model, layout=None) -> Scoring:
    """Padded rows and the tiled head around a model."""
    return Scoring(model, layout or Padded(), TiledHead(tile_width=None))


def make_policy(model, tokenizer=None, *, compute_device: torch.device | None = None) -> Policy:
    """A policy without masters, and without a tokenizer where there is no text."""
    return Policy(make_scoring(model), tokenizer, compute_device=compute_device)


SETTINGS: dict[str, Any] = {"iterations": 1, "stop_when": None, "updates_per_iteration": 1, "epochs": 1}
SETTINGS |= {"batch_size": 100, "tokens_per_microbatch": None, "grad_accum_steps": None, "lr": 1e-3}
SETTINGS |= {"weight_decay": 0.0, "warmup_steps": 0, "schedule": "constant", "grad_clip": 1.0, "kl_coef": 0.0}
SETTINGS |= {"entropy_coef": 0.01, "precision": "fp32", "dither_masters": False, "sharding": "none"}
SETTINGS |= {"gradient_checkpointing": False, "train_layer_indices": None, "mask_truncated": False}
SETTINGS |= {"activation_offload": "auto", "sequence_parallel": 1}
SETTINGS |= {"top_entropy_frac": 1.0, "drop_zero_signal_groups": True, "max_bad_updates": 2, "profile": None}
SETTINGS |= {"advantage": None, "loss": None, "optimizer": None}
LOSS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio_reference": "old"}
LOSS |= {"kl_coef": 0.0, "kl_estimator": "k3", "kl_placement": "loss", "kl_importance_weight": False}
LOSS |= {"entropy_coef": 0.01, "importance_correction": "none", "importance_cap": 2.0, "importance_floor": 0.0}
LOSS |= {"off_policy_mask": None, "geometric_bounds": None}


def make_passes(
    *, loss=GRPO, dtype=torch.float32, model=None, advantage=None, reference=None, teacher=None, **settings
) -> Passes:
    ranks = Ranks(use_cpu=True)
    return Passes(
        policy=make_policy(make_qwen2().to(dtype) if model is None else model),
        reference=reference,
        loss=loss(**LOSS),
        advantage=advantage or GroupStd(),
        teacher=teacher,
        config=TrainConfig(**{**SETTINGS, **settings}),
        ranks=ranks,
        sharding=Sharding(ranks),
    )


def make_updater(tmp_path, *, offload=False, **settings) -> Updater:
    """Of `make_passes`."""
    passes = make_passes(**settings)
    config, masters = passes.config, passes.policy.make_masters(offload=offload)
    factory = AdamW(lr=config.lr, weight_decay=0.0, beta1=0.9, beta2=0.95, eps=1e-8, offload=offload)
    optimizer = factory.create(masters.parameters.values())
    return Updater(
        passes=passes,
        optimizer=OffloadedAdamW(optimizer, masters) if offload else optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled=config.precision == "fp16"),
        max_new_tokens=20,
        lr_schedule=LrSchedule(kind=config.schedule, num_updates=4, warmup_steps=config.warmup_steps),
        seed=0,
        failure_dir=tmp_path,
    )


def complete_in_order(
    client: RolloutClient, requests: Sequence[SamplingRequest], sampling: SamplingParams
) -> list[list[Completion]]:
    """The completions of all requests, in the order of `requests`."""
    completions = dict(client.generate(requests, sampling))
    return [completions[index] for index in range(len(requests))]


def generate(
    client: RolloutClient,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    group_size: int,
    seeds: Sequence[int],
) -> list[list[Completion]]:
    """`group_size` completions of each prompt, in the order of the prompts."""
    requests = [SamplingRequest(tuple(prompt), group_size, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    return complete_in_order(client, requests, sampling)


def make_completion(
    token_ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    reason: FinishReason = FinishReason.STOP,
    *,
    version: int = 0,
) -> Completion:
    """A completion of these tokens, by default with logprobs of -1."""
    return Completion(tuple(token_ids), tuple(logprobs or [-1.0] * len(token_ids)), reason, (version,) * len(token_ids))


def make_rollout(
    prompt: Sequence[int], completion: Completion | Sequence[int], *, temperature: float = 1.0, reward: float = 0.0
) -> Rollout:
    """A rollout of one turn."""
    whole = completion if isinstance(completion, Completion) else make_completion(completion)
    return Rollout.of_one_turn(prompt, whole, temperature=temperature, text="", score=Score(reward, False, {}))


def make_group(*answers: tuple[str, float]) -> RolloutGroup:
    """A group of texts, each with its reward; 1 is correct."""
    problem = Problem("p", ({"role": "user", "content": "2+2="},), "4")
    scores = [(text, Score(reward, reward == 1.0, {"correct": reward})) for text, reward in answers]
    rollouts = [
        Rollout.of_one_turn((1, 2), make_completion((3,)), temperature=1.0, text=text, score=score)
        for text, score in scores
    ]
    return RolloutGroup(problem, tuple(rollouts))


def prompt_of(rollout: Rollout) -> tuple[int, ...]:
    """The tokens before the first that was sampled."""
    return rollout.token_ids[: rollout.is_sampled.index(True)]


def sampled(rollout: Rollout) -> tuple[int, ...]:
    """The tokens that were sampled."""
    return tuple(token for token, is_sampled in zip(rollout.token_ids, rollout.is_sampled, strict=True) if is_sampled)


def compose_config(*overrides: str) -> DictConfig:
    """The configuration that `run_grpo.py` composes from these overrides.

    The choice of options takes Hydra a third of a second, so equal choices are composed once. Values are then set as
    Hydra does it.
    """
    choices = tuple(override for override in overrides if _is_choice(override))
    cfg = copy.deepcopy(compose_with_hydra(*choices))
    values = [override for override in overrides if override not in choices]
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), cfg)
    return cfg


def _is_choice(override: str) -> bool:
    """Whether an override chooses options of a group, or sets up Hydra itself."""
    key = override.partition("=")[0].lstrip("+~").partition("@")[0]
    return "/" in key or (CONF / key).is_dir() or key.startswith("hydra.")


@cache
def compose_with_hydra(*overrides: str) -> DictConfig:
    """The same, by Hydra alone. Not to be changed by the caller."""
    register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def strategy(option: str, *overrides: str) -> Any:
    """A weight-sync strategy as the application builds it."""
    node = as_plain(OmegaConf.select(compose_config(f"weight_sync={option}", *overrides), "weight_sync"))
    return build(node, key="weight_sync", protocol=WeightSync)


def make_batch(
    lengths: Sequence[int], completion_mask: Tensor, advantages: Tensor, old_logprobs: Tensor, **fields: Any
) -> TokenBatch:
    """A flat batch of sequences of these lengths.

    Args:
        completion_mask, old_logprobs: [T].
        advantages: [S], those of the sequences.
        fields: others of `TokenBatch`; token ids are 0, temperatures 1, and the sampler's logprobs the old ones
            unless they are given.
    """
    repeats = torch.tensor(lengths)
    sequence_ids = torch.repeat_interleave(torch.arange(len(lengths)), repeats)
    return TokenBatch(
        **{
            "token_ids": torch.zeros(len(sequence_ids), dtype=torch.long),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]),
            "sequence_ids": sequence_ids,
            "completion_mask": completion_mask,
            "advantages": advantages[sequence_ids] * completion_mask,
            "rollout_logprobs": old_logprobs,
            "old_logprobs": old_logprobs,
            "ref_logprobs": None,
            "temperature": torch.ones(len(sequence_ids)),
            "sequence_lengths": tuple(lengths),
            "owners": tuple(range(len(lengths))),
            **fields,
        }
    )
