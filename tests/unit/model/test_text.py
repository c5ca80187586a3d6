"""Prompts and judged texts against transformers' own `apply_chat_template`, with the chat templates that TRL brings
along: those of seventy published models.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import trl
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from offline_grpo.errors import ConfigError
from offline_grpo.model.load import load_tokenizer
from offline_grpo.model.text import TokenizerCodec, cut_at_stop
from offline_grpo.types import Message, SamplingParams

TEMPLATES = {path.stem: path for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))}
SPECIAL = ["<s>", "</s>", "<think>", "</think>", "<|im_start|>", "<|im_end|>", "<|assistant|>"]
OF_IMAGES = ("idefics3", "llava_next", "smolvlm")
"""Templates that leave out contents which are plain text."""
USER: Message = {"role": "user", "content": "What is  1+2?"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level BPE, with special tokens that templates write."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=alphabet, special_tokens=SPECIAL
    )
    bpe.train_from_iterator([TEMPLATES["qwen3"].read_text()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def as_given(name: str, messages: Sequence[Message]) -> list[Any]:
    if not name.startswith(OF_IMAGES):
        return [dict(message) for message in messages]
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_has_the_ids_that_transformers_gives(name: str, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES[name].read_text()
    for thinks, system, prefix in product((None, True, False), ([], [SYSTEM]), ("", "<think>\nSo")):
        given = {} if thinks is None else {"enable_thinking": thinks}
        messages = [*system, USER]
        how: dict[str, Any] = {"add_generation_prompt": True, **given}
        if given and "enable_thinking" not in tokenizer.chat_template:
            with pytest.raises(ConfigError, match=r"^model\.chat_template_kwargs\.enable_thinking=.*\Z"):
                TokenizerCodec(tokenizer, (), given, prefix)
            continue
        codec = TokenizerCodec(tokenizer, (), given, prefix)
        if system and name.removesuffix("_training") == "gemma":
            with pytest.raises(TemplateError, match="System role not supported"):
                tokenizer.apply_chat_template(as_given(name, messages), **how)
            with pytest.raises(ConfigError, match=r"^.*: System role not supported; set task\.system_prompt=null.*\Z"):
                codec.encode(messages)
            continue
        ids = codec.encode(messages)
        if prefix:
            text = tokenizer.apply_chat_template(as_given(name, messages), tokenize=False, **how) + prefix
            assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            assert ids == tokenizer.apply_chat_template(as_given(name, messages), tokenize=True, **how)["input_ids"]
        assert all(message["content"] in tokenizer.decode(ids) for message in messages)


def test_the_templates_tell_thinking_from_none(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES["qwen3"].read_text()
    plain, silent = (TokenizerCodec(tokenizer, (), given).encode([USER]) for given in ({}, {"enable_thinking": False}))
    assert tokenizer.decode(silent) == tokenizer.decode(plain) + "<think>\n\n</think>\n\n"
    for name in ("enable_thinkin", "add_generation_prompt"):
        with pytest.raises(ConfigError, match=rf"model.chat_template_kwargs.{name}=True: .*no such argument"):
            TokenizerCodec(tokenizer, (), {name: True})


def test_without_a_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    ids = TokenizerCodec(tokenizer, assistant_prefix="<think>").encode([SYSTEM, USER])
    assert ids == tokenizer.encode("Be brief.\nWhat is  1+2?<think>")
    with pytest.raises(ConfigError, match="no chat template"):
        TokenizerCodec(tokenizer, (), {"enable_thinking": True})


def test_a_template_from_a_file_is_saved_with_the_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "a")
    load_tokenizer(str(tmp_path / "a"), chat_template=str(TEMPLATES["gemma3"])).save_pretrained(tmp_path / "b")
    assert load_tokenizer(str(tmp_path / "b")).chat_template == TEMPLATES["gemma3"].read_text()
    (tmp_path / "marked.jinja").write_text(TEMPLATES["gemma3"].read_text(), encoding="utf-8-sig")  # as Windows saves
    marked = load_tokenizer(str(tmp_path / "a"), chat_template=str(tmp_path / "marked.jinja"))
    assert marked.chat_template == TEMPLATES["gemma3"].read_text()
    with pytest.raises(ConfigError, match=r"model\.chat_template=none\.jinja: no such file"):
        load_tokenizer(str(tmp_path / "a"), chat_template="none.jinja")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({}, "a  x = 7"),
        ({"skip_special_tokens": False}, "<think> a</think>  x = 7<|im_start|>"),
        ({"stop": ("=", " x =")}, "a "),
        ({"stop": ("=", " x ="), "include_stop_str_in_output": True}, "a  x ="),
        ({"skip_special_tokens": False, "stop": ("</think>",)}, "<think> a"),
    ],
)
def test_what_a_task_sees(how: dict[str, Any], text: str, tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*tokenizer.encode("<think> a</think>  x = 7<|im_start|>", add_special_tokens=False), end]
    sampling = SamplingParams(8, **how)
    skips = sampling.skip_special_tokens
    text = f" {text}" if skips else text
    assert TokenizerCodec(tokenizer, [end]).judged(ids, sampling) == text
    assert TokenizerCodec(tokenizer, [end], {}, "<think>1").judged(ids, sampling) == "<think>1" + text


def test_a_blank_between_prefix_and_completion_is_kept() -> None:
    """Decoders of SentencePiece drop the one that a text begins with."""
    vocab = {token: index for index, token in enumerate(["<unk>", "</s>", "▁", "▁is", "▁4", "4"])}
    plain = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", unk_token="<unk>")
    sampling = SamplingParams(8)
    assert TokenizerCodec(tokenizer, [1]).judged([4, 1], sampling) == "4"
    assert TokenizerCodec(tokenizer, [1], {}, "It is").judged([4, 1], sampling) == "It is 4"
    assert TokenizerCodec(tokenizer, [1], {}, "It is").judged([5, 1], sampling) == "It is4"


def test_the_first_stop_string_counts() -> None:
    assert cut_at_stop("4\n\nQ: 2+3", ("Q:", "\n\n")) == "4"
    assert cut_at_stop("4\n\nQ: 2+3", ("Q:", "\n\n"), keeps_it=True) == "4\n\n"
    assert cut_at_stop("abc", ("x",), keeps_it=True) == "abc"
