"""Loads models through transformers, after everything that can be wrong with them was looked for."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from offline_grpo import hub
from offline_grpo.errors import ConfigError, reason_of, require
from offline_grpo.interfaces import Layout, LossHead
from offline_grpo.model.adapters import LanguageModel, unwrapped, with_lora
from offline_grpo.model.device import make_current, resolve_device, torch_dtype
from offline_grpo.model.layers import (
    PatchProjection,
    blocks_of,
    is_composite,
    parse_layer_indices,
    processor_files,
    text_parameters,
)
from offline_grpo.model.layouts import layouts_for
from offline_grpo.model.offload import offload_inputs
from offline_grpo.model.policy import Policy
from offline_grpo.model.proof import settle_compile, settle_layout, settle_routes
from offline_grpo.model.quantization import nf4_arguments, settle_nf4
from offline_grpo.model.scoring import Scoring, measure_logit_transform
from offline_grpo.model.text import use_template
from offline_grpo.model.tiles import tile_mlps
from offline_grpo.settings import ModelConfig

log = logging.getLogger(__name__)

SDPA_HAS_NO = "attn_logit_softcapping"
"""In config.json: a soft-cap inside attention, an argument that transformers' sdpa drops."""


def read_model_config(model_id: str, key: str, *, trust_remote_code: bool = False) -> transformers.PretrainedConfig:
    """The model's config.json, without its weights. Raises ConfigError for a model that cannot be read or trained."""
    # What is there, and whether it is a whole model.
    is_there = os.path.exists(model_id) or hub.is_model_id(model_id)
    require(is_there, key, model_id, "no such folder; give a local model folder or a Hugging Face id")
    is_adapter = not Path(model_id, "config.json").exists() and Path(model_id, "adapter_config.json").exists()
    fix = f"merge it with its base first: python -m offline_grpo.export {model_id} FOLDER"
    require(not is_adapter, key, model_id, f"is a peft adapter, and no whole model; {fix}")

    # transformers knows it, and needs no code of others that must not be executed.
    try:
        config = transformers.AutoConfig.from_pretrained(model_id, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            fix = "read that code, and set model.trust_remote_code=true (--trust-remote-code) if you trust it"
            raise ConfigError(f"{key}={model_id}: needs Python code that comes with it; {fix}") from error
        fix = "give the folder of a whole model, or a Hugging Face id that you can reach"
        if "does not recognize this architecture" in str(error):
            fix = "choose another model, or a version of transformers that knows it"
        raise ConfigError(f"{key}={model_id}: cannot be loaded ({reason_of(error)}); {fix}") from error

    # It writes text from left to right, and reads text alone.
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    is_causal |= "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    is_causal |= is_composite(config) and not config.is_encoder_decoder
    is_causal &= getattr(config.get_text_config(), "use_bidirectional_attention", None) is not True  # PaliGemma
    fault = f"transformers has no causal language model of the type {config.model_type}; choose another model"
    require(is_causal, key, model_id, fault)
    if is_composite(config):
        model_class: Any = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
        arguments = inspect.signature(model_class.forward).parameters
        fault = f"a {config.model_type} reads no text without an image; choose another model"  # BLIP's
        require("pixel_values" not in arguments or arguments["pixel_values"].default is None, key, model_id, fault)
    return config


def context_length(config: transformers.PretrainedConfig) -> int | None:
    """The most tokens that prompt and completion may have together; None where the model sets no limit.

    Beyond the length of the original training, angles of `dynamic` and `longrope` embeddings depend on the longest
    sequence of a batch, and so would logprobs. Such models are used up to that length.
    """
    text = config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None)]
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limits.append(rope.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)  # XLNet's is -1


def load_tokenizer(
    model_id: str, *, key: str = "model.train_id", trust_remote_code: bool = False, chat_template: str | None = None
) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer saved beside the model; EOS pads where it has no padding token: padding is never trained on.
    `chat_template`: see `use_template`.
    """
    # One that is there, and knows words.
    fix = "copy the tokenizer files (tokenizer.json, tokenizer_config.json) of the model that it was made from into it"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_id, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={model_id}: has no tokenizer ({reason_of(error)}); {fix}") from error
    has_words = len(tokenizer) > len(tokenizer.all_special_tokens)  # transformers makes some of no files at all
    require(has_words, key, model_id, f"has no tokenizer; {fix}")

    # As a run needs it: padding, the chat template, and no warning of transformers about long texts.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    use_template(tokenizer, chat_template)
    too_long = "sequence-length-is-longer-than-the-specified-maximum"
    getattr(tokenizer, "deprecation_warnings", {})[too_long] = True  # `check_prompts` says it with problem and fix
    return tokenizer


def generation_config_of(model_id: str) -> transformers.GenerationConfig | None:
    """The model's own; None where it has none."""
    try:
        return transformers.GenerationConfig.from_pretrained(model_id)
    except OSError:
        return None


