"""What VLLM_BATCH_INVARIANT leaves out in vLLM 0.25 to 0.32: numbers that still tell who else is in the batch.

Like its neighbours, the module stands alone; all that it uses of vLLM is alike in all versions that are supported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def be_batch_invariant() -> None:
    """Let vLLM's LoRA kernels and its second model runner compute them alike in every batch, in this process."""
    from vllm.lora.ops.triton_ops import lora_shrink_op
    from vllm.v1.sample.ops import topk_topp_sampler, topk_topp_triton
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    # Of an adapter's first product vLLM sums tiles of 256 numbers in small batches, and of 32 in larger ones, so that
    # logprobs would differ in their last bits.
    shrink: Any = lora_shrink_op
    configs = shrink.get_lora_op_configs
    shrink.get_lora_op_configs = lambda *args, **options: configs(*args, **options) | {"block_k": 32}

    # Rows of logits have the stride of vLLM's padded vocabulary; once copied, several have that of the model's, and one
    # alone has not. Triton reads four numbers at a time where 16 divides it, and adds in another order then: of a model
    # with 100 tokens, the last bits of a logprob told who else was in the batch.
    call = Sampler.__call__

    def call_alike(self: Any, logits: Tensor, *args: Any, **options: Any) -> Any:
        return call(self, logits.flatten().view(logits.shape), *args, **options)

    Sampler.__call__ = call_alike

    # Of fewer than 8 rows earlier versions than 0.32 sort the logits, and keep all that are as probable as the last
    # one; their kernel for more rows does not.
    def filter_alike(logits: Tensor, k: Tensor | None, p: Tensor | None, **_: Any) -> Tensor:
        return topk_topp_triton.apply_top_k_top_p_triton(logits, k, p)

    topk_topp_sampler.apply_top_k_top_p_pytorch = filter_alike
