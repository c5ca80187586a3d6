"""A teacher behind a real vLLM server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from engines import CPU, PROMPTS, Where, load, make_server, preloaded_python, running
from factories import make_rollout

from offline_grpo.generation.teacher import TeacherServer
from offline_grpo.train.batch import build_batch


@pytest.mark.slow
@pytest.mark.parametrize("where", [pytest.param(CPU, id="cpu")], indirect=True, scope="session")
def test_a_server_says_what_its_model_does(where: Where, model_folder: Path, tmp_path: Path) -> None:
    """At temperature 1 alone, whatever is asked for. With adapters, vLLM on a CPU ends at this."""
    server = make_server(where, tmp_path, python=preloaded_python(tmp_path))
    with running(server, model_folder):
        teacher, policy = TeacherServer(server.base_url), load(model_folder, where)
        teacher.check(policy.tokenizer, 24)
        batch = build_batch([make_rollout(prompt, [*range(8, 20)]) for prompt in PROMPTS])
        torch.testing.assert_close(teacher.logprobs(batch), policy.logprobs(batch), rtol=0, atol=1e-4)
        asked = {"prompt": PROMPTS[1], "prompt_logprobs": 0, "max_tokens": 1}
        url = f"{server.base_url}/v1/completions"
        at_half, at_one = (
            httpx.post(url, json={"temperature": temperature, **asked}, timeout=60).json()["choices"][0]
            for temperature in (0.5, 1.0)
        )
        assert at_half["prompt_logprobs"] == at_one["prompt_logprobs"]
