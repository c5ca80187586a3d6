"""docs/slurm.sh, with programs in place of Slurm's that write down how they were called."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from factories import compose_config

from offline_grpo.config.compose import typed
from offline_grpo.config.parts import make_plan
from offline_grpo.engine import serve

SCRIPT = Path(__file__).parents[2] / "docs" / "slurm.sh"
CALLED = 'printf "%q " "$@" > "$CALLS.$$"; mv "$CALLS.$$" "$CALLS/$$"'
NUM_SERVERS = 2
PROGRAMS = {
    "scontrol": 'printf "%s\\n" node1 node2 node3',
    # servers answer when they are up
    "curl": f'until [ "$(ls "$CALLS" | wc -l)" = {NUM_SERVERS} ]; do sleep 0.05; done',
    "srun": f'{CALLED}; case "$*" in *serve*) exec sleep 1 > /dev/null 2>&1;; esac',
}


def submitted(folder: Path) -> list[list[str]]:
    """The words of each `srun` of a job that starts in this folder; the trainers' come last."""
    for name, body in PROGRAMS.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(0o755)
    calls = folder / "calls"
    calls.mkdir()
    slurm = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": str(NUM_SERVERS)}
    env = {**os.environ, **slurm, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(
        ["bash", str(SCRIPT), "org/model", "seed=3", "train.lr=2e-6"],
        env=env,
        cwd=folder,
        check=True,
        timeout=60,
        capture_output=True,
    )
    return sorted((shlex.split(call.read_text()) for call in calls.iterdir()), key=lambda words: "torchrun" in words)


def test_the_last_machine_samples_and_the_others_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers' options are vLLM's and ours, and the trainers' overrides are a configuration that is not refused."""
    monkeypatch.setenv("VLLM_API_KEY", "of the servers")
    monkeypatch.setattr(serve, "choose_port", lambda host, port, key: port)
    monkeypatch.setattr(serve, "find_spec", lambda _: True)
    *serving, training = submitted(tmp_path)
    assert [word for words in serving for word in words if word.startswith("--nodelist")] == ["--nodelist=node3"] * 2
    ports = []
    for words in serving:
        _, launcher = serve.parse(words[words.index("offline_grpo.engine.serve") + 1 :])
        assert (launcher.host, launcher.args["dtype"]) == ("0.0.0.0", "bfloat16")
        ports.append(launcher.port)
    assert sorted(ports) == [9001, 9002]
    assert "--nodelist=node1,node2" in training
    assert training[training.index("--nnodes") + 1 : training.index("--rdzv_backend")] == ["2", "--nproc_per_node", "2"]
    assert "node1:29500" in training
    overrides = training[training.index("run_grpo.py") + 1 :]
    overrides.remove("hydra.run.dir=outputs/slurm_7")
    config = typed(compose_config(*overrides))
    plan = make_plan(config)
    assert plan.engine.base_urls == ["http://node3:9001", "http://node3:9002"]
    assert plan.weight_sync.name == "reload"
    assert (config.resume, config.seed, config.model.train_id, config.train.sharding) == (None, 3, "org/model", "fsdp2")
    assert (config.train.precision, config.train.lr, config.train.tokens_per_microbatch) == ("bf16", 2e-6, 16384)


def test_a_job_that_slurm_starts_again_goes_on(tmp_path: Path) -> None:
    """In its own folder, wherever its servers are now."""
    (tmp_path / "outputs/slurm_7/checkpoints/iter_004").mkdir(parents=True)
    assert "resume=outputs/slurm_7" in submitted(tmp_path)[-1]
