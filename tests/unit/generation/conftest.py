"""A character tokenizer, and a random model of its vocabulary."""

from __future__ import annotations

import pytest
from factories import make_qwen2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-= #\nabcdefgh"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: index for index, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture
def model() -> PreTrainedModel:
    return make_qwen2(vocab_size=2 + len(CHARACTERS), initializer_range=0.2, tie_word_embeddings=False)
