"""Weights in fewer bits.

NF4 (QLoRA, arXiv 2305.14314), through transformers and bitsandbytes, for the frozen base of adapters: 4 bits for each
weight of a linear layer, a scale for every 64 of them, and the scales in 8 bits. Embeddings, head and norms keep their
format.

FP8, as a server does it, to see what it does to logprobs: inside `fp8_linears`, linear layers compute as those of a
server that quantises weights and activations to e4m3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from offline_grpo.errors import ConfigError, reason_of
from offline_grpo.model.layers import blocks_of, not_compiled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINER_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
SERVER_BYTES = 0.5 + 4 / 64
"""Of a quantised weight. vLLM unpacks the scales when it loads them."""


def check_nf4(device: torch.device) -> None:
    """Raise ConfigError if bitsandbytes cannot quantise on `device`, for whatever reason."""
    try:
        from bitsandbytes.functional import quantize_nf4

        quantize_nf4(torch.zeros(64, device=device))
    except Exception as error:  # no package, no library for this CUDA, no kernel for this GPU: each has its own
        fix = "needs bitsandbytes and a GPU that it supports, or a CPU; use null"
        raise ConfigError(f"model.quantization=nf4: does not work on {device} ({reason_of(error)}); {fix}") from error


def nf4_arguments(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained`. The weights are quantised from the format of their files, as vLLM does it:
    rounded to 16 bits first, they would be others.
    """
    from transformers import BitsAndBytesConfig  # which takes a second: servers begin before it

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": device}, "dtype": "auto"}


def settle_nf4(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Bring what is not quantised into `dtype`, and keep bitsandbytes from packing weights anew when a CPU with AVX-512
    samples: its kernel for them rounds to bf16, and has no gradient.
    """
    from bitsandbytes.nn.modules import Linear4bit

    # What transformers keeps in fp32 for this architecture stays so.
    kept = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in kept for part in name.split(".")):
            parameter.data = parameter.data.to(dtype)

    # Quantised layers compute in `dtype`, by bitsandbytes' own kernel.
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
            weight: Any = module.weight
            weight.quant_state.dtype = dtype  # else backward passes round to the files' format, and forward ones do not
    model.config.dtype = dtype
    # It would keep `generate` from recording decoding steps, which bitsandbytes' kernels allow.
    model.hf_quantizer = None  # type: ignore[arg-type]


def dequantized(weights: Tensor, parameter: Tensor) -> Tensor:
    """`weights`, or the numbers that a layer multiplies by where they are those of a quantised `parameter`."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return weights
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weights, state)


def num_weights(parameter: Tensor) -> int:
    """How many it holds, of which two are a byte where they are quantised."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def quantized_sizes(model: PreTrainedModel) -> list[int]:
    """How many weights each layer has that NF4 would hold, of a model that is not quantised yet."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]


E4M3_MAX = 448.0


@contextmanager
def fp8_linears(model: PreTrainedModel) -> Iterator[None]:
    """For passes without gradients. Nothing is written: each product rounds its factors, one weight at a time.

    Adapters, embeddings and the output head are not rounded, as in vLLM; nor are experts, which use no `linear`.
    """
    layers = [(name, m) for name, m in blocks_of(model).named_modules() if isinstance(m, nn.Linear)]
    with not_compiled(model), _Rounding({m.weight.shape for name, m in layers if ".lora_" not in name}):
        yield


class _Rounding(TorchFunctionMode):
    """Knows weights by their shapes: sharded ones are other tensors during a pass."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self._shapes = shapes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and args[1].shape in self._shapes:
            args = (e4m3(args[0]), e4m3(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def e4m3(x: Tensor) -> Tensor:
    """`x` rounded to e4m3 (3 bits of mantissa: by up to 1/16 of each number), with a scale for each row. Servers with
    one scale for a whole weight round otherwise, and as far.
    """
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
