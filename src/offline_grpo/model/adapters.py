"""LoRA adapters, through peft. Importing that takes seconds, so it is left until a model gets adapters."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from offline_grpo.errors import ConfigError, require
from offline_grpo.model.layers import decoder_of, named_blocks, parse_layer_indices
from offline_grpo.settings import LoraConfig

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    LanguageModel = PreTrainedModel | PeftModel
else:
    LanguageModel = Any


log = logging.getLogger(__name__)

ADAPTER = "default"
"""peft's name of the one that is trained."""
OF_ADAPTER = re.compile(rf"(\.lora_\w+)\.{ADAPTER}\b")
"""In peft's names of parameters; files do without the adapter's own."""


def name_in_file(name: str) -> str:
    """What a parameter of an adapter is called in its file, by its name in the transformers model."""
    return "base_model.model." + OF_ADAPTER.sub(r"\1", name)


def has_adapters(model: LanguageModel) -> TypeGuard[PeftModel]:
    """Whether it is a transformers model that peft has wrapped."""
    peft = sys.modules.get("peft")  # nobody has wrapped anything without it
    return peft is not None and isinstance(model, peft.PeftModel)


def unwrapped(model: LanguageModel) -> PreTrainedModel:
    """The transformers model, free of peft's wrapper; LoRA layers sit inside it."""
    return model.get_base_model() if has_adapters(model) else model  # type: ignore[return-value]


@contextmanager
def adapters_off(model: LanguageModel) -> Iterator[None]:
    """The model without its adapters inside, for passes without gradients.

    peft's own `disable_adapter` also switches their gradients off, and looks at each layer several times: 30 ms for 28
    blocks, which is a third of a pass over a microbatch.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def without_false_warnings() -> Iterator[None]:
    """Of a mixture's experts, two of which are one tensor, peft doubles the rank, and then warns that it has not: it
    looks for the name among modules, and the experts are parameters. (peft 0.21)
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")
        yield


def with_lora(model: PreTrainedModel, lora: LoraConfig, adapter: Path | None) -> PeftModel:
    """The model with LoRA adapters on top (arXiv 2106.09685): those saved in the folder `adapter`, or new ones. They
    are in the model's format, as a server has them; the masters are fp32. Raises ConfigError for target modules or
    layers that the model does not have, and an adapter that is not whole.
    """
    from offline_grpo.model.lora_layer import fold_scales

    if adapter is not None:
        wrapped = with_saved_adapter(model, str(adapter), key="resume", is_trainable=True)
    else:
        wrapped = _new(model, lora)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)  # peft makes them in fp32
    fold_scales(wrapped, ADAPTER)
    return wrapped


@without_false_warnings()
def with_saved_adapter(model: PreTrainedModel, adapter: str, *, key: str, is_trainable: bool) -> PeftModel:
    """The model with the adapter of a folder or Hub id on top, in fp32. Raises ConfigError, which names `key`, where a
    tensor is missing, which peft would take as new, or the model has no place for one.
    """
    from peft import PeftConfig, PeftModelForCausalLM
    from peft.utils import load_peft_weights

    # The model with room for the adapter, and the tensors that its file has.
    config = PeftConfig.from_pretrained(adapter)
    config.inference_mode = not is_trainable
    wrapped = PeftModelForCausalLM(model, config, ADAPTER)
    names = {name_in_file(name): name for name, _ in unwrapped(wrapped).named_parameters() if ".lora_" in name}
    found, is_meta = load_peft_weights(adapter, device="cpu"), model.device.type == "meta"
    missing, unexpected = names.keys() - found.keys(), found.keys() - names.keys()
    if missing and unexpected:  # names of another transformers: peft knows some, but would rename Laguna's own ones too
        loaded = wrapped.load_adapter(adapter, ADAPTER, is_trainable=is_trainable, low_cpu_mem_usage=is_meta)
        missing, unexpected = loaded.missing_keys, loaded.unexpected_keys
    elif not unexpected:
        tensors = {names[name]: tensor for name, tensor in found.items()}
        unwrapped(wrapped).load_state_dict(tensors, strict=False, assign=is_meta)
    for what, keys in (("lacks", missing), ("has, and the model does not,", unexpected)):
        fix = "take a whole copy of the adapter, for this very base model"
        require(not keys, key, adapter, f"the adapter {what} {len(keys)} tensors, {min(keys, default=None)}; {fix}")
    return wrapped


