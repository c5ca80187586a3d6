"""A tokenizer of characters, made on the spot: nothing to download, and every token can be read."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))

# Contents and nothing around them: "17+25=" costs a BOS and six characters. A system message gets a line of its own.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'system' %}{{ '\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_char_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline; any other character becomes `<unk>`.

    Text gets no special tokens on its own: BOS comes from the chat template.
    """
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
