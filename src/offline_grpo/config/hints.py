"""Which key somebody may have meant who typed one that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser

from offline_grpo.config.compose import folder, key_of
from offline_grpo.config.help import all_keys, defaults, groups, keys, prefix_of
from offline_grpo.errors import ConfigError

OF_OTHER_TRAINERS = {
    name: key
    for key, names in {
        "checkpoint.keep_last_k": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num",
        "checkpoint.save_interval": "save_steps save_freq",
        "data.max_prompt_tokens": "max_prompt_length prompt_max_len rollout_max_prompt_len",
        "data.num_train_seeds": "max_samples train_max_samples",
        "data.problems_per_iteration": "train_batch_size rollout_batch_size generation_batch_size",
        "data.resample_zero_signal": "filter_groups.enable dynamic_filtering dynamic_sampling_filter_path",
        "data.rollouts_per_problem": "num_generations rollout.n generation.n env.repeats "
        "n_samples_per_prompt group_size",
        "data.soft_overlong_tokens": "overlong_buffer.len",
        "engine.args.gpu_memory_utilization": "vllm_gpu_memory_utilization rollout.gpu_memory_utilization",
        "engine.args.mem_fraction_static": "sglang_mem_fraction_static",
        "+engine.args.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size "
        "rollout_num_gpus_per_engine",
        "eval.interval": "eval_steps test_freq",
        "eval.replicates": "eval_n_samples_per_prompt n_samples_per_eval_prompt val_kwargs.n",
        "generation": "use_vllm generation.backend rollout.name",
        "generation.base_url": "vllm_server_base_url vllm_server_host",
        "generation.max_new_tokens": "max_completion_length max_response_length generate_max_len "
        "rollout_max_response_len max_tokens response_length",
        "generation.temperature": "rollout_temperature",
        "hydra.run.dir": "output_dir default_local_dir save_path ckpt_path",
        "logger": "report_to use_wandb use_tensorboard",
        "logger.wandb.name": "run_name experiment_name wandb_run_name",
        "logger.wandb.project": "project_name wandb_project",
        "model.chat_template_kwargs": "apply_chat_template_kwargs",
        "model.layout": "packing packing_samples use_remove_padding",
        "model.lora.alpha": "lora_alpha",
        "model.lora.dropout": "lora_dropout",
        "model.lora.r": "lora_r lora_rank",
        "model.lora.target_modules": "lora_target_modules",
        "model.quantization": "load_in_4bit",
        "model.ref_id": "ref_load reference_model",
        "model.train_id": "model.path model_name_or_path model.name pretrain hf_checkpoint",
        "model/lora": "use_peft",
        "placement.num_engines": "vllm_num_engines",
        "placement.num_trainers": "n_gpus_per_node nnodes num_processes actor_num_gpus_per_node actor_num_nodes",
        "resume": "resume_from_checkpoint resume_mode load_checkpoint",
        "task": "env.dataset data.environment",
        "task.answer_field": "label_key reward_model.ground_truth",
        "task.eval_split": "val_files eval_dataset dataset_test_split eval_prompt_data",
        "task.path": "dataset_name train_files prompt_data",
        "task.prompt_field": "prompt_key input_key",
        "task.reward": "reward_funcs reward_weights custom_reward_function.path remote_rm_url custom_rm_path rm_type",
        "train.batch_size": "per_device_train_batch_size ppo_micro_batch_size_per_gpu micro_train_batch_size "
        "micro_batch_size",
        "train.entropy_coef": "entropy_coeff entropy_loss_coef",
        "train.epochs": "num_iterations ppo_epochs max_epochs",
        "train.grad_accum_steps": "gradient_accumulation_steps",
        "train.grad_clip": "max_grad_norm max_norm clip_grad",
        "train.gradient_checkpointing": "enable_gradient_checkpointing recompute_granularity",
        "train.iterations": "iterations max_steps num_train_epochs total_epochs total_training_steps "
        "num_episodes num_rollout",
        "train.kl_coef": "beta kl_loss_coef init_kl_coef",
        "train.loss.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
        "train.loss.clip_low": "epsilon clip_ratio clip_ratio_low eps_clip",
        "train.loss.dual_clip": "delta clip_ratio_c",
        "train.loss.geometric_bounds": "rollout_rs",
        "train.loss.importance_correction": "vllm_importance_sampling_correction rollout_is use_tis",
        "train.loss.kl_estimator": "kl_loss_type",
        "train.loss.kl_placement": "use_kl_in_reward",
        "train.loss.off_policy_mask": "off_policy_mask_threshold",
        "train.loss.tau_neg": "sapo_temperature_neg",
        "train.loss.tau_pos": "sapo_temperature_pos",
        "train.lr": "lr learning_rate actor_learning_rate",
        "train.mask_truncated": "mask_truncated_completions",
        "train.optimizer.offload": "optimizer_offload adam_offload",
        "train.precision": "bf16 fp16 torch_dtype",
        "train.schedule": "lr_scheduler_type lr_decay_style lr_scheduler",
        "train.tokens_per_microbatch": "ppo_max_token_len_per_gpu max_tokens_per_gpu",
        "train.top_entropy_frac": "top_entropy_quantile",
        "train.updates_per_iteration": "ppo_mini_batch_size global_batch_size",
        "train.warmup_steps": "lr_warmup_steps lr_warmup_iters",
        "train/advantage": "adv_estimator advantage_estimator scale_rewards multi_objective_aggregation "
        "teacher_model_name_or_path",
        "train.advantage.weights": "gdpo_reward_weights",
        "train/loss": "loss_type loss_mode importance_sampling_level",
        "train/optimizer": "optim",
        "weight_sync": "vllm_mode colocate colocate_all_models",
    }.items()
    for name in names.split()
}
"""A key of TRL, verl, OpenRLHF, slime or a trainer of docs/from_the_seeds.md, or the end of one -> the key or the group
that does the same here.
"""

NOT_SERVED = {
    "modules_to_save": "no server loads an adapter with whole modules; adapt more layers by model.lora.target_modules",
    "use_dora": "vLLM serves no DoRA; use plain LoRA, or model.lora.use_rslora=true",
}
"""What adapters of other trainers may have -> why ours cannot."""

OF_OTHERS = "docs/from_the_seeds.md has the keys of other trainers"


def known_keys() -> dict[str, list[str]]:
    """Every group, and every key that a file of `conf/` explains -> the options that have it, but for presets."""
    conf = folder()
    found: dict[str, list[str]] = {key.name: [] for key in keys(conf / "config.yaml", "")}
    for group, options in groups(conf).items():
        found.setdefault(group, [])
        for option in options:
            for key in all_keys(conf / group / f"{option}.yaml", prefix_of(group)):
                found.setdefault(key.name, []).extend([f"{group}={option}"] if group != "experiment" else [])
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


def check_options(words: Sequence[str]) -> None:
    """Raise ConfigError for an option that Hydra does not have, such as `--learning_rate`."""
    for word in get_args_parser().parse_known_args(list(words))[1]:
        key = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("--"):
            fix = f"{key}: settings have no dashes; write {key}=..." if key in known_keys() else no_such_key(key)
            raise ConfigError(f"--{fix}")


def no_such_key(key: str) -> str:
    """That a key does not exist; names the one that was probably meant."""
    words, known = re.split("[./]", key), known_keys()
    ends = (".".join(words[place:]) for place in range(len(words)))
    renamed = next((OF_OTHER_TRAINERS[end] for end in ends if end in OF_OTHER_TRAINERS), None)
    others = [other for other in known if not key.startswith(f"{other}.")]
    similar = [other for other in others if re.split("[./]", other)[-1] == words[-1]]
    if not 0 < len(similar) < 4:
        place = f"{words[0]}." if words[0] in known else ""  # a group has the key, if any: its name makes none alike
        ends_of = {other[len(place) :]: other for other in others if other.replace("/", ".").startswith(place)}
        similar = [ends_of[end] for end in difflib.get_close_matches(key[len(place) :], ends_of, n=1, cutoff=0.65)]
    is_passed_on = key.startswith(("engine.args.", "engine.env."))
    chosen = next(
        (group for group, options in groups(folder()).items() if key in map(prefix_of(group).__add__, options)), None
    )
    if words[-1] in NOT_SERVED:
        fix = NOT_SERVED[words[-1]]
    elif known.get(key):
        fix = f"the chosen options have no such key; add {' or '.join(dict.fromkeys(known[key]))}"
    elif chosen is not None:
        fix = f"is an option, not a key; choose it with {chosen}={words[-1]}"
    elif renamed is not None:
        fix = f"no such key; the setting is {renamed}; {OF_OTHERS}"
    elif similar:
        others = is_passed_on * f" +{key}=... passes another on to the server"
        fix = f"no such key; did you mean {' or '.join(similar)}?{others}"
    elif is_passed_on:
        fix = f"no such key here; +{key}=... passes it to the server"
    else:
        all_of = f"`--help {words[0]}` lists those of the group" if words[0] in known else "`--help` lists all"
        fix = f"no such key; {all_of}; {OF_OTHERS}"
    return f"{key}: {fix}"
