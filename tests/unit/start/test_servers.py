"""What the server of evaluations is asked with: training's settings, where training has them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from factories import compose_config, make_qwen2, make_scoring
from fake_sglang import FakeSglang
from scripted_server import Reply, Request, ScriptedServer

from offline_grpo.config.compose import typed
from offline_grpo.config.parts import Plan, make_plan
from offline_grpo.engine.sglang import SglangEngine
from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import ConfigError, EngineError
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.placement.devices import Devices
from offline_grpo.start import servers
from offline_grpo.start.servers import check_found_servers, starts_before_the_policy
from offline_grpo.train.sharding import Sharding
from offline_grpo.weight_sync.in_process import Frozen
from offline_grpo.weight_sync.reload import Reload

DEAD = "http://127.0.0.1:1"
OTHER = "http://127.0.0.1:2"
SERVED = f"generation=vllm_server generation.base_url={DEAD} weight_sync=reload"
ALONE: Any = SimpleNamespace(is_main=True, world_size=1, broadcast=lambda value: value, on_main=lambda act: act())
TUNED = "generation.timeout_s=7 generation.max_retries=0 weight_sync.tolerance_nats=0.4"


def make_policy() -> Policy:
    return Policy(make_scoring(make_qwen2(vocab_size=100, eos_token_id=2)), build_char_tokenizer(64))


def assembled(plan: Plan, policy: Policy, folder: Path, ranks: Any) -> tuple[Any, Any]:
    """The deployments of training and evaluation, as a run puts them together."""
    about = {"policy": policy, "ranks": ranks, "sharding": Sharding(ranks), "devices": plan.devices(1)}
    run: Any = SimpleNamespace(plan=plan, vision=None, **about, folder=SimpleNamespace(path=folder), stack=ExitStack())
    run.servers = servers.make_engines(run)
    return servers.deployments(run)


def evaluation(overrides: str, folder: Path, *, num_processes: int = 1) -> tuple[Any, Any]:
    """The client and the strategy of evaluations."""
    plan = make_plan(typed(compose_config(*overrides.split())))
    ranks: Any = SimpleNamespace(**{**vars(ALONE), "world_size": num_processes})
    _, found = assembled(plan, make_policy(), folder, ranks)
    assert (found._ranks is ranks) is (num_processes > 1)
    return found.client, found._strategy


@pytest.mark.parametrize("num_processes", [1, 2])
def test_evaluations_have_trainings_settings_and_on_top_their_own(num_processes: int, tmp_path: Path) -> None:
    chosen = f"{SERVED} {TUNED} weight_sync.location=disk eval.backend=sglang_server eval.base_url={DEAD}"
    client, sync = evaluation(chosen, tmp_path, num_processes=num_processes)
    assert isinstance(sync, Reload)
    assert (sync.tolerance_nats, sync.location) == (0.4, "disk")
    assert isinstance(client, SglangEngine)
    assert (client.timeout_s, client.max_retries) == (7, 0)
    own = "eval.batch_size=3 eval.timeout_s=9 eval.max_retries=2"
    client, _ = evaluation(f"{SERVED} {TUNED} eval.base_url={OTHER} {own}", tmp_path)
    assert isinstance(client, VllmEngine)
    assert (client.batch_size, client.timeout_s, client.max_retries) == (3, 9, 2)


def test_who_shares_trainings_engine_and_who_gets_no_weights(tmp_path: Path) -> None:
    """weight_sync=none is for evaluations' server too: nothing is pushed anywhere."""
    plan = make_plan(typed(compose_config(*SERVED.split(), f"eval.base_url={DEAD}/v1/")))
    training, found = assembled(plan, make_policy(), tmp_path, ALONE)
    assert found is training
    frozen = f"generation=vllm_server generation.base_url={DEAD} weight_sync=none eval.base_url={OTHER}"
    for overrides in (f"eval.backend=vllm_server eval.base_url={DEAD} eval.weight_sync=none", frozen):
        assert type(evaluation(overrides, tmp_path)[1]) is Frozen


SGLANG = "generation=sglang_server weight_sync=reload weight_sync.pause_mode=abort"


def look(overrides: str, url: str) -> None:
    plan = make_plan(typed(compose_config(*overrides.split(), f"generation.base_url={url}")))
    check_found_servers(plan, "some/model")


