"""What a sweep with one server is refused for before that server is started."""

from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import pytest
from factories import compose_config

from offline_grpo.config.compose import typed
from offline_grpo.start.shared_server import serve

HOTSWAP = "generation=vllm_server weight_sync=lora_hotswap"
ADAPTERS = f"{HOTSWAP} model/lora=default"


@pytest.mark.parametrize(
    ("jobs", "refusal"),
    [
        ((HOTSWAP, HOTSWAP), "weight_sync=lora_hotswap: moves LoRA adapters and the policy has none"),
        (
            (f"{ADAPTERS} train.lr=-1", f"{ADAPTERS} model.lora.r=4", f"{ADAPTERS} model.lora.r=32"),
            "weight_sync.server_args.max_lora_rank=16: the adapters have rank 32",
        ),
        (
            (ADAPTERS, f"{ADAPTERS} model.quantization=nf4"),
            "hydra/launcher=shared_server model.quantization=nf4: the server has one base model, and another",
        ),
        (
            (ADAPTERS, f"{ADAPTERS} train.precision=bf16"),
            "hydra/launcher=shared_server train.precision=bf16: the server has one base model, and another",
        ),
    ],
)
def test_what_no_job_can_say_of_the_server_is_refused_before_it_starts(
    jobs: tuple[str, ...], refusal: str, tmp_path: Path
) -> None:
    ours, theirs = Pipe()
    serve([partial(lambda words: typed(compose_config(*words.split())), job) for job in jobs], 2, tmp_path, theirs)
    assert str(ours.recv()).startswith(refusal)
    assert not list(tmp_path.iterdir())
