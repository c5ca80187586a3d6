"""No secret of a configuration or a command line leaves the machine."""

import re

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


SECRETS = """api_key API_KEY x-api-key apiKey OPENAI_KEY ssh_key aws_secret_access_key private-key HF_TOKEN token
X-Auth-Token accessToken GITHUB_PAT credentials google_application_credentials passwd PASSWORD passphrase client_secret
Authorization proxy-authorization api_keys my_answers_key"""
OTHERS = """max_new_tokens token_ids tokenizer tokens_per_microbatch answer_key prompt_key label_key reward_fn_key
pad_token
eos_token key keys monkey path compatible secretary keyword train_id"""


@pytest.mark.parametrize("name", re.findall(r"\S+", SECRETS))
def test_names_of_secrets(name: str) -> None:
    assert redacted({name: SECRET, "nested": [{name: SECRET}]}) == {name: "***", "nested": [{name: "***"}]}
    assert redacted_text(f"+a.{name}={SECRET}") == f"+a.{name}=***"
    assert redacted_text(f"{{'{name}': '{SECRET}'}}") == f"{{'{name}': ***}}"


@pytest.mark.parametrize("name", re.findall(r"\S+", OTHERS))
def test_other_names_stay(name: str) -> None:
    assert redacted({name: "value"}) == {name: "value"}
    assert redacted_text(f"{name}=value") == f"{name}=value"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (f"generation.api_key={SECRET}", "generation.api_key=***"),
        ("generation.api_key=${oc.env:NAME}", "generation.api_key=***"),
        (f"+engine.env.HF_TOKEN='{SECRET} b'", "+engine.env.HF_TOKEN=***"),
        (f"generation={{api_key: {SECRET}, batch_size: 4}}", "generation={api_key: ***, batch_size: 4}"),
        (f"generation.base_url=http://u:{SECRET}@h:8000", "generation.base_url=http://***@h:8000"),
        (f"url=https://h/v1?key={SECRET}&page=2", "url=https://h/v1?key=***&page=2"),
        (f"url=https://h/v1?a=1&Token={SECRET}#top", "url=https://h/v1?a=1&Token=***#top"),
        (f"https://me:a@{SECRET}@host:80/x@y", "https://***@host:80/x@y"),
        (f"curl -H 'Authorization: Bearer {SECRET}' -H 'a: b'", "curl -H 'Authorization: ***' -H 'a: b'"),
        (f"{{headers: {{authorization: Basic {SECRET}, n: 2}}}}", "{headers: {authorization: ***, n: 2}}"),
        (f"sent bearer {SECRET} to it", "sent bearer *** to it"),
        ("a bearer", "a bearer"),
        ("engine.api_key=null", "engine.api_key=null"),
        ("train.lr=1e-5", "train.lr=1e-5"),
    ],
)
def test_a_command_line_keeps_everything_else(word: str, expected: str) -> None:
    assert redacted_text(word) == expected
