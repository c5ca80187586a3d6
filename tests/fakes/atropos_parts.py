"""For tests of Atropos: the real API in a child process, and groups to post to it."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from runs import child_process, wait_until

from offline_grpo.engine.http import choose_port
from offline_grpo.rollouts.atropos import Atropos
from offline_grpo.types import RolloutGroup, SamplingParams

TIMEOUT_S = 30.0


def serve(port: int) -> None:
    """What `run-api` does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import uvicorn
    from atroposlib.api import app

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


class RunApi:
    """`run-api` on a port of its own; it can be killed and started again there. A context manager."""

    def __init__(self) -> None:
        self.port = choose_port("127.0.0.1", None, key="-")
        self.url = f"http://127.0.0.1:{self.port}"
        self._http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False)
        self.start()

    def start(self) -> None:
        self._process = child_process(serve, self.port, daemon=True)
        self._process.start()
        wait_until(self._answers, TIMEOUT_S, lambda: "run-api did not come up")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _answers(self) -> bool:
        try:
            return self.get("/") is not None
        except httpx.TransportError:
            return False

    def get(self, path: str, body: Any = None) -> Any:
        answer = self._http.request("GET", path, json=body)
        answer.raise_for_status()
        return answer.json() if answer.headers["content-type"].startswith("application/json") else answer.text

    def post(self, path: str, body: Any) -> Any:
        answer = self._http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def send(self, *groups: dict[str, Any]) -> None:
        """Groups of an environment that did not register."""
        for group in groups:
            self.post("/scored_data", group)

    def send_bytes(self, body: bytes) -> None:
        """A group as an environment's own JSON, NaN included."""
        self._http.post("/scored_data", content=body, headers={"Content-Type": "application/json"}).raise_for_status()

    def register_environment(self, group_size: int) -> int:
        body = {"max_token_length": 64, "desired_name": "test", "weight": 1.0, "group_size": group_size}
        return self.post("/register-env", body)["env_id"]

    def __enter__(self) -> RunApi:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._http.close()


def group(
    *sequences: tuple[list[int], list[int]], scores: list[float] | None = None, logprob: float = -0.5, **fields: Any
) -> dict[str, Any]:
    """A group's JSON: a prompt and a completion for each sequence."""
    return {
        "tokens": [prompt + completion for prompt, completion in sequences],
        "masks": [[-100] * len(prompt) + completion for prompt, completion in sequences],
        "scores": scores or [float(index) for index in range(len(sequences))],
        "inference_logprobs": [[1.0] * len(prompt) + [logprob] * len(completion) for prompt, completion in sequences],
        **fields,
    }


def pair(number: int = 0, **fields: Any) -> dict[str, Any]:
    """A group of two sequences, which `number` tells from others."""
    return group(([5, 6], [7, 2]), ([5, 6], [8, number % 20, 2]), **fields)


def make_source(url: str, **settings: Any) -> Atropos:
    """Of batches of two pairs."""
    defaults: dict[str, Any] = {
        "url": url,
        "problems_per_iteration": 2,
        "group_size": 2,
        "max_token_len": 32,
        "correct_threshold": None,
        "num_steps": 10,
        "save_checkpoint_interval": 3,
        "wandb_project": "project",
        "poll_s": 0.1,
        "connect_timeout_s": 5,
        "restart_timeout_s": 60,
        "take_over": False,
        "start_api": False,
        "environment": None,
        "client": SimpleNamespace(is_local=True),
        "codec": SimpleNamespace(decode=lambda ids: " ".join(map(str, ids))),
        "vocab_size": 30,
        "context": None,
        "model_id": "model",
        "sampling": SamplingParams(8),
        "run_folder": Path("/runs/first"),
        "rank": 0,
    }
    return Atropos(**{**defaults, **settings})


def as_json(groups: RolloutGroup) -> dict[str, Any]:
    """What an environment would send of a group."""
    rollouts = groups.rollouts
    return {
        "tokens": [list(r.token_ids) for r in rollouts],
        "masks": [[t if s else -100 for t, s in zip(r.token_ids, r.is_sampled, strict=True)] for r in rollouts],
        "scores": [r.score.reward for r in rollouts],
        "inference_logprobs": [
            [lp if s else 1.0 for lp, s in zip(r.logprobs, r.is_sampled, strict=True)] for r in rollouts
        ],
        "generation_params": {"temperature": rollouts[0].temperature},
    }
