"""A small GGUF file, written as llama.cpp's converter writes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HEADS = 2
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def smollm_tokenizer() -> PreTrainedTokenizerFast:
    """BPE of bytes, digits one by one, as SmolLM has it; learns blanks and a few words."""
    tokenizer = Tokenizer(models.BPE())
    pieces = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the  sum   of\n\nthe  numbers  7\n\n8   9  is\n\n10"] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )


def write_gguf(file: Path, pre: str = "smollm") -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Write a tied Llama whose matrices have 8 bits, and return what a reader should get: the rounded model, and the
    tokenizer.
    """
    tokenizer = smollm_tokenizer()
    torch.manual_seed(0)
    shape: Any = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), **shape, **special, tie_word_embeddings=True, max_position_embeddings=256
    )
    model = LlamaForCausalLM(config).eval()
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_vocab_size(len(tokenizer))
    writer.add_rope_dimension_count(64 // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    state = tokenizer.backend_tokenizer
    merges = [" ".join(pair) for pair in json.loads(state.to_str())["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([state.id_to_token(i) for i in range(len(tokenizer))])
    writer.add_token_types([3] * 3 + [1] * (len(tokenizer) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, parameter in model.named_parameters():
        matrix = parameter.detach().numpy()
        if name.endswith("norm.weight") or "layernorm" in name:
            writer.add_tensor(_gguf_name(name), matrix)
            continue
        is_rotated = "q_proj" in name or "k_proj" in name  # llama.cpp pairs neighbours, transformers the two halves
        stored = _paired(matrix) if is_rotated else matrix
        bits = quantize(np.ascontiguousarray(stored), GGMLQuantizationType.Q8_0)
        writer.add_tensor(_gguf_name(name), bits, raw_dtype=GGMLQuantizationType.Q8_0)
        rounded = dequantize(bits, GGMLQuantizationType.Q8_0)
        parameter.data.copy_(torch.from_numpy(_halved(rounded) if is_rotated else rounded))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer


def _paired(matrix: np.ndarray) -> np.ndarray:
    return matrix.reshape(HEADS, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def _halved(matrix: np.ndarray) -> np.ndarray:
    return matrix.reshape(HEADS, -1, 2, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def _gguf_name(name: str) -> str:
    if "layers." not in name:
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    block, _, layer = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    return f"blk.{block}.{NAMES[layer]}.weight"
