"""GGUF files: what is converted is the model that was written, with its tokenizer, as gguf itself dequantises it."""

from pathlib import Path

import pytest
import torch
from architectures import TEMPLATE, write_gguf
from factories import compose_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from offline_grpo.config.compose import typed
from offline_grpo.config.parts import make_plan
from offline_grpo.errors import ConfigError
from offline_grpo.model.gguf import convert

TEXTS = ["the sum", "the  7", "the\n\n8 9", " 10   10\n\n\n7", "is <|im_end|>1"]


def test_a_converted_file_is_the_model_that_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = write_gguf(tmp_path / "small.gguf")
    folder = convert(str(tmp_path / "small.gguf"), tmp_path / "cache")
    assert folder.name.startswith("small-")
    assert convert(str(tmp_path / "small.gguf"), tmp_path / "cache") == folder
    found = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(40)[None]
    assert torch.equal(found(ids).logits, model(ids).logits)
    assert (found.dtype, found.generation_config.eos_token_id) == (torch.float32, 2)
    assert not hasattr(found.config, "quantization_config")
    again = AutoTokenizer.from_pretrained(folder)
    assert [again(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]
    assert (again.eos_token, again.pad_token, again.chat_template) == ("<|im_end|>", "<|im_end|>", TEMPLATE)


def test_text_that_may_be_split_in_other_places_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_gguf(tmp_path / "small.gguf", pre="unheard-of")
    convert(str(tmp_path / "small.gguf"), tmp_path)
    assert "model.gguf_file=" in caplog.text
    assert "'unheard-of': transformers may split text in other places" in caplog.text


@pytest.mark.parametrize(
    ("name", "told"),
    [("none.gguf", "no such file"), ("package:none_such", "is not installed; pass --extra smollm2"), ("bad", "cannot")],
)
def test_what_is_no_gguf_file_is_refused(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"GGUF" + bytes(60))
    path = name if ":" in name else str(tmp_path / name)
    with pytest.raises(ConfigError, match=f"^model.gguf_file={path}: .*{told}"):
        convert(path, tmp_path)
    if name != "bad":
        with pytest.raises(ConfigError, match=told):
            make_plan(typed(compose_config("model=smollm2_135m", f"model.gguf_file={path}")))