def load_policy(
    config: ModelConfig,
    model_id: str,
    *,
    layout: Layout | None,
    head: LossHead,
    device: torch.device,
    precision: str,
    train_layer_indices: str | None,
    gradient_checkpointing: float,
    checkpoint: Path | None,
    activation_offload: bool = False,
    shares_weights: bool = False,
) -> Policy:
    """The policy, from `checkpoint` (a folder that the checkpointer wrote) or else from `model_id`. Its GPU becomes
    torch's current one. Raises ConfigError for a layout or a model that cannot be trained so.

    Args:
        shares_weights: load it on the CPU; its weights will be memory on `device` that the engine has allocated.
            `settle` is left to the caller then.
    """
    # Weights: those of the checkpoint, or the base that its adapter is for.
    dtype = torch_dtype(precision)
    adapter = checkpoint if checkpoint is not None and config.lora is not None else None
    weights = str(checkpoint) if checkpoint is not None and config.lora is None else model_id
    home = torch.device("cpu") if shares_weights else device
    make_current(home)
    how: Any = {"trust_remote_code": config.trust_remote_code}
    model = load_causal_lm(weights, config.attn_implementation, home, dtype, quantization=config.quantization, **how)
    model = prepare(model, config, train_layer_indices, gradient_checkpointing, adapter)
    if config.mlp_tile_tokens is not None:
        tile_mlps(blocks_of(unwrapped(model)), config.mlp_tile_tokens)
    if activation_offload:
        offload_inputs(model)

    # What it does to its logits is measured; its layout and its compiled blocks are proven.
    first = layouts_for(layout, device, dtype)[0]
    scoring = Scoring(model, first, head, logits=measure_logit_transform(unwrapped(model)))
    if not shares_weights:
        settle(scoring, config, layout, device)
    tokenizer = load_tokenizer(model_id, chat_template=config.chat_template, **how)
    return Policy(scoring, tokenizer, compute_device=device)


def settle(scoring: Scoring, config: ModelConfig, layout: Layout | None, device: torch.device) -> None:
    """Prove what the policy is scored with: its layout, its routers, its compiled blocks, in this order."""
    settle_layout(scoring, layout, device)
    if config.router_replay != "none":
        settle_routes(scoring, device, replay=config.router_replay)
    settle_compile(scoring, config.compile, device)


def is_adapted_policy(config: ModelConfig) -> bool:
    """Whether the reference is what the policy is with its adapters switched off."""
    return config.lora is not None and config.ref_id in (None, config.train_id)


def load_frozen(
    config: ModelConfig, model_id: str, policy: Policy, *, key: str, layout: Layout | None, precision: str
) -> Scoring:
    """A model on `config.ref_device` that is only asked for logprobs; `key` named it."""
    scoring = policy.scoring
    device = policy.device if config.ref_device is None else resolve_device(config.ref_device, key="model.ref_device")
    how = {"key": key, "trust_remote_code": config.trust_remote_code}
    model = load_causal_lm(model_id, config.attn_implementation, device, torch_dtype(precision), **how)
    model.requires_grad_(False)
    if config.mlp_tile_tokens is not None:
        tile_mlps(blocks_of(model), config.mlp_tile_tokens)
    with torch.accelerator.device_index(device.index):
        frozen = Scoring(model, scoring.layout, scoring.head, logits=measure_logit_transform(model, key=key))
        # What holds for one holds for the other, and is said once.
        is_like_policy = type(model) is type(policy.causal_lm) and device.type == policy.device.type
        settle_layout(frozen, scoring.layout if is_like_policy else layout, device, key=key)
        settle_compile(frozen, config.compile, device, key=key)
    same = type(model) is type(policy.causal_lm)
    fix = "reads no pictures as the model to train does; take one of the same kind"
    require(scoring.vision is None or same, key, model_id, fix)
    frozen.vision = scoring.vision
    return frozen


