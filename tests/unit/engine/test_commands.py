"""What servers are started with: command lines, environments and keys, of vLLM, of SGLang, and of
`python -m offline_grpo.engine.serve`.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines import COMMAND_LINE
from factories import compose_config
from fake_vllm import load_extension
from omegaconf import OmegaConf

from offline_grpo.config.build import build
from offline_grpo.config.compose import as_plain
from offline_grpo.engine import serve
from offline_grpo.engine.sglang import SglangLauncher
from offline_grpo.engine.vllm import LORA_KERNELS, VllmLauncher
from offline_grpo.errors import ConfigError

# vLLM

SETTINGS: dict[str, Any] = {
    **COMMAND_LINE,
    "args": {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "enforce_eager": True,
        "seed": 0,
        "max_num_seqs": None,
        "a": False,
    },
    "blackwell_workaround": False,
}


def engine(**changes: Any) -> VllmLauncher:
    return VllmLauncher(**{**SETTINGS, **changes})


def environment(**changes: Any) -> dict[str, str]:
    return engine(**changes).environment({}, None)


def test_command() -> None:
    own = {"max_model_len": 64, "weight_transfer_config": {"a": "b"}, "lora_modules": ["a=1", "b=2"]}
    command = engine().command("some/model", 4321, own)
    assert command[0] == sys.executable
    assert " ".join(command[1:]) == (
        "-m offline_grpo_server --model some/model --host 127.0.0.1 --port 4321 "
        "--served-model-name policy --scheduler-cls offline_grpo_scheduler.bundling_scheduler "
        "--dtype bfloat16 --max-model-len 64 --enforce-eager --seed 0 "
        """--weight-transfer-config {"a": "b"} --lora-modules a=1 b=2 """
        "--worker-extension-cls offline_grpo_worker.WorkerExtension --middleware offline_grpo_generate.Generate"
    )


@pytest.mark.parametrize(
    ("num_sequences", "args", "largest"),
    [
        (512, {}, None),  # vLLM records graphs for as many by itself
        (5000, {"max_num_seqs": 2048}, 2048),
        (1000, {"enforce_eager": True}, None),
    ],
)
def test_cuda_graphs_for_as_many_sequences_as_are_sampled_at_once(
    num_sequences: int, args: dict[str, Any], largest: int | None
) -> None:
    before = engine(args=args)
    after = before.expecting(num_sequences)
    if largest is None:
        assert after is before
    else:
        sizes = after.args["cudagraph_capture_sizes"]
        assert (sizes[:5], sizes[-1], sorted(set(sizes))) == ([1, 2, 4, 8, 16], largest, sizes)
        assert replace(after, args=args) == before
        assert f"--cudagraph-capture-sizes 1 2 4 8 16 {sizes[5]}" in " ".join(after.command("m", 1, {}))


def test_a_key_guards_everything_and_other_users_cannot_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines are readable for everybody, environments are not. vLLM 0.25 files what it compiles under a hash of
    its own variables, so none of them may differ between two runs.
    """
    monkeypatch.setenv("VLLM_API_KEY", "of the shell")
    command = engine(api_key="hush-hush").command("m", 1, {})
    assert "hush-hush" not in " ".join(command)
    gate = ["--middleware", "offline_grpo_worker.TokenGate"]
    assert command[-2:] == gate  # the last one is outermost: without the key nobody samples either
    assert gate[1] not in engine().command("m", 1, {})
    one, other = (environment(api_key=key) for key in ("hush", "hush-hush"))
    assert {name for name in one if one[name] != other[name]} == {"OFFLINE_GRPO_API_KEY"}
    assert other["OFFLINE_GRPO_API_KEY"] == "hush-hush"
    assert "VLLM_API_KEY" not in other