def warn_of_peft(model: LanguageModel) -> None:
    """Log which tensors of a saved adapter peft's own `from_pretrained` finds no place for, layers as `*`: it renames
    them as transformers renames the model's old checkpoints.
    """
    if not has_adapters(model):
        return
    try:
        from peft.utils import transformers_weight_conversion as of_peft
    except ImportError:  # an older peft, which renames nothing
        return
    # The names that its file has, renamed as peft would do it when it reads them; what is then gone has no place.
    shapes = {name: tensor.shape for name, tensor in unwrapped(model).named_parameters() if ".lora_" in name}
    own = {name_in_file(name): torch.empty(shape, device="meta") for name, shape in shapes.items()}
    convert = of_peft.convert_peft_adapter_state_dict_for_transformers
    if lost := own.keys() - convert(model, model.peft_config[ADAPTER], dict(own)).keys():
        names = ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in lost}))
        fix = "merge it for others, with `python -m offline_grpo.export`"
        log.warning("peft's own from_pretrained leaves out %d tensors of this adapter, %s; %s", len(lost), names, fix)


@without_false_warnings()
def _new(model: PreTrainedModel, lora: LoraConfig) -> PeftModel:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model
    from transformers.pytorch_utils import Conv1D

    # Routers: some (PhiMoE's, Llama 4's) are linear layers by name, and return their choice of experts too.
    layers, blocks, targets, decoder = None, "", lora.target_modules, decoder_of(model)
    linear = [(name.rsplit(".", 1)[-1], m) for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))]
    routers = {name for name, module in linear if "Router" in type(module).__name__}
    fix = f"{', '.join(routers)} returns more than a product, which no adapter can follow; leave it out"
    require(routers.isdisjoint(targets), "model.lora.target_modules", targets, fix)
    excluded = [rf".*\.({'|'.join(sorted(routers))})"] if routers else []

    # Layers of a composite's towers may have the same names, and peft combines layer indices with names alone.
    is_composite = model.config.get_text_config(decoder=True) is not model.config
    if is_composite:
        [path] = [name for name, module in model.named_modules() if module is decoder]
        excluded.append(rf"(?!{re.escape(path)}\.).*")
    if lora.layer_indices is not None:
        layers = parse_layer_indices(lora.layer_indices, model, key="model.lora.layer_indices")
        blocks, decoder = named_blocks(model)
    if targets == ["all-linear"] and (layers or is_composite):
        inside = {*decoder.modules()}
        targets = sorted({name for name, module in linear if module in inside})
    peft_config = PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        exclude_modules="|".join(excluded) or None,
        layers_to_transform=layers,
        layers_pattern=blocks.rsplit(".", 1)[-1] or None,
        task_type="CAUSAL_LM",
    )
    try:
        wrapped = get_peft_model(model, peft_config)
    except ValueError as error:  # no such modules, or dropout on experts
        raise ConfigError(f"model.lora.target_modules={lora.target_modules}: {' '.join(str(error).split())}") from error

    # The loss head reads the head's own weights. With adapted tied embeddings a merged model would have another head.
    head: Any = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    key, value = "model.lora.target_modules", lora.target_modules
    require(isinstance(head, nn.Linear), key, value, "the output head cannot be adapted; leave it out")
    is_tied = not isinstance(embeddings, nn.Embedding) and head.weight is embeddings.weight
    require(not is_tied, key, value, "the input embeddings are the output head too: they cannot be adapted")
    return wrapped  # type: ignore[return-value]
