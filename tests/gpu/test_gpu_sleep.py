"""Sleep gives the server's memory back, and it samples as before when it wakes. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from engines import GPU, make_server, running, save_model

pytestmark = pytest.mark.gpu

BODY = {"prompt": {"prompt_token_ids": [1, 5, 6, 7]}, "max_tokens": 8, "temperature": 0}
KV_CACHE_GIB = 4


def test_sleep_frees_the_memory_and_waking_takes_it_again(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", dtype=GPU.dtype)
    http = httpx.Client(headers={"Authorization": "Bearer key"}, timeout=120)
    with running(
        make_server(
            GPU,
            tmp_path,
            args={"enable_sleep_mode": True, "kv_cache_memory_bytes": KV_CACHE_GIB * 2**30},
            api_key="key",
        ),
        model,
    ) as server:
        url = server.base_url
        before, awake = http.post(f"{url}/generate", json=BODY).json(), used_gib()
        http.post(f"{url}/sleep?level=1").raise_for_status()
        assert http.get(f"{url}/is_sleeping").json() == {"is_sleeping": True}
        asleep = used_gib()
        http.post(f"{url}/wake_up").raise_for_status()
        assert http.post(f"{url}/generate", json=BODY).json() == before
        assert awake - asleep > 0.8 * KV_CACHE_GIB
        assert used_gib() == pytest.approx(awake, rel=0.1)


def used_gib() -> float:
    """Of the GPU, by all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**30
