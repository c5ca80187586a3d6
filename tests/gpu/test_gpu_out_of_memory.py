"""A GPU that is really full: one line that says so."""

import pytest
import torch
from factories import compose_config

from offline_grpo.errors import OutOfMemory
from offline_grpo.run import train

pytestmark = pytest.mark.gpu

LARGE = [f"model.tiny.{shape}" for shape in ("hidden_size=1536", "intermediate_size=6144", "num_layers=4")]
LONG = (
    "model.tiny.warm_start_steps=1",
    "generation.max_new_tokens=256",
    "eval.enabled=false",
    "placement.check_memory=false",
    "train.iterations=1",
    "train.drop_zero_signal_groups=false",
)


@pytest.fixture
def little_memory():
    """As if other processes held the rest."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.005)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    ("overrides", "phase"),
    [
        (
            ("generation.batch_size=16384", "data.problems_per_iteration=512", "data.rollouts_per_problem=64"),
            "generate, iteration 1",
        ),
        ((*LARGE, "generation.max_new_tokens=8"), "load model"),
    ],
)
def test_a_full_gpu_ends_the_run_in_one_line(little_memory, tmp_path, overrides, phase):
    config = compose_config("model.device=cuda", *LONG, f"cache_dir={tmp_path / 'cache'}", *overrides)
    with pytest.raises(OutOfMemory, match=rf"^out of memory in the phase {phase}: "):
        train(config, tmp_path / "run")
