"""The parts of a model, whatever an architecture calls them: its decoder, its head, and its blocks (`model.layers.3`,
`transformer.h.3`). And torch.compile for blocks, which fuses norms, activations and whatever else is neither matrix
product nor attention.

Blocks are compiled one by one, because all of them share one graph: that takes seconds, and not minutes. Lengths are
symbols in it, so that batches of other sizes compile nothing anew; a pass without gradients has a graph of its own.
"""

from __future__ import annotations

import logging
import re
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offline_grpo.errors import ConfigError, require
from offline_grpo.model.tiles import tiles_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MAX_GRAPHS = 256
"""Of blocks of one class. Each shape of model takes two or three, and a sweep's jobs are one process; past the
compiler's own limit, 8, it would leave the rest as it is without a word."""
STAND_INS = ("image_token_id", "video_token_id", "audio_token_id")
"""Of composites: tokens in whose place features of a tower come."""
TRITON_CAPABILITY = (7, 0)
"""The oldest GPUs that Triton, and so torch.compile, has code for."""


def output_embeddings(model: PreTrainedModel) -> nn.Linear:
    """The language-model head."""
    head = model.get_output_embeddings()
    fault = f"{type(model).__name__} has no linear head; choose another model"
    require(isinstance(head, nn.Linear), "model.train_id", model.name_or_path, fault)
    return head  # type: ignore[return-value]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The model below the head, also where `get_decoder` finds both together (Llama 4) or the head (ModernBERT)."""
    decoder: Any = model.get_decoder()
    whole: Any = decoder if hasattr(decoder, "lm_head") else model
    return whole.model if decoder in (whole, model.get_output_embeddings()) else decoder


def num_blocks(model: PreTrainedModel) -> int:
    """How many transformer blocks config.json names."""
    return model.config.get_text_config().num_hidden_layers  # type: ignore[attr-defined]


def layer_configs(config: Any) -> list[Any]:
    """A text model's settings as each layer has them: heads of several sizes (Gemma 4) have no common answer."""
    return list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)


def named_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the list of the decoder's blocks: its outermost ModuleList of their number. Raises ConfigError."""
    decoder = set(decoder_of(model).modules())  # a vision tower may have as many blocks
    for name, module in model.named_modules():
        if module in decoder and isinstance(module, nn.ModuleList) and len(module) == num_blocks(model):
            return name, module
    has_none = f"found no list of {num_blocks(model)} blocks in {type(model).__name__}"
    raise ConfigError(f"{has_none}: blocks cannot be chosen by index")


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer blocks. Raises ConfigError where no list of them is found."""
    return named_blocks(model)[1]


def experts_of(model: nn.Module) -> list[nn.Module]:
    """What holds all experts of a block, in tensors of three dimensions: of a model of transformers."""
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def text_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Those that text goes through, by their names: of decoder and head. A composite has others, in its towers and in
    blocks that attend to images alone (Mllama).
    """
    inside = {id(p) for module in (decoder_of(model), output_embeddings(model)) for p in module.parameters()}
    for index in getattr(model.config.get_text_config(), "cross_attention_layers", ()):
        inside -= {id(p) for p in blocks_of(model)[index].parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in inside}


def parse_layer_indices(text: str, model: PreTrainedModel, *, key: str) -> list[int]:
    """`"0-3,28-31"` -> [0, 1, 2, 3, 28, 29, 30, 31]."""
    count = num_blocks(model)
    indices: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, -1)
        require(first <= last, key, text, "write indices and ranges, for example 20-31 or 0-3,28-31")
        require(last < count, key, text, f"the model has {count} blocks, 0-{count - 1}")
        indices.update(range(first, last + 1))
    return sorted(indices)


class PatchProjection(nn.Conv3d):
    """Of patches that are as large as its kernel, by one product, as vLLM computes it. For a convolution of that shape
    in bf16 there may be no fast kernel (github.com/huggingface/transformers/issues/45750).
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[2:] != self.kernel_size:
            return super().forward(input)
        product = nn.functional.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return product[..., None, None, None]


def is_composite(model_config: PretrainedConfig) -> bool:
    """Whether it is a text model with towers for images or sound. It is loaded and saved whole, and trained on text."""
    from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING  # which takes seconds: servers begin before it

    has_text = model_config.get_text_config(decoder=True) is not model_config
    return has_text and type(model_config) in MODEL_FOR_MULTIMODAL_LM_MAPPING


@cache
def processor_files(model_id: str) -> dict[str, bytes]:
    """What servers and processors need of a composite's folder beside model and tokenizer: name and content. Of a
    checkpoint they are read before a newer one takes its place.
    """
    from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME
    from transformers.utils.hub import cached_file

    names = (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME, VIDEO_PROCESSOR_NAME, "chat_template.json")
    found = {name: cached_file(model_id, name, _raise_exceptions_for_missing_entries=False) for name in names}
    return {name: Path(file).read_bytes() for name, file in found.items() if file is not None}


def is_compiled(requested: bool | str, device: torch.device) -> bool:
    """Whether blocks are compiled there with `model.compile=REQUESTED`. `auto` compiles where there are Triton and a
    GPU that it has code for: on CPUs it would need a C++ compiler, and gains little.
    """
    if requested != "auto" or device.type != "cuda" or find_spec("triton") is None:
        return requested is True
    return torch.cuda.get_device_capability(device) >= TRITON_CAPABILITY


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile every block of a transformers model when it first runs, in place: names and state stay as they are."""
    import torch._dynamo.config as dynamo  # which takes a second

    dynamo.recompile_limit = MAX_GRAPHS
    dynamo.specialize_float = True  # or blocks make tensors of norms' epsilons and adapters' scales whenever they run
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    for block in blocks_of(model):
        block.compile(dynamic=True)
    for tiles in tiles_of(model):
        tiles.of_tile = torch.compile(tiles.forward, dynamic=True)


def not_compiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, compiled blocks run as they are: for passes of other kinds, each of which would be compiled first."""
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()  # the former imports the compiler
