"""Where memory runs out, a run ends with one line: who asked for how much, and what would need less. CUDA's own:
`tests/gpu`.
"""

from dataclasses import replace

import pytest
import torch
from factories import compose_config

from offline_grpo import progress
from offline_grpo.errors import OutOfMemory
from offline_grpo.loss.grpo import GRPO
from offline_grpo.placement.device_plan import GIB, DevicePlan, Part
from offline_grpo.run import app
from offline_grpo.run.out_of_memory import told_if_out_of_memory
from offline_grpo.run.run_dir import RunDir

CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 1 has a total capacity of 79.18 GiB of which 1.02 GiB is free. Process 9 has "
    "78.16 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved but unallocated."
)


def lower(name, gib, key):
    return Part(name, gib * GIB, key, "lower it")


PLAN = DevicePlan(
    gpu=1,
    total_bytes=80 * GIB,
    trainer=(
        lower("activations", 11, "train.batch_size=8"),
        lower("optimizer state", 20, "train.optimizer._target_=X"),
        lower("fp32 masters", 10, "model.train_id=M"),
        lower("KV cache of sampling, beyond gradients and activations", 2, "generation.batch_size=64"),
    ),
    server=(
        lower("server: weights", 3, "engine.args.share=0.4"),
        lower("server: KV cache and the rest", 30, "engine.args.share=0.4"),
    ),
)

PLANS = (replace(PLAN, gpu=0), PLAN)


def told(error, tmp_path, *, phase, plan=PLANS):
    with (
        pytest.raises(OutOfMemory) as caught,
        progress.followed(),
        told_if_out_of_memory(plan, RunDir(tmp_path)),
        progress.phase(phase, 2),
    ):
        raise error
    return str(caught.value)


def test_a_gpu_without_memory_is_one_line_with_the_prediction_and_three_settings(tmp_path):
    assert told(torch.OutOfMemoryError(CUDA_SAYS), tmp_path, phase="train") == (
        "GPU 1 is out of memory in the phase train, iteration 3: it asked for 2.32 GiB, and 1.02 GiB of 79.18 GiB were free; the memory "
        "plan predicted 76.0 GiB at the fullest (server: KV cache and the rest 30.0 GiB, optimizer state 20.0 GiB, activations 11.0 GiB, "
        "fp32 masters 10.0 GiB, ...); to need less, change one of: train.batch_size=8: lower it; engine.args.share=0.4: lower it; "
        "train.optimizer._target_=X: lower it; nothing was saved"
    )


@pytest.mark.parametrize(
    ("phase", "first"), [("generate", "generation.batch_size=64"), ("eval", "generation.batch_size=64")]
)
def test_what_the_phase_needs_most_comes_first(tmp_path, phase, first):
    assert f"change one of: {first}" in told(torch.OutOfMemoryError(CUDA_SAYS), tmp_path, phase=phase)


def test_without_a_prediction_it_says_what_helps_in_general(tmp_path):
    line = told(
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        tmp_path,
        phase="load",
        plan=(),
    )
    assert line.startswith(
        "the GPU is out of memory in the phase load, iteration 3: CUDA error: CUBLAS_STATUS_ALLOC_FAILED"
    )
    assert "train.gradient_checkpointing: set it to true" in line


def test_other_errors_keep_their_traceback_which_names_the_phase(tmp_path):
    with (
        pytest.raises(RuntimeError, match="shapes") as caught,
        progress.followed(),
        progress.phase("sync"),
        progress.phase("train", 0),
    ):
        raise RuntimeError("shapes differ")
    assert caught.value.__notes__ == ["in the phase train, iteration 1"]
    with pytest.raises(RuntimeError, match="shapes"), told_if_out_of_memory([PLAN], RunDir(tmp_path)):
        raise RuntimeError("shapes differ")


def test_a_run_whose_machine_has_too_little(tmp_path, monkeypatch):
    loss = GRPO.__call__

    def more_than_there_is(self, policy, batch, totals):
        torch.empty(2**52)
        return loss(self, policy, batch, totals)

    monkeypatch.setattr(GRPO, "__call__", more_than_there_is)
    with pytest.raises(
        OutOfMemory,
        match=r"this machine is out of memory in the phase train, iteration 1: it asked for 18014398509481984 ",
    ):
        app.run(compose_config("experiment=smoke"), tmp_path / "run")