def test_a_server_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmLauncher, "package", "no_such_package")
    with pytest.raises(ConfigError, match=r"^engine\.python=null: vLLM is not installed"):
        engine(python=None).check_installed()
    engine(python=sys.executable).check_installed()
    engine(python=None, env={"PYTHONPATH": "/elsewhere"}).check_installed()
    monkeypatch.setattr(VllmLauncher, "package", "pytest")
    engine(python=None).check_installed()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"args": {"api-key": "hush"}}, "engine.args.api-key=hush"),
        ({"port": 70000}, "engine.port=70000"),
        ({"host": "0.0.0.0"}, "engine.host=0.0.0.0"),
    ],
)
def test_settings_that_would_get_around_a_check(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        engine(**change)
    assert str(refused.value).startswith(f"{key}: ")
    assert engine(host="0.0.0.0", api_key="k").host == "0.0.0.0"


# The token gate


async def ask(kind: str, path: str, method: str, key: str | None) -> tuple[bool, list[Any]]:
    """Whether a request reached the server behind the gate, and what was sent back otherwise."""
    reached: list[str] = []
    sent: list[Any] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": kind, "path": path, "headers": headers, **({"method": method} if kind == "http" else {})}
    await load_extension().TokenGate(app)(scope, None, send)
    return reached == [kind], sent


@pytest.mark.parametrize("key", [None, "hush-hush2"])
def test_nothing_passes_without_the_token(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hush-hush")
    for path in ("/", "/pause", "/v1/completions", "/health/", "/HEALTH"):
        for method in ("GET", "POST", "OPTIONS"):
            has_passed, [start, body] = asyncio.run(ask("http", path, method, key))
            assert not has_passed, path
            assert start["status"] == 401
            assert b"hush" not in body["body"]
            assert asyncio.run(ask("http", path, method, "hush-hush")) == (True, [])
    for kind, path in (("http", "/health"), ("lifespan", "")):
        assert asyncio.run(ask(kind, path, "GET", None)) == (True, [])


# SGLang


SGLANG: dict[str, Any] = {
    **COMMAND_LINE,
    "args": {
        "dtype": "float32",
        "context_length": 512,
        "disable_cuda_graph": True,
        "max_running_requests": None,
        "enable_deterministic_inference": True,
    },
}


def test_command_of_an_engine() -> None:
    python, *command = SglangLauncher(**SGLANG).command("some/model", 4321, {"context_length": 64})
    assert python == sys.executable
    assert " ".join(command) == (
        "-m sglang.launch_server --model-path some/model --host 127.0.0.1 --port 4321 "
        "--dtype float32 --context-length 64 --disable-cuda-graph --enable-deterministic-inference"
    )


def test_the_key_is_on_no_command_line(tmp_path: Path) -> None:
    """SGLang takes it as an option alone, or from a YAML file of options, which it puts before those of the command
    line.
    """
    engine = SglangLauncher(**{**SGLANG, "api_key": "0123e45"})
    assert "0123e45" not in " ".join(engine.command("m", 1, {}))
    option, file = engine.key_args(tmp_path)
    assert option == "--config"
    assert file.endswith(".yaml")
    assert yaml.safe_load(Path(file).read_text()) == {"api-key": "0123e45"}, "a text, though it looks like a number"
    assert SglangLauncher(**SGLANG).key_args(tmp_path) == []


def test_the_shipped_engine_makes_seeds_act_and_keeps_the_temperature_in_the_logprobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = compose_config("generation=sglang_server", "weight_sync=restart", "train.precision=bf16")
    engine = build(as_plain(OmegaConf.select(config, "engine")), key="engine")
    assert isinstance(engine, SglangLauncher)
    command = engine.command("m", 1, {})
    assert "--enable-deterministic-inference" in command
    assert command[command.index("--dtype") + 1] == "bfloat16"
    environment = engine.environment({"FROM_STRATEGY": "1"}, [2])
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["FROM_STRATEGY"]) == ("2", "1")
    assert "RANK" not in environment


def test_sglang_must_heed_seeds() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.args\.enable_deterministic_inference=None: "):
        SglangLauncher(**{**SGLANG, "args": {}})


# The command


def test_options_reach_the_servers_command_line() -> None:
    words = "Qwen/Qwen3-0.6B --max-model-len 512 --max-num-seqs=64 --enable-lora --trust-remote-code --a 1 2"
    options, engine = serve.parse(["--python", sys.executable, "--port", "null", *words.split()])
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
    ("words", "option"),
    [
        (["m", "--host", "0.0.0.0"], "--host=0.0.0.0"),
        (["m", "--api-key", "hush-hush"], "--api-key"),
        (["m", "n"], "n"),
        (["m", "--api-key-file", "/dev/null"], "--api-key-file=/dev/null"),
        (["m", "--python", "p", "--port", "x"], "--port=x"),
    ],
)
def test_what_cannot_be_served_is_refused(words: list[str], option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ConfigError) as refused:
        serve.parse(words)
    assert str(refused.value).startswith(f"{option}: ")
    assert "hush-hush" not in str(refused.value)


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of the shell")
    (tmp_path / "key").write_text(" of a file \n")
    words = ["m", "--python", sys.executable, "--port", "null"]
    assert serve.parse([*words, "--api-key-file", str(tmp_path / "key")])[1].api_key == "of a file"
    assert serve.parse(words)[1].api_key == "of the shell"
    monkeypatch.delenv("VLLM_API_KEY")
    assert serve.parse(words)[1].api_key is None
