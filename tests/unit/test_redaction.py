"""No secret of a configuration or a command line leaves the machine."""

import pytest

from offline_grpo.redaction import redacted, redacted_text

SECRET = "sk-3.14+x"


def test_values_of_secret_keys_are_hidden_at_any_depth() -> None:
    config = {
        "generation": {"api_key": SECRET, "max_new_tokens": 8, "base_url": f"https://me:{SECRET}@host/v1"},
        "engine": {"api_key": None, "env": {"HF_TOKEN": SECRET, "A": "1"}, "args": [{"password": SECRET}]},
        "task": {"token_budget": 3, "tokenizer": "x"},
    }
    assert redacted(config) == {
        "generation": {"api_key": "***", "max_new_tokens": 8, "base_url": "https://***@host/v1"},
        "engine": {"api_key": None, "env": {"HF_TOKEN": "***", "A": "1"}, "args": [{"password": "***"}]},
        "task": {"token_budget": 3, "tokenizer": "x"},
    }
    assert config["generation"]["api_key"] == SECRET, "the run itself still needs it"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (f"generation.api_key={SECRET}", "generation.api_key=***"),
        (f"+engine.env.HF_TOKEN='{SECRET} b'", "+engine.env.HF_TOKEN=***"),
        (f"generation={{api_key: {SECRET}, batch_size: 4}}", "generation={api_key: ***, batch_size: 4}"),
        (f"generation.base_url=http://u:{SECRET}@h:8000", "generation.base_url=http://***@h:8000"),
        ("engine.api_key=null", "engine.api_key=null"),
        ("train.lr=1e-5", "train.lr=1e-5"),
    ],
)
def test_a_command_line_keeps_everything_else(word: str, expected: str) -> None:
    assert redacted_text(word) == expected
