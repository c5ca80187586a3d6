"""How an inference server is started: the components of the group `engine`."""

from __future__ import annotations

import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

from offline_grpo.engine.ports import is_loopback
from offline_grpo.errors import ConfigError, require

ELSEWHERE = {
    "host": "engine.host",
    "port": "engine.port",
    "api_key": "engine.api_key",
    "model": "model.train_id",
    "model_path": "model.train_id",
    "worker_extension_cls": "nothing: the run needs its own",
    "middleware": "engine.api_key, whose check it is",
}
"""Options that `engine.args` must not set, and the setting that controls each."""


@dataclass(frozen=True, kw_only=True)
class Launcher(ABC):
    """Settings of a server that the run starts, and the command line that they make. Without `api_key` it asks for
    none; a run makes one up, see `training_engine`.
    """

    python: str | None
    host: str
    port: int | None
    api_key: str | None = field(repr=False)
    start_timeout_s: float
    args: Any
    env: Any

    name: ClassVar[str]
    package: ClassVar[str]
    variables: ClassVar[Mapping[str, str]]
    """Environment variables that the server needs."""
    tells_of_memory: ClassVar[bool] = False
    """Whether the server makes the file OFFLINE_GRPO_HAS_MEMORY of its environment; see `Server.wait_for_memory`."""

    def __post_init__(self) -> None:
        port_fix = "must be from 1 to 65535, or null for a free one"
        require(self.port is None or 0 < self.port < 65536, "engine.port", self.port, port_fix)
        require(self.start_timeout_s > 0, "engine.start_timeout_s", self.start_timeout_s, "must be above 0")
        python_fix = "no such interpreter; null takes the one that runs this"
        require(self.python is None or os.access(self.python, os.X_OK), "engine.python", self.python, python_fix)
        for name, value in self.args.items():
            instead = ELSEWHERE.get(name.replace("-", "_"))
            require(instead is None, f"engine.args.{name}", value, f"is decided elsewhere; set {instead}")
        key_fix = "on that address others could control the server; set engine.api_key, or engine.host=127.0.0.1"
        require(self.api_key is not None or is_loopback(self.host), "engine.host", self.host, key_fix)

    @abstractmethod
    def command(self, model: str, port: int, args: Mapping[str, Any]) -> list[str]:
        """The command line that serves `model`, with a strategy's `args` on top of the configured ones."""

    def environment(self, env: Mapping[str, str], gpus: Sequence[int] | None) -> dict[str, str]:
        """The whole environment of the command, with a strategy's `env`, `engine.env`, which wins, and the GPUs that it
        may see (None: those that we see).
        """
        chosen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": visible(gpus)}
        given = {name: str(value) for name, value in self.env.items()}
        return {**without_launch_variables(os.environ), **chosen, **self.variables, **env, **given}

    def key_args(self, folder: Path) -> list[str]:
        """Options for a key, which must not stand on the command line: other users can read that. May write to the
        private `folder`.
        """
        return []

    def check_installed(self) -> None:
        """Raise ConfigError if the server's package is certainly missing. Another interpreter is not looked into."""
        if self.python is None and "PYTHONPATH" not in self.env and find_spec(self.package) is None:
            extra = "start with `uv run --extra vllm run_grpo.py ...`, or " if self.package == "vllm" else ""
            fix = f"name an interpreter that has {self.name}, or the generation.base_url of a server that is running"
            raise ConfigError(f"engine.python=null: {self.name} is not installed in this environment; {extra}{fix}")

    def expecting(self, num_sequences: int) -> Self:
        """The same engine, ready for as many sequences at once."""
        return self

    @property
    def interpreter(self) -> str:
        return self.python or sys.executable


def flags(settings: Mapping[str, Any]) -> list[str]:
    """`{"max_model_len": 512, "enable_lora": True, "seed": None}` as `--max-model-len 512 --enable-lora`."""
    words = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, dict):
            words.append(json.dumps(value))
        elif value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def visible(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for GPUs numbered as this process sees them."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(ours.split(",")[gpu] if ours else str(gpu) for gpu in gpus)


def without_launch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Free of what a launcher of several training processes sets: the server would take itself for one of them."""
    launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    prefixes = ("TORCHELASTIC_", "ACCELERATE_")
    return {name: value for name, value in environment.items() if name not in launch and not name.startswith(prefixes)}
