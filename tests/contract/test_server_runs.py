"""Whole runs beside a vLLM server on the CPU: found, started or restarted; all follow one trajectory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import CPU, distance, kill_engine, load, make_client, metric, preloaded_python, save_model, serve_again
from factories import prompt_of, sampled
from runs import assert_same, at, five, metrics_of, own_server, printed, run, run_in_children
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo import evaluate
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import ConfigError
from offline_grpo.model import load as loading
from offline_grpo.rollouts.on_policy import OnPolicy
from offline_grpo.types import Completion, FinishReason, Rollout

Found = dict[str, dict[str, dict[str, float]]]
"""Strategy -> metrics of its run."""
LORA = ("model/lora=default", "train.lr=1e-2")

pytestmark = pytest.mark.parametrize("where", [pytest.param(CPU, id="cpu")], indirect=True, scope="session")


THREE = ("train.iterations=3", "eval.interval=3")


@pytest.fixture
def server(full_server: VllmEngine, model_folder: Path) -> VllmEngine:
    """The session's, with the saved model's weights."""
    serve_again(full_server, model_folder, CPU)
    return full_server


@pytest.fixture(scope="module")
def undisturbed(full_server: VllmEngine, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The metrics of three iterations with each of two strategies."""
    found = {}
    for option in ("reload", "shared_vllm"):
        serve_again(full_server, model_folder, CPU)
        words = (*at(full_server), f"weight_sync={option}", *THREE)
        found[option] = run(tmp_path_factory.mktemp(option) / "run", model_folder, *words)
    return found


@pytest.mark.slow
def test_strategies_follow_one_trajectory(undisturbed: Found) -> None:
    reload, shared = undisturbed["reload"], undisturbed["shared_vllm"]
    assert len(reload) == 5  # three iterations, two evaluations
    assert_same(reload, shared)
    trained = [reload[f"train_iter_{i:03d}.json"] for i in range(3)]
    assert len({metrics["reward_mean"] for metrics in trained}) > 1
    assert [metrics["sync/version"] for metrics in trained] == [2.0, 4.0, 6.0]
    assert all(metrics["alignment/diff_abs_mean"] < 1e-4 for metrics in trained)


@pytest.mark.slow  # two starts of a server
def test_restarted_servers_follow_it_too(lora_server: VllmEngine, model_folder: Path, tmp_path: Path) -> None:
    serve_again(lora_server, model_folder, CPU)
    words = ("train.iterations=1", "eval.interval=1", *LORA)
    hotswap = run(tmp_path / "quick", model_folder, *at(lora_server), "weight_sync=lora_hotswap", *words)
    own = own_server(preloaded_python(tmp_path))
    restarted = run(tmp_path / "restarting", model_folder, *own, "weight_sync=lora_restart", *words)
    assert hotswap["eval_init.json"] != hotswap["eval_iter_000.json"]  # what is served after the iteration is another
    assert_same(hotswap, restarted)


@pytest.mark.slow
def test_a_found_server_that_is_started_anew_gets_the_weights_again(
    undisturbed: Found, server: VllmEngine, model_folder: Path, tmp_path: Path
) -> None:
    """Between a push and the sampling after it: what it samples from its own weights is not trained on."""

    def start_anew() -> None:
        serve_again(server, model_folder, CPU)
        make_client(server).call_workers("grpo_set_tag", tag=None)

    words, mishaps = (*at(server), "weight_sync=shared_vllm", *THREE), {("generate", 1): start_anew}
    disturbed = run(tmp_path / "disturbed", model_folder, *words, mishaps=mishaps)
    assert_same(disturbed, undisturbed["shared_vllm"])
    assert disturbed["train_iter_001.json"]["sync/num_recoveries"] == 1
    assert disturbed["train_iter_001.json"]["alignment/diff_abs_mean"] < 1e-4
    assert "was started anew" in (tmp_path / "disturbed" / "run.log").read_text()


def passed_on(server: VllmEngine, request: Request) -> Reply:
    """The server's own answer."""
    answer = httpx.request(
        request.method, server.base_url + request.path, params=request.query, json=request.body, timeout=120
    )
    return Reply(
        answer.content,
        status=answer.status_code,
        headers={"Content-Type": answer.headers.get("content-type", "text/plain")},
    )


USED_OF_STOCK = {"/health", "/version", "/v1/completions"}


