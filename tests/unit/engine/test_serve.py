"""What `python -m offline_grpo.engine.serve` makes of its words."""

from __future__ import annotations

from pathlib import Path

import pytest

from offline_grpo.engine import serve
from offline_grpo.engine.vllm import LORA_KERNELS
from offline_grpo.errors import ConfigError


def test_options_reach_the_servers_command_line() -> None:
    words = "Qwen/Qwen3-0.6B --max-model-len 512 --max-num-seqs=64 --enable-lora --trust-remote-code --a 1 2"
    options, others = serve.parser().parse_known_args(words.split())
    engine = serve.launcher(options, others, None, 9001)
    line = " ".join(engine.command(options.model, 9001, {}))
    for expected in (
        "--model Qwen/Qwen3-0.6B --host 127.0.0.1 --port 9001",
        "--logprobs-mode processed_logprobs",
        "--enable-lora --max-lora-rank 16",
        "--max-model-len 512",
        "--max-num-seqs 64",
        "--trust-remote-code",
        "--a 1 2",
    ):
        assert f" {expected}" in line
    variables = engine.environment({}, None)
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables["VLLM_TUNED_CONFIG_FOLDER"] == LORA_KERNELS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--host", "0.0.0.0"], "--host=0.0.0.0: on that address others could control the server"),
        (["m", "--api-key", "hush-hush"], "--api-key: is decided elsewhere; a key is given by --api-key-file"),
        (["m", "n"], "n: MODEL is one word and comes first"),
        (["m", "--api-key-file", "/dev/null"], "--api-key-file=/dev/null: is empty"),
        (["m", "--python", "p", "--port", "x"], "--port=x: must be from 1 to 65535, or null for any free one"),
    ],
)
def test_what_cannot_be_served_is_refused(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(serve, "VllmEngine", None)  # it does not come so far
    with pytest.raises(ConfigError) as refused:
        serve.run(words)
    assert str(refused.value).startswith(message)
    assert "hush-hush" not in str(refused.value)


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of the shell")
    (tmp_path / "key").write_text(" of a file \n")
    assert serve.read_key(tmp_path / "key") == "of a file"
    assert serve.read_key(None) == "of the shell"
    monkeypatch.delenv("VLLM_API_KEY")
    assert serve.read_key(None) is None


def test_the_trainer_is_told_the_precision_of_the_server() -> None:
    for dtype, precision in (("float16", " train.precision=fp16"), ("auto", "")):
        line = f"    generation=vllm_server generation.base_url=http://127.0.0.1:9001{precision} generation.api_key=KEY"
        assert line in serve.how_to_use("m", dtype, "http://127.0.0.1:9001", has_key=True).splitlines()
