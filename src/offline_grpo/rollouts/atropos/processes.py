"""What a run starts for Atropos beside its server: the API `run-api`, and environments. Both end with the run, and
start again if they end before it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from offline_grpo.disk import write_whole
from offline_grpo.engine.launcher import without_launch_variables
from offline_grpo.engine.ports import is_loopback, owner_of
from offline_grpo.engine.process import Scratch, ServerProcess
from offline_grpo.engine.vllm import SERVED_NAME
from offline_grpo.errors import ConfigError, GrpoError

log = logging.getLogger(__name__)

SHORT_LIFE_S = 60.0
MAX_SHORT_LIVES = 3
"""A command that ends this often in a row, each time sooner after its start than `SHORT_LIFE_S`, is not started again.
"""
API_TIMEOUT_S = 120.0
POLL_S = 0.2
FOREVER = 10**9


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What an environment must know of the run.

    Args:
        server_url, server_key: the inference server that it calls; a key of None: it asks for none.
        model: folder or Hub id that has the tokenizer.
        api_url: where `run-api` answers.
        run_folder: its `.hydra/config.yaml` says which task the run trains on.
        group_size: rollouts in a group.
        max_new_tokens: of a completion.
    """

    server_url: str
    server_key: str | None = field(repr=False)
    model: str
    api_url: str
    run_folder: Path
    group_size: int
    max_new_tokens: int

    def variables(self) -> dict[str, str]:
        """For environments that know this project, such as offline_grpo.run.task_environment."""
        return {
            "OFFLINE_GRPO_SERVER_URL": self.server_url,
            "OFFLINE_GRPO_SERVER_KEY": self.server_key or "",
            "OFFLINE_GRPO_SERVED_NAME": SERVED_NAME,
            "OFFLINE_GRPO_API_URL": self.api_url,
            "OFFLINE_GRPO_MODEL": self.model,
            "OFFLINE_GRPO_RUN": str(self.run_folder),
        }

    def config_file(self) -> dict[str, Any]:
        """For `--config` of any environment of `atroposlib`, whose own settings it comes on top of.

        The server is named twice: of a single one, atroposlib may take the address in the environment's code, or those
        of a cluster.
        """
        server = {
            "server_type": "vllm",
            "base_url": f"{self.server_url}/v1",
            "api_key": self.server_key or "",
            "model_name": SERVED_NAME,
            "tokenizer_name": self.model,
        }
        env = {
            "tokenizer_name": self.model,
            "rollout_server_url": self.api_url,
            "group_size": self.group_size,
            "max_token_length": self.max_new_tokens,
            "total_steps": FOREVER,  # the run decides when it ends
            "min_batch_allocation": None,  # an environment that had one and ended would keep all batches back
            "use_wandb": False,
            "wandb_name": "environment",  # one without a name cannot register
        }
        return {"env": env, "openai": [server, server]}


