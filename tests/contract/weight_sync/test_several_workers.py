"""Weights that a server spreads over two workers: every worker's part of each tensor is the policy's, and is proven to
be. With `nccl` they are broadcast, on CPUs by gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    CPU,
    GPU_FP32,
    PROMPTS,
    SERVER_PYTHON,
    Where,
    deploy,
    distance,
    load,
    make_client,
    make_server,
    preloaded_python,
    running,
    sample,
    train,
)
from factories import strategy

from offline_grpo.engine.vllm import VllmEngine
from offline_grpo.errors import EngineError
from offline_grpo.weight_sync import weight_transfer

NUM_TENSORS = 2 * 13 + 2
"""See test_delivery.py."""


def few_gpus(count: int) -> Any:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(CPU, id="cpu", marks=pytest.mark.slow),
        pytest.param(GPU_FP32, id="gpu", marks=[pytest.mark.gpu, few_gpus(3)]),
    ],
    indirect=True,
    scope="session",
)
def test_every_part_arrives_and_is_proven(
    where: Where, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # else each worker wants a node of memory of its own
    received: list[bool] = []
    call_workers = VllmEngine.call_workers

    def noting(control: VllmEngine, method: str, **words: Any) -> list[Any]:
        received.extend([words["in_place"]] if method == "grpo_receive" else [])
        return call_workers(control, method, **words)

    monkeypatch.setattr(VllmEngine, "call_workers", noting)
    if where is CPU:
        describe = VllmEngine.describe
        monkeypatch.setattr(VllmEngine, "describe", lambda self: describe(self) | {"gpu_uuid": "a server's"})
        monkeypatch.setattr(weight_transfer, "gpu_uuid", lambda device: "the trainer's")
    changes = {"python": preloaded_python(tmp_path)} if where is CPU and SERVER_PYTHON is None else {}
    with running(make_server(where, tmp_path, args=args, env=env, gpus=(1, 2), **changes), model_folder) as server:
        client = make_client(server)
        for option in ("nccl", "reload"):
            small = ["weight_sync.bucket_mib=1"] if option == "nccl" else []
            sync = deploy(strategy(option, f"weight_sync.tolerance_nats={where.tolerance_nats}", *small), client)
            policy = load(model_folder, where)
            sync._strategy.attach(sync.engines[0], sync._snapshot(policy))
            policy.make_masters()
            for version in range(2):
                train(policy, seed=version + (option == "reload") * 10)
                report = sync.push(policy, version=version)
                assert report.alignment["sync/num_tensors_proven"] == NUM_TENSORS == report.num_tensors
                few = PROMPTS[:2]  # on a busy machine the workers wait for each other at each token
                assert distance(policy, sample(client, tokens=3, prompts=few), few) < where.tolerance_nats
            # a part of each kind: of the input, of the output, of the vocabulary
            for name in ("layers.0.mlp.down_proj", "layers.1.self_attn.k_proj", "embed_tokens"):
                parameter = policy.causal_lm.get_parameter(f"model.{name}.weight")
                before, parameter.data = parameter.data, parameter.data.clone()
                parameter.data[-1, -1] += 1  # in the part of the second worker
                with pytest.raises(EngineError, match=rf"others are not what was pushed: model.{name}.weight$"):
                    sync._strategy.verify(sync.engines, sync._snapshot(policy), 1)
                parameter.data = before
            sync._strategy.detach(sync.engines[0])
    assert received == [False, True]