def prepare(
    model: transformers.PreTrainedModel,
    config: ModelConfig,
    train_layer_indices: str | None = None,
    gradient_checkpointing: float = 0.0,
    adapter: Path | None = None,
) -> LanguageModel:
    """Make a model the one to be trained: adapters (from the folder `adapter`, or new) or chosen blocks, checkpointing
    of a share of them; a composite's towers are frozen. Raises ConfigError for layer indices or target modules that the
    model does not have.
    """
    trained: LanguageModel = model
    if is_composite(model.config):
        model.requires_grad_(False)
        for parameter in text_parameters(model).values():
            parameter.requires_grad_(parameter.is_floating_point())
    if config.lora is not None:
        fix = "with LoRA choose blocks by model.lora.layer_indices"
        require(train_layer_indices is None, "train.train_layer_indices", train_layer_indices, fix)
        trained = with_lora(model, config.lora, adapter)
    elif train_layer_indices is not None:
        indices = parse_layer_indices(train_layer_indices, model, key="train.train_layer_indices")
        chosen = {id(p) for index in indices for p in blocks_of(model)[index].parameters() if p.requires_grad}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
    if gradient_checkpointing:
        trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # Blocks are checkpointed in train mode only, which must not switch on dropout that is in their code.
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False):
                for name, value in vars(module).items():
                    if "drop" in name and isinstance(value, float):
                        setattr(module, name, 0.0)
    if 0 < gradient_checkpointing < 1:
        # The share of the blocks is spread evenly; all are recomputed if there is no list of them.
        with suppress(ConfigError):
            for number, block in enumerate(blocks_of(model)):
                is_recomputed = int((number + 1) * gradient_checkpointing) > int(number * gradient_checkpointing)
                block.gradient_checkpointing = is_recomputed  # type: ignore[assignment]
    return trained


def build_on_meta(
    model_config: transformers.PretrainedConfig, *, trust_remote_code: bool = False
) -> transformers.PreTrainedModel:
    """The model on torch's meta device, whose tensors have a shape and no memory."""
    is_whole = is_composite(model_config)
    auto: Any = transformers.AutoModelForMultimodalLM if is_whole else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(model_config, trust_remote_code=trust_remote_code)


def attention_of(model_config: transformers.PretrainedConfig, wanted: str) -> str | None:
    """The attention that `model.attn_implementation=WANTED` means here; None is transformers' own choice. Raises
    ConfigError where sdpa would leave out something that the model computes.
    """
    softcap = getattr(model_config.get_text_config(), SDPA_HAS_NO, None)
    if wanted == "auto":
        return "eager" if softcap is not None else None
    fix = f"leaves out the model's {SDPA_HAS_NO}={softcap}; use auto or eager"
    require(wanted != "sdpa" or softcap is None, "model.attn_implementation", wanted, fix)
    return wanted


def load_causal_lm(
    model_id: str,
    attn_implementation: str,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    key: str = "model.train_id",
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> transformers.PreTrainedModel:
    """The model in eval mode; in the format of its files if `dtype` is None. Raises ConfigError, which names `key`, for
    attention that would be wrong, or a model that is not complete.
    """
    trust = {"trust_remote_code": trust_remote_code}
    config = read_model_config(model_id, key, **trust)
    attention = attention_of(config, attn_implementation)
    settings: Any = {"dtype": dtype or "auto", "attn_implementation": attention, "output_loading_info": True}
    if quantization is not None:
        settings |= nf4_arguments(dtype or torch.bfloat16, device)
    auto: Any = transformers.AutoModelForMultimodalLM if is_composite(config) else transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(model_id, **settings, **trust)
    if quantization is not None:
        settle_nf4(model, dtype or torch.bfloat16)
    if is_composite(config):
        processor_files(model_id)
        for module in model.modules():
            if type(module) is nn.Conv3d:
                module.__class__ = PatchProjection
    missing = min(info["missing_keys"], default=None)
    require(missing is None, key, model_id, f"has no weights for {missing}, which would be random; take another copy")

    # The files may have tensors of parts that transformers does not build, such as a head that predicts several tokens
    # (MTP): those are kept. Of a part that it does build there is none, or it computes something else than they say.
    modules = dict(model.named_modules())

    def part_of(name: str) -> str | None:
        """The part of the model that the tensor is of; None in one that transformers builds."""
        owner, rest = name, ""
        while owner not in modules:
            owner, _, rest = owner.rpartition(".")
        return f"{owner}.{rest}" if isinstance(modules[owner], (nn.ModuleList, transformers.PreTrainedModel)) else None

    unexpected, ignored = info["unexpected_keys"], model._keys_to_ignore_on_load_unexpected or ()
    parts = {part_of(name) for name in unexpected}  # the names may be those that transformers makes of the files' ones
    inside = min((name for name in unexpected if part_of(name) is None), default=None)
    fix = "take another copy, or the config.json that belongs to the weights"
    require(inside is None, key, model_id, f"has weights that its config.json does not provide for, {inside}; {fix}")
    kept: dict[str, Tensor] = {}
    index = cached_file(model_id, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    files = sorted(set(json.loads(Path(index).read_text())["weight_map"].values())) if index else [SAFE_WEIGHTS_NAME]
    for file in files if unexpected or ignored else ():
        path = cached_file(model_id, file, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            with safe_open(path, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                    part = part_of(name)
                    if part in parts or (part and any(re.search(one, name) for one in ignored)):
                        kept[name] = tensors.get_tensor(name)
    if kept:
        says = "%s=%s: %d tensors that the model does not use are saved as they are, %s, ..."
        log.info(says, key, model_id, len(kept), min(kept))
    model.kept_tensors = kept
    return model.to(device).eval()