class Processes:
    """`run-api` and the environment of a run.

    Args:
        run_folder: where their logs go: `api.log`, `env_0.log`, and after another start `api_1.log`, `env_1.log`.
        api_url: where the API answers, or is to answer.
        start_api: start it where none answers at an address of this machine's own.
        environment: a shell command, None for none.
    """

    def __init__(self, *, run_folder: Path, api_url: str, start_api: bool, environment: str | None) -> None:
        self.may_start_api = start_api and is_loopback(urlsplit(api_url).hostname or "")
        self._url = api_url
        self._folder = run_folder
        self._command = environment
        self._surroundings: Surroundings | None = None
        self._scratch: Scratch | None = None
        self._api = _Child("the Atropos API (run-api)", self._make_api)
        self._environment = _Child(f"rollouts.environment={environment}", self._make_environment)

    def start_api(self, answers: Callable[[], bool]) -> None:
        """Start `run-api` where the URL says, and wait until it answers. Only if `may_start_api`, and nothing answers
        there.

        Raises:
            ConfigError: something else listens there, or atroposlib is not installed.
            GrpoError: it does not start.
        """
        if find_spec("atroposlib") is None:
            raise ConfigError(
                "rollouts.start_api=true: atroposlib, which has the Atropos API, is not installed in this "
                "environment; start with "
                "`uv run --extra atropos run_grpo.py ...`, or start run-api by hand and set rollouts.start_api=false"
            )
        if (owner := owner_of(urlsplit(self._url).port or 80)) is not None:
            raise ConfigError(
                f"rollouts.url={self._url}: is taken by {owner}, which is no Atropos API; stop that process, or "
                f"choose another port"
            )
        log.info("starting run-api at %s; its log: %s", self._url, self._folder / "api.log")
        self._api.start()
        self._wait_for_api(answers)

    def start_environment(self, surroundings: Surroundings) -> None:
        """Start the environment's command, if there is one."""
        self._surroundings = surroundings
        if self._command is not None:
            log.info("starting the environment: %s; its log: %s", self._command, self._folder / "env_0.log")
            self._environment.start()

    def keep_running(self, answers: Callable[[], bool]) -> bool:
        """Start again what has ended meanwhile. Returns whether that was the API, which then knows no trainer any more.

        Raises:
            GrpoError: it keeps ending.
        """
        if not self._api.revive():
            self._environment.revive()
            return False
        self._environment.stop()  # the new API would not know it
        self._wait_for_api(answers)
        if self._surroundings is not None and self._command is not None:
            self._environment.start()
        return True

    def close(self) -> None:
        """End what was started, and wait until it has gone."""
        self._environment.stop()
        self._api.stop()
        self._remove_scratch()

    def _wait_for_api(self, answers: Callable[[], bool]) -> None:
        deadline = time.monotonic() + API_TIMEOUT_S
        while not answers():
            self._api.revive()
            if time.monotonic() > deadline:
                raise GrpoError(
                    f"rollouts.url={self._url}: run-api did not answer within {API_TIMEOUT_S:g} s; see "
                    f"{self._folder}/api.log"
                )
            time.sleep(POLL_S)

    def _make_api(self, number: int) -> ServerProcess:
        url = urlsplit(self._url)
        address = ["--host", url.hostname or "", "--port", str(url.port or 80)]
        return ServerProcess(
            [sys.executable, "-m", "atroposlib.cli.run_api", *address],
            env=_environment_of_children(),
            log_path=self._folder / (f"api_{number}.log" if number else "api.log"),
        )

    def _make_environment(self, number: int) -> ServerProcess:
        assert self._surroundings is not None
        assert self._command is not None
        self._remove_scratch()
        self._scratch = Scratch()
        config = self._scratch.path / "environment.yaml"
        write_whole(config, json.dumps(self._surroundings.config_file()), is_private=True)  # JSON is YAML
        variables = {**self._surroundings.variables(), "OFFLINE_GRPO_ENV_CONFIG": str(config)}
        return ServerProcess(
            ["sh", "-c", self._command],
            env={**_environment_of_children(), **variables},
            log_path=self._folder / f"env_{number}.log",
            remove=self._scratch.path,
        )

    def _remove_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None


class _Child:
    """A command that is started again when it ends. `make` starts it for the n-th time, counted from 0."""

    def __init__(self, name: str, make: Callable[[int], ServerProcess]) -> None:
        self._name = name
        self._make = make
        self._process: ServerProcess | None = None
        self._num_starts = self._num_short_lives = 0
        self._started = 0.0

    def start(self) -> None:
        self._process = self._make(self._num_starts)
        self._num_starts += 1
        self._started = time.monotonic()

    def revive(self) -> bool:
        """Start it again if it has ended by itself. Returns whether it had."""
        if self._process is None or (end := self._process.how_it_ended()) is None:
            return False
        self._process.stop()
        self._num_short_lives = self._num_short_lives + 1 if time.monotonic() - self._started < SHORT_LIFE_S else 0
        if self._num_short_lives >= MAX_SHORT_LIVES:
            raise GrpoError(
                f"{self._name}: has ended {MAX_SHORT_LIVES} times in a row within {SHORT_LIFE_S:g} s of its start; "
                f"it {end}"
            )
        log.warning("%s %s Starting it again.", self._name, end)
        self.start()
        return True

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


def _environment_of_children() -> dict[str, str]:
    """This process's own environment, without what a launcher of several processes sets. `python` is the run's own
    interpreter.
    """
    path = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), os.environ.get("PATH"))))
    return {**without_launch_variables(os.environ), "PATH": path, "PYTHONUNBUFFERED": "1"}
