"""The processes that a run starts for Atropos beside its server: the API `run-api`, and environments. Both end with the
run, and start again if they end before it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from offline_grpo.disk import write_whole
from offline_grpo.engine.http import is_loopback, owner_of
from offline_grpo.engine.spawn import Child, Scratch, without_launch_variables
from offline_grpo.engine.vllm import SERVED_NAME
from offline_grpo.errors import ConfigError, GrpoError, require

log = logging.getLogger(__name__)

SHORT_LIFE_S = 60.0
MAX_SHORT_LIVES = 3
"""A command that ends this often in a row, each time within `SHORT_LIFE_S` of its start, is not started again."""
FOREVER = 10**9


class Processes:
    """`run-api` and the environment of a run.

    Args:
        run_folder: for their logs `api.log`, `env_0.log`, and after another start `api_1.log`, `env_1.log`.
        api_url: where the API answers, or is to answer.
        start_api: start it where none answers at an address of this machine's own.
        environment: a shell command, None for none.
    """

    def __init__(self, *, run_folder: Path, api_url: str, start_api: bool, environment: str | None) -> None:
        self.may_start_api = start_api and is_loopback(urlsplit(api_url).hostname or "")
        self._url = api_url
        self._folder = run_folder
        self._command = environment
        self._variables: dict[str, str] = {}
        self._config: dict[str, Any] = {}
        self._api = _Child("the Atropos API (run-api)", self._make_api)
        self._environment = _Child(f"rollouts.environment={environment}", self._make_environment)

    def start_api(self) -> None:
        """Start `run-api`. Raises ConfigError if something else listens there, or atroposlib is not installed."""
        fix = "atroposlib is not installed; use `uv run --extra atropos run_grpo.py ...`, or start run-api by hand"
        require(find_spec("atroposlib") is not None, "rollouts.start_api", True, fix)
        if (owner := owner_of(urlsplit(self._url).port or 80)) is not None:
            fix = "stop that process, or choose another port"
            raise ConfigError(f"rollouts.url={self._url}: is taken by {owner}, which is no Atropos API; {fix}")
        log.info("starting run-api at %s; its log: %s", self._url, self._folder / "api.log")
        self._api.start()

    def start_environment(
        self, *, server_url: str, server_key: str | None, model: str, group_size: int, max_new_tokens: int
    ) -> None:
        """Start the environment, which samples from the server at `server_url`. Variables are for environments that
        know this project, and a file for `--config` of any environment of `atroposlib`.

        Args:
            server_key: None if the server asks for none.
            model: folder or Hub id that has the tokenizer.
        """
        self._variables = {
            "OFFLINE_GRPO_SERVER_URL": server_url,
            "OFFLINE_GRPO_SERVER_KEY": server_key or "",
            "OFFLINE_GRPO_SERVED_NAME": SERVED_NAME,
            "OFFLINE_GRPO_API_URL": self._url,
            "OFFLINE_GRPO_MODEL": model,
            "OFFLINE_GRPO_RUN": str(self._folder),
        }
        server = {
            "server_type": "vllm",
            "base_url": f"{server_url}/v1",
            "api_key": server_key or "",
            "model_name": SERVED_NAME,
            "tokenizer_name": model,
        }
        env = {
            "tokenizer_name": model,
            "rollout_server_url": self._url,
            "group_size": group_size,
            "max_token_length": max_new_tokens,
            "total_steps": FOREVER,  # the run decides when it ends
            "min_batch_allocation": None,  # an environment that had one and ended would keep all batches back
            "use_wandb": False,
            "wandb_name": "environment",  # one without a name cannot register
        }
        # twice: of a single server, atroposlib may take the address in the environment's code, or those of a cluster
        self._config = {"env": env, "openai": [server, server]}
        log.info("starting the environment %s; its log: %s", self._command, self._folder / "env_0.log")
        self._environment.start()

    def keep_running(self) -> bool:
        """Start again what has ended, and return whether that was the API. Raises GrpoError if it keeps ending."""
        if not self._api.revive():
            self._environment.revive()
            return False
        if self._config:
            self._environment.stop()  # the new API does not know it
            self._environment.start()
        return True

    def close(self) -> None:
        """End what was started, and wait until it has gone."""
        self._environment.stop()
        self._api.stop()

    def _make_api(self, number: int, scratch: Path) -> Child:
        url = urlsplit(self._url)
        address = ["--host", url.hostname or "", "--port", str(url.port or 80)]
        return Child(
            [sys.executable, "-m", "atroposlib.cli.run_api", *address],
            env=_environment_of_children(),
            log_path=self._folder / (f"api_{number}.log" if number else "api.log"),
            remove=scratch,
        )

    def _make_environment(self, number: int, scratch: Path) -> Child:
        config = scratch / "environment.yaml"
        write_whole(config, json.dumps(self._config), is_private=True)  # JSON is YAML
        return Child(
            ["sh", "-c", str(self._command)],
            env={**_environment_of_children(), **self._variables, "OFFLINE_GRPO_ENV_CONFIG": str(config)},
            log_path=self._folder / f"env_{number}.log",
            remove=scratch,
        )


class _Child:
    """A command that is started again when it ends. `make` starts it for the n-th time, with a private folder."""

    def __init__(self, name: str, make: Callable[[int, Path], Child]) -> None:
        self._name = name
        self._make = make
        self._process: Child | None = None
        self._scratch: Scratch | None = None
        self._num_starts = self._num_short_lives = 0
        self._started = 0.0

    def start(self) -> None:
        self._scratch = Scratch()
        self._process = self._make(self._num_starts, self._scratch.path)
        self._num_starts += 1
        self._started = time.monotonic()

    def revive(self) -> bool:
        """Start it again if it has ended by itself. Returns whether it had."""
        if self._process is None or (end := self._process.how_it_ended()) is None:
            return False
        self.stop()
        self._num_short_lives = self._num_short_lives + 1 if time.monotonic() - self._started < SHORT_LIFE_S else 0
        if self._num_short_lives >= MAX_SHORT_LIVES:
            often = f"has ended {MAX_SHORT_LIVES} times in a row within {SHORT_LIFE_S:g} s of its start"
            raise GrpoError(f"{self._name}: {often}; it {end}")
        log.warning("%s %s Starting it again.", self._name, end)
        self.start()
        return True

    def stop(self) -> None:
        if self._process is not None and self._scratch is not None:
            self._process.stop()
            self._scratch.remove()
            self._process = self._scratch = None


def _environment_of_children() -> dict[str, str]:
    """This process's own, without what a launcher of several processes sets. `python` is the run's interpreter."""
    path = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ.get("PATH"))))
    return {**without_launch_variables(os.environ), "PATH": path, "PYTHONUNBUFFERED": "1"}
