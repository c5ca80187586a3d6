"""Which key somebody may have meant who typed one that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from offline_grpo.run.config import folder, key_of
from offline_grpo.run.help import all_keys, defaults, groups, keys, prefix_of

OF_OTHER_TRAINERS = {
    # Shorter forms, and former names
    "iterations": "train.iterations",
    "loss": "train/loss",
    "lora": "model/lora",
    "lr": "train.lr",
    "optimizer": "train/optimizer",
    "packing": "model.layout",
    # The three trainers of docs/from_the_seeds.md
    "env.dataset": "task",
    "generation.backend": "generation",
    "optimizer.lr": "train.lr",
    # TRL's GRPOConfig
    "beta": "train.kl_coef",
    "dataset_name": "task.path",
    "epsilon": "train.loss.clip_low",
    "epsilon_high": "train.loss.clip_high",
    "eval_steps": "eval.interval",
    "gradient_accumulation_steps": "train.grad_accum_steps",
    "learning_rate": "train.lr",
    "lora_alpha": "model.lora.alpha",
    "lora_r": "model.lora.r",
    "loss_type": "train/loss",
    "lr_scheduler_type": "train.schedule",
    "mask_truncated_completions": "train.mask_truncated",
    "max_completion_length": "generation.max_new_tokens",
    "max_grad_norm": "train.grad_clip",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "train.iterations",
    "model_name_or_path": "model.train_id",
    "num_generations": "data.rollouts_per_problem",
    "multi_objective_aggregation": "train/advantage",
    "num_iterations": "train.epochs",
    "off_policy_mask_threshold": "train.loss.off_policy_mask",
    "optim": "train/optimizer",
    "output_dir": "hydra.run.dir",
    "per_device_train_batch_size": "train.batch_size",
    "report_to": "logger",
    "resume_from_checkpoint": "resume",
    "reward_funcs": "task.reward",
    "reward_weights": "task.reward",
    "sapo_temperature_neg": "train.loss.tau_neg",
    "sapo_temperature_pos": "train.loss.tau_pos",
    "scale_rewards": "train/advantage",
    "save_steps": "checkpoint.save_interval",
    "save_total_limit": "checkpoint.keep_last_k",
    "teacher_model_name_or_path": "train/advantage",
    "top_entropy_quantile": "train.top_entropy_frac",
    "use_vllm": "generation",
    "vllm_gpu_memory_utilization": "engine.args.gpu_memory_utilization",
    "vllm_mode": "weight_sync",
    "vllm_server_base_url": "generation.base_url",
    # verl
    "adv_estimator": "train/advantage",
    "clip_ratio": "train.loss.clip_low",
    "clip_ratio_high": "train.loss.clip_high",
    "clip_ratio_low": "train.loss.clip_low",
    "default_local_dir": "hydra.run.dir",
    "entropy_coeff": "train.entropy_coef",
    "gdpo_reward_weights": "train.advantage.weights",
    "kl_loss_coef": "train.kl_coef",
    "loss_mode": "train/loss",
    "max_response_length": "generation.max_new_tokens",
    "model.path": "model.train_id",
    "optim.lr": "train.lr",
    "ppo_epochs": "train.epochs",
    "ppo_max_token_len_per_gpu": "train.tokens_per_microbatch",
    "ppo_micro_batch_size_per_gpu": "train.batch_size",
    "resume_mode": "resume",
    "rollout_rs": "train.loss.geometric_bounds",
    "rollout.gpu_memory_utilization": "engine.args.gpu_memory_utilization",
    "rollout.n": "data.rollouts_per_problem",
    "save_freq": "checkpoint.save_interval",
    "test_freq": "eval.interval",
    "total_epochs": "train.iterations",
    "train_batch_size": "data.problems_per_iteration",
}
"""A key of another trainer, or the end of one -> the key or the group that does the same here."""

NOT_SERVED = {
    "modules_to_save": "no server loads an adapter with whole modules; adapt more layers by model.lora.target_modules",
    "use_dora": "vLLM serves no DoRA; use plain LoRA, or model.lora.use_rslora=true",
}
"""What adapters of other trainers may have -> why ours cannot."""

OF_OTHERS = "docs/from_the_seeds.md has the keys of other trainers"


def known_keys() -> list[str]:
    """Every group, and every key that a file of `conf/` explains."""
    conf = folder()
    found = [key.name for key in keys(conf / "config.yaml", "")]
    for group, options in groups(conf).items():
        paths = [conf / group / f"{option}.yaml" for option in options]
        found += [group, *(key.name for path in paths for key in all_keys(path, prefix_of(group)))]
    return found


def empty_group(key: str, words: Sequence[str]) -> str | None:
    """The hint about a setting below a group of which neither the defaults nor the command line choose an option; None
    for any other.
    """
    typed = {*map(key_of, words)}
    chosen = {*defaults(folder()), *typed, *(["engine"] if "generation" in typed else [])}  # which chooses it
    for group, options in groups(folder()).items():
        if group not in chosen and group != "experiment" and key.startswith(prefix_of(group)):
            return f"{key}: {group} is empty here; add {' or '.join(f'{group}={option}' for option in options)}"
    return None


def no_such_key(key: str) -> str:
    """That a key does not exist; names the one that was probably meant."""
    words, known = re.split("[./]", key), known_keys()
    ends = (".".join(words[place:]) for place in range(len(words)))
    renamed = next((OF_OTHER_TRAINERS[end] for end in ends if end in OF_OTHER_TRAINERS), None)
    similar = difflib.get_close_matches(key, [k for k in known if not key.startswith(f"{k}.")], n=1, cutoff=0.7)
    is_passed_on = key.startswith(("engine.args.", "engine.env."))
    if words[-1] in NOT_SERVED:
        fix = NOT_SERVED[words[-1]]
    elif renamed is not None:
        fix = f"no such key; the setting is {renamed}; {OF_OTHERS}"
    elif key in known:
        fix = f"the chosen options have no such key; `--help {key}` names those that have it"
    elif similar:
        fix = f"no such key; did you mean {similar[0]}?" + is_passed_on * f" +{key}=... passes another on to the server"
    elif is_passed_on:
        fix = f"no such key here; +{key}=... passes it to the server"
    else:
        fix = f"no such key; `--help` lists all, `--help GROUP` some; {OF_OTHERS}"
    return f"{key}: {fix}"
