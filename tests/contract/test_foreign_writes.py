"""Somebody else writes to the weights that a run shares with its server, or has them loaded anew: nothing is learnt
from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CPU, save_model, serve_again
from served_runs import assert_same, at, run
from transformers import AutoModelForCausalLM

from offline_grpo.checkpoint.checkpointer import Checkpointer
from offline_grpo.engine.http import ServerApi
from offline_grpo.engine.server import Server
from offline_grpo.errors import EngineError, ForeignWrite
from offline_grpo.eval.evaluator import PassAtKEvaluator
from offline_grpo.model.masters import MasterWeights
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.train.update import Updater
from offline_grpo.weight_sync.deployment import Deployment

pytestmark = pytest.mark.parametrize("where", [pytest.param(CPU, id="cpu")], indirect=True, scope="session")

THREE = (
    "weight_sync=shared_vllm",
    "train.iterations=3",
    "eval.interval=3",
    "checkpoint.enabled=true",
    "checkpoint.save_interval=1",
    "train.loss.importance_correction=none",
)
"""What is learnt depends on the sampled tokens and not on the last bits of their logprobs, which differ from run to run
in vLLM.
"""


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other values everywhere, the embeddings included."""
    folder = save_model(tmp_path_factory.mktemp("other") / "model")
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def attack(full_server: Server, model_folder: Path, other_model: Path) -> Callable[[], Any]:
    """What any other client of the server can do."""
    serve_again(full_server, model_folder, CPU)
    api = ServerApi(full_server.base_url, None)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(other_model)}, "timeout": 60}
    return lambda: api.post("/collective_rpc", body)


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, calls: Collection[int], act: Callable[[], Any]) -> None:
    """Let `act` happen at the end of some of the calls of a method, counted from 0."""
    original, number = getattr(owner, name), count()

    def method(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if next(number) in calls:
            act()
        return result

    patch.setattr(owner, name, method)


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints" / "iter_002" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(
    full_server: Server, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    serve_again(full_server, model_folder, CPU)
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, run(folder, model_folder, *at(full_server), *THREE)


DISCARDED, REPEATED = "somebody else has written to the shared weights", "what was computed from them is computed again"
PLACES: dict[str, tuple[Any, str, int, str]] = {
    "while sampling": (OnPolicy, "next", 1, DISCARDED),
    "before training": (Deployment, "check_served", 2, REPEATED),
    "after the first of two updates": (MasterWeights, "publish", 2, REPEATED),
    "before a push": (MasterWeights, "publish", 3, DISCARDED),
    "while evaluating": (PassAtKEvaluator, "sample", 1, DISCARDED),
    "while saving": (Checkpointer, "write", 1, REPEATED),
    "while saving the last": (Checkpointer, "write", 2, REPEATED),
}


QUICK = ("while sampling", "after the first of two updates", "while saving")


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place in QUICK else pytest.mark.slow) for place in PLACES]
)
def test_a_run_ends_as_if_nobody_had_written(
    place: str,
    full_server: Server,
    model_folder: Path,
    attack: Callable[[], Any],
    undisturbed: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    owner, name, call, says = PLACES[place]
    after(monkeypatch, owner, name, [call], attack)
    found = run(tmp_path / "run", model_folder, *at(full_server), *THREE)
    assert weights(tmp_path / "run") == weights(undisturbed[0])
    assert_same(found, undisturbed[1])
    assert found["train_iter_002.json"]["sync/num_foreign_writes"] == (
        place not in ("while evaluating", "while saving the last")
    )
    assert says in (tmp_path / "run" / "run.log").read_text()


IN_A_ROW = [
    pytest.param(
        *(OnPolicy, "next", range(1, 9), ForeignWrite, "train_iter_001.json"),
        r"written to the shared weights \(28 tensors: .*generation.base_url=null.* obeys nobody else",
        id="while sampling",
    ),
    pytest.param(
        *(Updater, "_gradients", range(4, 9), EngineError, "train_iter_002.json"),
        r"twice in a row: .*obeys nobody else",
        id="while training",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("owner", "name", "calls", "error", "unwritten", "says"), IN_A_ROW)
def test_twice_in_a_row_ends_the_run(
    owner: Any,
    name: str,
    calls: range,
    error: type[EngineError],
    unwritten: str,
    says: str,
    full_server: Server,
    model_folder: Path,
    attack: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    after(monkeypatch, owner, name, calls, attack)
    with pytest.raises(error, match=says):
        run(tmp_path / "run", model_folder, *at(full_server), *THREE)
    assert not (tmp_path / "run" / "metrics" / unwritten).exists()


@pytest.mark.slow  # two runs
def test_frozen_weights_come_back_too(
    full_server: Server, model_folder: Path, attack: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    frozen = ("train.train_layer_indices=1", *THREE)
    run(tmp_path / "undisturbed", model_folder, *at(full_server), *frozen)
    serve_again(full_server, model_folder, CPU)
    after(monkeypatch, OnPolicy, "next", [1], attack)
    found = run(tmp_path / "disturbed", model_folder, *at(full_server), *frozen)
    assert weights(tmp_path / "disturbed") == weights(tmp_path / "undisturbed")
    assert found["train_iter_002.json"]["sync/num_foreign_writes"] == 1


def test_a_server_with_weights_of_its_own_notices_that_others_load_some(
    full_server: Server, model_folder: Path, attack: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the run's own are loaded again before anybody looks: what was sampled in between came from others."""
    after(monkeypatch, OnPolicy, "next", [1], attack)
    found = run(tmp_path / "run", model_folder, *at(full_server), *THREE, "weight_sync=reload")
    assert [found[f"train_iter_{i:03d}.json"]["sync/num_foreign_writes"] for i in range(3)] == [0, 1, 1]
    assert "somebody else has loaded weights into the server" in (tmp_path / "run" / "run.log").read_text()