@pytest.fixture
def stock(server: VllmEngine) -> Iterator[ScriptedServer]:
    """The server as `vllm serve` starts it: what development mode and the worker extension add is not there."""

    def script(request: Request) -> Reply:
        return (
            passed_on(server, request) if request.path in USED_OF_STOCK else Reply({"detail": "Not Found"}, status=404)
        )

    with ScriptedServer(script) as web:
        yield web


TWO = ("train.iterations=2", "eval.interval=2")


def test_a_stock_server_is_refused_before_a_model_is_loaded(
    stock: ScriptedServer, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, overrides, lack = "generation.base_url", ("weight_sync=lora_hotswap", *LORA), "does not load adapters"
    monkeypatch.setattr(loading, "load_policy", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(
        ConfigError, match=rf"^{key}={stock.base_url}: that server {lack}.* Start one that has it: [^\n]*$"
    ) as refused:
        run(tmp_path / "run", model_folder, *at(stock.base_url), *overrides)
    command = str(refused.value).partition("Start one that has it: ")[2]
    assert (
        f"python -m offline_grpo.engine.serve {model_folder} --port {stock.base_url.rpartition(':')[2]} --dtype float32"
        in command
    )
    assert "--enable-lora --max-lora-rank 16" in command
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_frozen_server_is_asked_and_never_touched(
    stock: ScriptedServer, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts of both iterations are the starting model's, though the policy has moved on, and the metrics say so."""
    drawn: list[Any] = []
    draw = OnPolicy.next
    monkeypatch.setattr(OnPolicy, "next", lambda self, iteration: drawn.append(draw(self, iteration)) or drawn[-1])
    found = run(tmp_path / "run", model_folder, *at(stock.base_url), "weight_sync=none", *TWO)
    assert {request.path for request in stock.requests} == USED_OF_STOCK | {"/generate_tokens"}, (
        "which it does not have"
    )
    start = load(model_folder, CPU)
    for groups in drawn:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert {version for rollout in rollouts for version in rollout.versions} == {0}
        assert distance_of(start, rollouts) < CPU.tolerance_nats
    assert all(metrics["sync/frozen"] == 1 for metrics in found.values())
    assert [found[f"train_iter_{i:03d}.json"]["sync/version"] for i in range(2)] == [0, 0]
    assert (
        found["train_iter_001.json"]["alignment/diff_abs_mean"]
        > 1e-2
        > 1e-4
        > found["train_iter_000.json"]["alignment/diff_abs_mean"]
    )


def test_filtered_samples_are_what_the_policy_would_draw(
    server: VllmEngine, stock: ScriptedServer, model_folder: Path, tmp_path: Path
) -> None:
    """From a stock server, and then from one that gets the weights: the trainer has their logprobs."""
    filters = ("generation.top_p=0.9", "generation.min_p=0.02", "generation.temperature=0.7")
    found = {
        name: run(tmp_path / name, model_folder, *at(url), *TWO, *filters, *words)
        for name, url, *words in (
            ("stock", stock.base_url, "weight_sync=none", "train.iterations=1"),
            ("ours", server, "weight_sync=shared_vllm", "generation.top_k=20"),
        )
    }
    for metrics in (found["ours"]["train_iter_001.json"], *(each["train_iter_000.json"] for each in found.values())):
        assert metrics["alignment/diff_abs_mean"] < 1e-5
        assert metrics["mismatch/ess_frac"] > 0.9999
    assert found["ours"]["train_iter_001.json"]["sync/version"] > 0


def distance_of(policy: Any, rollouts: list[Rollout]) -> float:
    """Mean |policy - server| over the rollouts' tokens, in nats."""
    completions = []
    for rollout in rollouts:
        token_ids = sampled(rollout)
        completions.append(
            Completion(token_ids, rollout.logprobs[-len(token_ids) :], FinishReason.STOP, (0,) * len(token_ids))
        )
    return distance(policy, completions, [prompt_of(rollout) for rollout in rollouts])


@pytest.mark.slow
def test_two_processes_share_a_server_and_its_recovery(undisturbed: Found, model_folder: Path, tmp_path: Path) -> None:
    """The engine is killed in the run; the second process did not start it and learns of its death too."""
    words, folder = (*own_server(preloaded_python(tmp_path)), "weight_sync=shared_vllm", *THREE), tmp_path / "together"
    mishaps = {("generate", 1): partial(kill_engine, folder)}
    codes = run_in_children(2, folder, *five(model_folder), *words, mishaps=mishaps)
    assert codes == [0, 0], printed(folder)
    found = metrics_of(folder)
    assert found["train_iter_002.json"]["sync/num_recoveries"] == 1
    assert_same(undisturbed["shared_vllm"], found)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["weight_sync.interval=2", "mode=async rollouts.max_staleness=0"])
def test_four_that_have_a_part_of_each_weight_are_one(
    mode: str, undisturbed: Found, server: VllmEngine, model_folder: Path, tmp_path: Path
) -> None:
    """Served weights older than the policy's, which four processes keep in parts, and sampling in a thread beside
    collectives, which changes nothing. Every push is proven by logprobs, which all compute.
    """
    words, four = (*at(server), "weight_sync=reload", *THREE, *mode.split()), tmp_path / "four"
    alone = undisturbed["reload"] if "async" in mode else run(tmp_path / "alone", model_folder, *words)
    serve_again(server, model_folder, CPU)
    assert run_in_children(4, four, *five(model_folder), *words, "train.sharding=fsdp2") == [0] * 4, printed(four)
    assert alone["train_iter_002.json"]["grad_norm"] > 0
    found = metrics_of(four)
    for name, expected in alone.items():
        for key, value in expected.items():
            if not key.startswith(("async/", "sync/probe")):  # how long somebody waited, and roundings themselves
                # The server rounds as requests happen to meet in a batch: gradient norms have differed by 1e-5.
                assert found[name][key] == pytest.approx(value, abs=5e-5, rel=5e-5), (name, key)


def test_evaluate_asks_a_server_what_it_asks_the_module(server: VllmEngine, model_folder: Path, tmp_path: Path) -> None:
    """Greedy completions of the same model, of a server and in this process."""
    words = ["eval.do_sample=false", "eval.replicates=1", "eval.ks=[1]", "eval.num_ids=4"]
    asked = metric(server, "request_success_total{")
    at_server = ["generation=vllm_server", f"generation.base_url={server.base_url}"]
    for name, where in (("served", at_server), ("here", [])):
        evaluate.run([str(model_folder), *words, *where, f"--out={tmp_path / name}"])
    assert metric(server, "request_success_total{") - asked == 4
    served, here = (
        sorted((tmp_path / name / "A-1-arithmetic.jsonl").read_text().splitlines()) for name in ("served", "here")
    )
    assert [json.loads(line)["replicates"][0]["text"] for line in served] == [
        json.loads(line)["replicates"][0]["text"] for line in here
    ]
    other = save_model(tmp_path / "other", tied=False)
    with pytest.raises(
        ConfigError, match=rf"the server has another model than MODEL={other}: 1 of 29 tensors differ, lm_head"
    ):
        evaluate.run([str(other), *words, *at_server, f"--out={tmp_path / 'refused'}"])


ASYNC = (
    *("mode=async", "rollouts.max_staleness=4", "eval.enabled=false", "train.iterations=4"),
    "generation.max_new_tokens=300",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [("weight_sync=reload", "rollouts.in_flight=abort"), ("weight_sync=lora_hotswap", *LORA)],
    ids=["abort", "lora"],
)
def test_pushes_to_a_server_that_samples(
    overrides: tuple[str, ...], server: VllmEngine, model_folder: Path, tmp_path: Path
) -> None:
    """Sampling takes longer than training, and is two iterations ahead, so that each push meets requests that run."""
    aborted, aborts = metric(server, "request_success_total{", '"abort"'), "rollouts.in_flight=abort" in overrides
    few, endless = (
        ("data.problems_per_iteration=2", "data.rollouts_per_problem=2"),
        "generation._target_=runs.Endless",
    )
    for attempt in range(3):  # on a busy machine the trainer may be the slower one, and no push meet a request
        longer = f"generation.max_new_tokens={300 * 3**attempt}"
        found = run(tmp_path / f"run{attempt}", model_folder, *at(server), *ASYNC, *overrides, *few, endless, longer)
        assert len(found) == 4
        assert 0 < max(metrics["async/age_max"] for metrics in found.values()) <= 4
        assert all(metrics["async/num_discarded"] == metrics["sync/num_recoveries"] == 0 for metrics in found.values())
        assert found["train_iter_000.json"]["alignment/diff_abs_mean"] < 1e-4
        if (metric(server, "request_success_total{", '"abort"') > aborted) == aborts:
            return
        assert aborts
        serve_again(server, model_folder, CPU)
    pytest.fail("no push met a request that ran")
