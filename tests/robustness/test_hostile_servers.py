"""Whole runs against servers that anything may answer for: one line that names the URL, or the result of an undisturbed
run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import served_runs
from attacks import ATTACKS
from engines import save_model
from fake_sglang import FakeSglang
from fake_vllm import FakeVllm
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.engine import http
from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.generation import server_client

DEADLINE_S = 2.0
"""Of every call; runs have minutes."""

RPC = "/collective_rpc"
MANY_TIMES = ("/generate_tokens", "/generate", f"{RPC} grpo_tag", "/pause", "/resume")
COMMON = (
    "/health",
    "/version",
    f"{RPC} grpo_tag",
    f"{RPC} grpo_state",
    f"{RPC} grpo_set_tag",
    "/pause",
    "/resume",
    "/reset_prefix_cache",
)


@dataclass(frozen=True)
class Kind:
    """A way to sample from a server, and the routes that it uses."""

    overrides: tuple[str, ...]
    make: Callable[[Path], Any]
    routes: tuple[str, ...]
    group: str = "generation"
    """Which has the server's URL."""


VLLM = "generation=vllm_server"
KINDS = {
    "reload": Kind((VLLM, "weight_sync=reload"), FakeVllm, (*COMMON, f"{RPC} reload_weights", "/generate_tokens")),
    "shared_vllm": Kind(
        (VLLM, "weight_sync=shared_vllm"),
        FakeVllm,
        (*COMMON, f"{RPC} grpo_describe", f"{RPC} grpo_export", f"{RPC} grpo_layout", "/generate_tokens"),
    ),
    "sglang": Kind(
        ("generation=sglang_server", "weight_sync=none"),
        lambda _: FakeSglang(),
        ("/health", "/server_info", "/generate", "/generate"),
    ),
    "evaluations": Kind(
        ("eval.backend=vllm_server", "eval.interval=1"),
        FakeVllm,
        (*COMMON, f"{RPC} reload_weights", "/generate_tokens"),
        group="eval",
    ),
}


@dataclass
class Hostile:
    """Answers like `honest`, but for `times` requests to `route` ("": any), from number `first` on."""

    honest: Callable[[Request], Reply]
    attack: Callable[[Reply, Random], Reply]
    route: str
    first: int
    times: int
    random: Random
    num_seen: int = 0

    def __call__(self, request: Request) -> Reply:
        reply = self.honest(request)
        method = request.body["method"] if request.path == RPC and request.body else ""
        if self.route not in ("", f"{request.path} {method}".strip()):
            return reply
        number, self.num_seen = self.num_seen, self.num_seen + 1
        return self.attack(reply, self.random) if self.first <= number < self.first + self.times else reply


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The metrics of a run of each kind."""
    known: dict[str, Any] = {}

    def metrics(kind: str) -> Any:
        if kind not in known:
            known[kind] = sample(kind, model, tmp_path_factory.mktemp(kind), lambda honest: honest)[0]
        return known[kind]

    return metrics


def sample(kind: str, model: Path, folder: Path, disturb: Callable[[Any], Any]) -> tuple[Any, str]:
    """A short run with a server of this kind: its metrics, and the server's URL."""
    honest = KINDS[kind].make(model)
    with ScriptedServer(disturb(honest)) as web, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_client, "FIRST_PAUSE_S", 0.01)
        patch.setattr(http, "exchange", hurried(http.exchange))
        url = web.base_url
        try:
            group = KINDS[kind].group
            settings = (f"{group}.base_url={url}", f"{group}.timeout_s={DEADLINE_S}", f"{group}.max_retries=1")
            short = (
                "train.iterations=2",
                f"eval.enabled={'true' if group == 'eval' else 'false'}",
                "checkpoint.keep_best=null",
            )
            metrics = served_runs.run(folder / "run", model, *KINDS[kind].overrides, *settings, *short)
        except (EngineError, ConfigError) as error:
            return str(error), url
        finally:
            if isinstance(honest, FakeVllm):
                honest.close()
    return metrics, url


def hurried(exchange: Any) -> Any:
    """With the deadline of these tests."""
    return lambda *words, timeout_s, **named: exchange(*words, timeout_s=min(timeout_s, DEADLINE_S), **named)


CASES = [
    ("reload", "html", ""),
    ("reload", "mutated", "/generate_tokens"),
    ("shared_vllm", "slow", f"{RPC} grpo_export"),
]
QUICK = [
    *CASES,
    ("shared_vllm", "deep", f"{RPC} grpo_tag"),
    ("reload", "endless", "/generate_tokens"),
    ("sglang", "idna", "/generate"),
    ("evaluations", "html", ""),
]


def attacked(kind: str, attack: str, route: str, seed: int, undisturbed: Any, model: Path, folder: Path) -> None:
    random = Random(seed)
    first = random.choice((0, 1, 2)) if route in MANY_TIMES else 0
    times = random.choice((1, 10**6))
    started = time.monotonic()
    found, url = sample(
        kind, model, folder, lambda honest: Hostile(honest, ATTACKS[attack], route, first, times, random)
    )
    assert time.monotonic() - started < 60
    if isinstance(found, str):
        assert url in found, found
        assert found.isprintable()
        assert len(found) < 1500
    else:
        served_runs.assert_same(undisturbed(kind), found)


@pytest.mark.parametrize(("kind", "attack", "route"), QUICK)
def test_a_hostile_server(kind: str, attack: str, route: str, undisturbed: Any, model: Path, tmp_path: Path) -> None:
    attacked(kind, attack, route, 0, undisturbed, model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(60))
def test_hostile_servers(number: int, undisturbed: Any, model: Path, tmp_path: Path) -> None:
    """Every attack once, on a route and a request drawn by chance; those that depend on chance more often."""
    random = Random(number)
    kind = random.choice(("reload", "reload", "shared_vllm", "sglang", "evaluations"))
    attack = [*ATTACKS, *["mutated", "damaged"] * 10][number]
    attacked(kind, attack, random.choice((*KINDS[kind].routes, "")), number, undisturbed, model, tmp_path)
