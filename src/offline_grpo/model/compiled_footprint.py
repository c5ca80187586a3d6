"""How much less a transformer block keeps for its backward pass once torch.compile has fused it, found out without a
GPU.

What a block keeps does not depend on the code that is generated for it: torch's partitioner decides it, by looking for
the smallest cut between the graphs of forward and backward pass. It also runs on the meta device, where nothing is
generated.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from offline_grpo.errors import ConfigError
from offline_grpo.interfaces import Layout
from offline_grpo.model.adapters import LanguageModel, unwrapped
from offline_grpo.model.footprint import Microbatch, batch_of, layout_on_meta
from offline_grpo.model.layers import blocks_of
from offline_grpo.model.live_bytes import LiveBytes, allocated_bytes
from offline_grpo.model.logits import decoder_of
from offline_grpo.model.scoring import eval_mode

PARTITIONER = "aot_eager_decomp_partition"
"""torch.compile's backend up to, and without, the generation of code."""

log = logging.getLogger(__name__)


def saved_by_compiling(model: LanguageModel, microbatch: Microbatch, layout: Layout) -> int:
    """Bytes by which what the second block of a model on the meta device keeps shrinks; 0 where it cannot be compiled.
    Takes seconds.
    """
    decoder: Any = decoder_of(unwrapped(model))
    layout, batch = layout_on_meta(decoder, layout), batch_of(microbatch)
    try:
        blocks = blocks_of(decoder, decoder.config.get_text_config().num_hidden_layers)[1]
    except ConfigError:  # which also keeps them from being compiled
        return 0
    block = blocks[min(1, len(blocks) - 1)]  # the first one's input needs no gradient where the embeddings are frozen
    calls: list[tuple[Any, Any]] = []
    hook = block.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with eval_mode(model), layout.attention(decoder, batch):  # not in train mode, in which it would be recomputed
        with LiveBytes(), torch.no_grad():
            layout.hidden_states(decoder, batch)
        hook.remove()
        args, kwargs = calls[0]
        args, kwargs = tree_map(
            partial(_as_after_a_block, decoder.config.get_text_config().hidden_size), (args, kwargs)
        )
        before = _kept_bytes(block, args, kwargs)
        logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
        block.compile(backend=PARTITIONER, dynamic=True)
        try:
            after = _kept_bytes(block, args, kwargs)
        except Exception as error:  # whatever an architecture raises when it is compiled, or run on the meta device
            log.debug("the memory of compiled blocks is not known (%s)", error)
            return 0
        finally:
            block._compiled_call_impl = None
    return max(0, before - after)


def _as_after_a_block(hidden_size: int, value: Any) -> Any:
    """Hidden states with a gradient; the rest as it is."""
    is_hidden = isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (hidden_size,)
    return value.detach().requires_grad_() if is_hidden else value


def _kept_bytes(block: torch.nn.Module, args: Any, kwargs: Any) -> int:
    """In tensors that autograd keeps from one call of the block, its parameters left out."""
    own = {tensor.untyped_storage()._cdata for tensor in (*block.parameters(), *block.buffers())}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor  # which keeps the key from being used again
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = block(*args, **kwargs)
    del output
    return sum(allocated_bytes(tensor.untyped_storage().nbytes()) for key, tensor in kept.items() if key not in own)
