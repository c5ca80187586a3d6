"""One real server for all clients and strategies that can share one; the same tests run on the CPU and, with `-m gpu`,
on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import (
    CPU,
    GPU,
    IPC_ARGS,
    IPC_ENV,
    LORA_ARGS,
    SERVER_PYTHON,
    Where,
    deploy,
    load,
    make_client,
    make_server,
    preloaded_python,
    running,
    save_model,
    serve_again,
)
from factories import strategy

from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.model.policy import Policy
from offline_grpo.weight_sync.deployment import Deployment

Connected = tuple[Deployment, Policy, VllmEngine]


@pytest.fixture(
    scope="session", params=[pytest.param(CPU, id="cpu"), pytest.param(GPU, id="gpu", marks=pytest.mark.gpu)]
)
def where(request: pytest.FixtureRequest) -> Where:
    return request.param


@pytest.fixture(scope="session")
def model_folder(where: Where, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tied", dtype=where.dtype)


def one_serves_all(where: Where) -> bool:
    """On CPUs one server can serve weights and adapters; older ones, 0.27 for one, cannot load weights again then."""
    return where.device.type == "cpu" and SERVER_PYTHON is None


@pytest.fixture(scope="session")
def full_server(where: Where, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """For strategies that move all weights."""
    folder = tmp_path_factory.mktemp("full")
    args: dict[str, Any] = LORA_ARGS if one_serves_all(where) else {}
    env: dict[str, str] = {}
    changes = {"python": preloaded_python(folder)} if one_serves_all(where) else {}
    if where.device.type == "cuda":
        args, env = IPC_ARGS, IPC_ENV
    with running(make_server(where, folder, args=args, env=env, **changes), model_folder) as server:
        yield server


@pytest.fixture(scope="session")
def second_server(where: Where, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Like `full_server`, beside it, with vLLM's own logprobs: those before the temperature."""
    folder = tmp_path_factory.mktemp("second")
    settings: dict[str, Any] = (
        {"args": LORA_ARGS, "python": preloaded_python(folder)} if one_serves_all(where) else {"args": {}}
    )
    if where.device.type == "cuda":
        settings = {"args": IPC_ARGS, "env": IPC_ENV}
    settings["args"] = settings["args"] | {"logprobs_mode": "raw_logprobs"}
    with running(make_server(where, folder, **settings), model_folder) as server:
        yield server


@pytest.fixture(scope="session")
def lora_server(
    where: Where, model_folder: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """For strategies that move adapters."""
    if one_serves_all(where):
        yield request.getfixturevalue("full_server")
        return
    with running(make_server(where, tmp_path_factory.mktemp("lora"), args=LORA_ARGS), model_folder) as server:
        yield server


@pytest.fixture
def connect(where: Where, model_folder: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Connected]]:
    """Connects a strategy to the session's server, which serves the saved model again before and after; `others` are
    further servers.
    """
    opened: list[Deployment] = []

    def connect(option: str, *overrides: str, others: Sequence[VllmEngine] = (), rank: int = 8) -> Connected:
        is_lora = option.startswith("lora")
        server = request.getfixturevalue("lora_server" if is_lora else "full_server")
        if not is_lora or one_serves_all(where):
            serve_again(server, model_folder, where)
        sync = strategy(option, f"weight_sync.tolerance_nats={where.tolerance_nats}", *overrides)
        for other in others:
            serve_again(other, model_folder, where)
        policy = load(model_folder, where, shared=sync.requires.shares_weights, lora=is_lora, rank=rank)
        client = make_client(server)
        deployment = deploy(sync, client, *(make_client(other) for other in others))
        opened.append(deployment)
        deployment.connect(policy)
        policy.make_masters()
        return deployment, policy, client

    yield connect
    for deployment in opened:
        deployment.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    """CUDA IPC needs a GPU, and `second_server` takes adapters on CPUs only: other combinations are no tests."""

    def is_possible(item: Any) -> bool:
        params = getattr(getattr(item, "callspec", None), "params", {})
        option, where = params.get("option"), params.get("where")
        return not (
            (option == "ipc" and where is CPU)
            or (option == "lora_hotswap" and where is GPU and "second_server" in item.fixturenames)
        )

    impossible = [item for item in items if not is_possible(item)]
    config.hook.pytest_deselected(items=impossible)
    items[:] = [item for item in items if item not in impossible]
