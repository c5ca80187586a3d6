"""What the command lines of servers have in common."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from engines import COMMAND_LINE

from offline_grpo.engine.server_engine import Launcher, flags
from offline_grpo.errors import ConfigError


def test_flags() -> None:
    assert flags({"max_model_len": 512, "enable_lora": True, "seed": None, "trust": False, "zero": 0}) == [
        *("--max-model-len", "512", "--enable-lora", "--zero", "0"),
    ]
    assert flags({"config": {"a": [1]}, "lora_modules": ["a=1", "b=2"]}) == [
        "--config",
        '{"a": [1]}',
        "--lora-modules",
        "a=1",
        "b=2",
    ]


@dataclass(frozen=True, kw_only=True)
class Engine(Launcher):
    name = "The server"
    package = "no_such_package"
    variables: ClassVar[dict[str, str]] = {}

    def command(self, model: str, port: int, args: Mapping[str, Any]) -> list[str]:
        return ["python", model, f"{self.host}:{port}", *flags(args), str(self.api_key)]


def engine(**changes: Any) -> Engine:
    return Engine(**{**COMMAND_LINE, "args": {}, **changes})


def test_a_server_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^engine\.python=null: The server is not installed in this environment; name an interpreter"
    ):
        engine().check_installed()
    engine(python=sys.executable).check_installed()
    engine(env={"PYTHONPATH": "/elsewhere"}).check_installed()
    monkeypatch.setattr(Engine, "package", "pytest")
    engine().check_installed()


def test_options_that_would_get_around_a_check() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.args\.api-key=hush: is decided elsewhere; set engine.api_key"):
        engine(args={"api-key": "hush"})
