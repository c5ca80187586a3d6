"""Starting and controlling SGLang, against a stand-in written from its source (tests/fakes/fake_sglang.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from engines import COMMAND_LINE
from factories import compose_config
from fake_sglang import FakeSglang
from omegaconf import OmegaConf
from scripted_server import ScriptedServer

from offline_grpo.config.build import build
from offline_grpo.config.compose import as_plain
from offline_grpo.engine.server import Server
from offline_grpo.engine.sglang import SglangEngine, SglangLauncher
from offline_grpo.errors import ConfigError

SETTINGS: dict[str, Any] = {
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
    python, *command = SglangLauncher(**SETTINGS).command("some/model", 4321, {"context_length": 64})
    assert python == sys.executable
    assert " ".join(command) == (
        "-m sglang.launch_server --model-path some/model --host 127.0.0.1 --port 4321 "
        "--dtype float32 --context-length 64 --disable-cuda-graph --enable-deterministic-inference"
    )


def test_the_key_is_on_no_command_line(tmp_path: Path) -> None:
    """SGLang takes it as an option alone, or from a YAML file of options, which it puts before those of the command
    line.
    """
    engine = SglangLauncher(**{**SETTINGS, "api_key": "0123e45"})
    assert "0123e45" not in " ".join(engine.command("m", 1, {}))
    option, file = engine.key_args(tmp_path)
    assert option == "--config"
    assert file.endswith(".yaml")
    assert yaml.safe_load(Path(file).read_text()) == {"api-key": "0123e45"}, "a text, though it looks like a number"
    assert SglangLauncher(**SETTINGS).key_args(tmp_path) == []


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"port": 70000}, "engine.port=70000"),
        ({"args": {}}, r"engine\.args\.enable_deterministic_inference=None: SGLang would ignore seeds; set it to true"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SglangLauncher(**{**SETTINGS, **change})


# Control


@pytest.fixture
def fake() -> FakeSglang:
    return FakeSglang(api_key="secret")


@pytest.fixture
def web(fake: FakeSglang) -> Iterator[ScriptedServer]:
    with ScriptedServer(fake) as server:
        yield server


@pytest.fixture
def control(web: ScriptedServer, tmp_path: Path) -> SglangEngine:
    server = Server(base_url=web.base_url, api_key="secret", launcher=None, log_dir=tmp_path)
    return SglangEngine(server=server, eos_ids=[2], vocab_size=12, batch_size=4, timeout_s=30, max_retries=0)


@pytest.mark.parametrize("version", ["0.6.0", "nightly"])
def test_versions_that_are_not(control: SglangEngine, fake: FakeSglang, version: str) -> None:
    fake.version = version
    with pytest.raises(ConfigError, match=rf"SGLang {version} answers there, and .*; see generation.base_url$"):
        control.check_version()


def test_a_server_that_ignores_seeds_is_noticed(control: SglangEngine, fake: FakeSglang) -> None:
    assert control.lacks("full") is None
    fake.is_deterministic = False
    assert control.lacks("full") == "ignores the seeds of requests (--enable-deterministic-inference)"


def test_loading_weights_cannot_end_the_server(control: SglangEngine, fake: FakeSglang, web: ScriptedServer) -> None:
    fake.is_dirty = True
    control.load_weights("/some/folder", tag="1", pause_mode="abort")
    assert (fake.is_dead, fake.is_paused, fake.num_aborts) == (False, False, 1)
    assert [request.path for request in web.requests] == [
        *("/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"),
    ]
