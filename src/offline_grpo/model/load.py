"""Loads policy and reference through transformers, after everything that can be wrong with them was looked for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Layout, LossHead
from offline_grpo.model.adapters import LanguageModel, with_lora
from offline_grpo.model.dtypes import torch_dtype
from offline_grpo.model.layers import parse_layer_indices, train_only_blocks
from offline_grpo.model.layouts import choose_layout
from offline_grpo.model.policy import Policy
from offline_grpo.model.scoring import Scoring, eval_mode, output_embeddings
from offline_grpo.settings import ModelConfig

HEAD_TOLERANCE_NATS = 0.05


def resolve_device(device: str, local_rank: int = 0) -> torch.device:
    """The device that `model.device` names; `auto` is this process's GPU if there is one, else the CPU.

    Raises:
        ConfigError: no such device on this machine.
    """
    if device == "auto":
        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"model.device={device}: no device of that name; use auto, cpu, cuda or cuda:N") from error
    if resolved.type == "cuda":
        count = torch.cuda.device_count()
        if (resolved.index or 0) >= count:
            has = f"this machine has {count} CUDA device{'s' if count != 1 else ''}" if count else "this machine has no CUDA device"
            raise ConfigError(f"model.device={device}: {has}; use {'cuda:0 to cuda:' + str(count - 1) if count else 'model.device=cpu'}")
    return resolved


def read_model_config(model_id: str, key: str) -> PretrainedConfig:
    """The model's config.json, without its weights.

    Raises:
        ConfigError: no such folder or hub id, or no configuration in it.
    """
    if not Path(model_id).exists() and (model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1):
        raise ConfigError(f"{key}={model_id}: no such folder; give a local model folder or a Hugging Face id")
    try:
        return AutoConfig.from_pretrained(model_id)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}={model_id}: cannot be loaded ({reason}); give a local model folder or a Hugging Face id that you can reach"
        ) from error


def context_length(config: PretrainedConfig) -> int | None:
    """The most tokens that prompt and completion may have together; None where the model sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_tokenizer(model_id: str) -> PreTrainedTokenizerBase:
    """The tokenizer saved beside the model, with a padding token (EOS where it has none: padding is never trained on)."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.train_id={model_id}: has no tokenizer that can be loaded ({str(error).splitlines()[0]})") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    config: ModelConfig,
    model_id: str,
    *,
    layout: Layout | None,
    head: LossHead,
    device: torch.device,
    precision: str,
    train_layer_indices: str | None,
    gradient_checkpointing: bool,
    checkpoint: Path | None,
    shares_weights: bool = False,
) -> Policy:
    """The policy, from `checkpoint` (a folder that the checkpointer wrote) or else from `model_id`.

    Args:
        layout: see `choose_layout`.
        shares_weights: load it on the CPU; its weights will be memory on `device` that the engine has allocated.

    Raises:
        ConfigError: the layout does not run on `device`, the model has no such layers or target modules, or it changes its logits.
    """
    dtype = torch_dtype(precision)
    layout = choose_layout(layout, device, dtype)
    adapter = checkpoint if checkpoint is not None and config.lora is not None else None
    weights = str(checkpoint) if checkpoint is not None and config.lora is None else model_id
    model = _load_causal_lm(weights, config, torch.device("cpu") if shares_weights else device, dtype)
    model = prepare(model, config, train_layer_indices=train_layer_indices, gradient_checkpointing=gradient_checkpointing, adapter=adapter)
    policy = Policy(Scoring(model, layout, head), load_tokenizer(model_id), compute_device=device)
    check_logits(policy.causal_lm)
    return policy


def prepare(
    model: PreTrainedModel,
    config: ModelConfig,
    *,
    train_layer_indices: str | None,
    gradient_checkpointing: bool,
    adapter: Path | None = None,
) -> LanguageModel:
    """Make a model the one to be trained: dropout off, adapters (from the folder `adapter`, or new) or chosen blocks, checkpointing.

    Raises:
        ConfigError: layer indices or target modules that the model does not have.
    """
    _disable_dropout(model)
    num_layers = model.config.get_text_config().num_hidden_layers
    trained: LanguageModel = model
    if config.lora is not None:
        if train_layer_indices is not None:
            raise ConfigError(f"train.train_layer_indices={train_layer_indices}: with LoRA choose blocks by model.lora.layer_indices")
        trained = with_lora(model, config.lora, num_layers, adapter)
    elif train_layer_indices is not None:
        train_only_blocks(model, parse_layer_indices(train_layer_indices, num_layers, key="train.train_layer_indices"), num_layers)
    if gradient_checkpointing:
        trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return trained


def load_reference(config: ModelConfig, model_id: str, policy: Policy, *, precision: str) -> Scoring:
    """The frozen reference: the policy's own base model under LoRA, else a second copy in the same precision."""
    reference_id = config.ref_id or model_id
    is_own_base = config.lora is not None and reference_id == model_id
    if is_own_base:
        model = policy.model
    else:
        model = _load_causal_lm(reference_id, config, policy.device, torch_dtype(precision)).eval().requires_grad_(False)
    return Scoring(model, policy.scoring.layout, policy.scoring.head, without_adapter=is_own_base)


@torch.no_grad()
def check_logits(model: PreTrainedModel) -> None:
    """Refuse models that do more to their logits than multiply hidden states by the output embeddings (soft-capping, scaling).

    Raises:
        ConfigError: the logits of the model and of its head differ.
    """
    ids = torch.arange(8, device=model.device)[None]  # [1, 8]
    with eval_mode(model):
        expected = model(input_ids=ids, use_cache=False).logits.float()
        output = output_embeddings(model)
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        ours = nn.functional.linear(hidden, output.weight, output.bias).float()
    worst = (expected.log_softmax(-1) - ours.log_softmax(-1)).abs().max().item()
    if worst > HEAD_TOLERANCE_NATS:
        raise ConfigError(
            f"model.train_id={model.name_or_path}: {type(model).__name__} changes its logits after the head "
            f"(by up to {worst:.3g} nats), which the loss head does not do; choose a model without logit soft-capping or scaling"
        )


def _load_causal_lm(model_id: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model = AutoModelForCausalLM.from_pretrained(model_id, dtype=dtype, attn_implementation=config.attn_implementation)
    except (ImportError, ValueError) as error:  # kernels that are not installed, or a name that transformers does not know
        if "attention" not in str(error).lower() and "attn" not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.attn_implementation={config.attn_implementation}: {reason}; sdpa works everywhere") from error
    return model.to(device)  # pyright: ignore[reportArgumentType]  # transformers' decorated signature


def _disable_dropout(model: nn.Module) -> None:
    """The sampler has no dropout, so the scores that are compared with its logprobs must have none either."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - nn.Module's annotations know tensors and modules only
