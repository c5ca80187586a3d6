"""The server of `hydra/launcher=shared_server`: it has the base model once, and the adapters of all runs of a sweep."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path

from offline_grpo.commands import cli
from offline_grpo.config.parts import Plan, check_settings, make_plan
from offline_grpo.engine.server_engine import ServerEngine
from offline_grpo.errors import ConfigError, GrpoError, require
from offline_grpo.history.folder import RunDir
from offline_grpo.history.signals import StopSignal
from offline_grpo.settings import RunConfig
from offline_grpo.state import Run

POLL_S = 1.0
OF_BASE = ("model.train_id", "model.gguf_file", "model.tiny", "model.quantization", "train.precision")
"""Settings that say what the server loads."""


def serve(configs: Sequence[Callable[[], RunConfig]], num_at_once: int, folder: Path, to_sweep: Connection) -> None:
    """What a process of its own does: start the server of the first of these runs whose settings are accepted, with
    room for as many adapters as runs train at once. Tell the sweep URLs and key, or the GrpoError that refuses it; then
    serve until the sweep, and all of its runs, have closed the other end of the connection. Logs go to `folder`.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the sweep's handler, which would wait for runs
    with ExitStack() as stack:
        try:
            servers = _start(_first_accepted(configs), num_at_once, folder, stack)
        except GrpoError as error:
            to_sweep.send(error)
            return
        to_sweep.send(([server.base_url for server in servers], servers[0].api_key))
        try:
            while not to_sweep.poll(POLL_S):  # which is true at its end
                for server in servers:
                    server.check_alive()
        except GrpoError as error:
            cli.leave(error)


def _first_accepted(configs: Sequence[Callable[[], RunConfig]]) -> Plan:
    """With the largest adapters of all. A job that is refused costs itself only, and says so itself. Raises ConfigError
    for jobs with several base models.
    """
    accepted, adapters, refusals, bases = None, [], [], list[tuple[object, ...]]()
    for config in configs:
        try:
            settings = config()
            adapters += [settings.model.lora] if settings.model.lora is not None else []
            bases.append(attrgetter(*OF_BASE)(settings))
            if accepted is None:
                check_settings(plan := make_plan(settings))
                accepted = plan
        except ConfigError as error:
            refusals.append(error)
    if accepted is None:
        raise refusals[0]
    for name, *values in zip(OF_BASE, *bases, strict=True):
        if other := [value for value in values if value != values[0]]:
            fix = "the server has one base model, and another run of the sweep has another one; make a sweep for each"
            raise ConfigError(f"hydra/launcher=shared_server {name}", other[0], fix)

    # The jobs find a server, so none of them asks whether it has room for such adapters.
    accepted.config.model.lora = max(adapters, key=lambda lora: lora.r, default=None)
    check_settings(accepted)
    return accepted


def _start(plan: Plan, num_at_once: int, folder: Path, stack: ExitStack) -> list[ServerEngine]:
    """As a run starts its own; `stack` ends them."""
    from offline_grpo.model.device import resolve_device
    from offline_grpo.placement.ranks import Ranks
    from offline_grpo.start import servers
    from offline_grpo.weight_sync.lora import LoraHotswap

    key, launcher = "hydra/launcher=shared_server weight_sync", plan.engine.launcher
    fix = "runs that share a server move adapters alone; use generation=vllm_server weight_sync=lora_hotswap "
    fix += "model/lora=default"
    require(isinstance(plan.weight_sync, LoraHotswap), key, plan.weight_sync.name, fix)
    fix = "the sweep starts the server; use generation=vllm_server without a base_url, or hydra/launcher=joblib"
    require(launcher is not None, "generation.base_url", plan.engine.base_url, fix)
    assert launcher is not None

    # All runs may sample at the same time.
    data = plan.config.data
    launcher = launcher.expecting(num_at_once * data.problems_per_iteration * data.rollouts_per_problem)
    launcher = replace(launcher, args={**launcher.args, "max_loras": num_at_once})
    plan.engine = replace(plan.engine, launcher=launcher)

    run = Run(StopSignal(), stack)
    run.config, run.plan, run.folder, run.resume = plan.config, plan, RunDir(folder), None
    run.ranks = Ranks(use_cpu=resolve_device(plan.config.model.device).type == "cpu")
    servers.check_machine(run)
    servers.begin(run)
    for server in run.servers:
        server.start(run.model_id, {})
    return run.servers