def test_an_sglang_server_without_its_option(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeSglang(is_deterministic=False)
    with ScriptedServer(fake) as web:
        refusal = rf"^generation\.base_url={web.base_url}: that server ignores the seeds of requests "
        with pytest.raises(ConfigError, match=refusal):
            look(SGLANG, web.base_url)
        look("generation=sglang_server weight_sync=none", web.base_url)  # nobody may start it otherwise
        [line] = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert line.startswith(f"generation.base_url={web.base_url}: that server ignores the seeds of requests ")
        fake.is_deterministic = True
        look(SGLANG, web.base_url)
        fake.version = "0.5.10"
        with pytest.raises(ConfigError, match=r"versions 0\.5\.11 to 0\.5\.15 are supported"):
            look("generation=sglang_server weight_sync=none", web.base_url)


def test_where_no_server_answers_the_command_starts_one_there() -> None:
    """That of vLLM starts one in tests/contract/test_server_runs.py."""
    with pytest.raises(EngineError, match="no healthy server answers") as refused:
        look(SGLANG, "http://127.0.0.1:9")
    command = "python -m sglang.launch_server --model-path some/model --port 9 --dtype float32 "
    assert command in str(refused.value)


def test_a_server_that_environments_cannot_call() -> None:
    """A stock vLLM answers 404, and 405 to GET where there is a route for POST. The run itself asks nothing else of it
    here.
    """
    routes = {"/health": 200, "/version": 200}

    def script(request: Request) -> Reply:
        return Reply({"version": "0.32.0"}, status=routes.get(request.path, 404))

    plan = make_plan(typed(compose_config("generation=vllm_server", "weight_sync=none", f"generation.base_url={DEAD}")))
    with ScriptedServer(script) as web:
        plan = replace(plan, engine=replace(plan.engine, base_urls=[web.base_url]))
        check_found_servers(plan, "some/model")
        plan.config.rollouts["_target_"] = "offline_grpo.rollouts.atropos.Atropos"
        refusal = (
            rf"^generation\.base_url={web.base_url}: that server has no POST /generate, .* Start one that has it: "
            rf"python -m offline_grpo.engine.serve some/model --port \d+ --dtype float32$"
        )
        with pytest.raises(ConfigError, match=refusal):
            check_found_servers(plan, "some/model")
        routes["/generate"] = 405
        check_found_servers(plan, "some/model")


MANAGED = "generation=vllm_server model.device=cpu"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_of_the_run_has_a_key_that_nobody_else_knows(kind: str, tmp_path: Path) -> None:
    """It is another one for each run, one for all processes of a run, and in nothing that is shown."""
    overrides = f"generation={kind}_server model.device=cpu".split()
    first, second = (make_plan(typed(compose_config(*overrides))).engine for _ in range(2))
    assert first.api_key is not None
    assert len(first.api_key) == 64
    assert first.api_key != second.api_key
    assert first.api_key == first.launcher.api_key  # type: ignore[union-attr]
    shown = f"{first} {first.launcher} {first.launcher.command('m', 1, {})}"  # type: ignore[union-attr]
    assert first.api_key not in shown

    told: Any = lambda _: [("http://127.0.0.1:5", "of rank 0")]  # noqa: E731
    other_rank: Any = SimpleNamespace(is_main=False, world_size=2, on_main=told)
    plan = make_plan(typed(compose_config(*overrides, "eval.enabled=false")))
    training, _ = assembled(plan, make_policy(), tmp_path, other_rank)
    assert training.engines[0].api_key == "of rank 0"  # type: ignore[attr-defined]


def test_a_key_of_ones_own_is_kept_and_the_shells_cannot_replace_it() -> None:
    assert make_plan(typed(compose_config(*MANAGED.split(), "engine.api_key=mine"))).engine.api_key == "mine"
    with pytest.raises(ConfigError, match=r"^engine\.env\.VLLM_API_KEY=\.\.\.: set engine\.api_key"):
        make_plan(typed(compose_config(*MANAGED.split(), "+engine.env.VLLM_API_KEY=theirs")))


@pytest.mark.parametrize(
    ("generation", "weight_sync", "shares_gpu", "expected"),
    [
        ("vllm_server", "reload", True, True),  # says when it has measured the GPU's memory
        ("sglang_server", "reload", True, False),
        ("vllm_server", "lora_restart", False, False),  # the adapter is on the command line
    ],
)
def test_servers_start_before_the_policy_is_loaded_where_it_does_not_disturb_them(
    generation: str, weight_sync: str, shares_gpu: bool, expected: bool
) -> None:
    devices = Devices([0] if shares_gpu else [1], None, [[0]])
    more = ["model/lora=default"] if weight_sync.startswith("lora") else ["weight_sync.pause_mode=abort"]
    plan = make_plan(typed(compose_config(f"generation={generation}", f"weight_sync={weight_sync}", *more)))
    assert starts_before_the_policy(plan.engine, plan.weight_sync, devices) is expected


def test_batch_invariant_servers_join_no_kernels_by_measuring() -> None:
    words = "generation=vllm_server generation.batch_invariant=true +engine.args.compilation_config.mode=3"
    launcher: Any = make_plan(typed(compose_config(*words.split()))).engine.launcher
    assert launcher.env["VLLM_BATCH_INVARIANT"] == "1"
    assert launcher.args["compilation_config"] == {"mode": 3, "inductor_compile_config": {"combo_kernels": False}}
