"""`python -m offline_grpo.engine.serve`: the server of a run, started by hand, is one that trainers and environments
can use.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from engines import CPU, CPU_ENV, preloaded_python, processes_naming
from runs import at, run
from transformers import AutoModelForCausalLM

from offline_grpo.engine.http import choose_port
from offline_grpo.errors import ConfigError
from offline_grpo.model import load as loading

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("where", [pytest.param(CPU, id="cpu")], indirect=True, scope="session"),
]

KEY = "open-sesame"
FAST = (
    *("--enforce-eager", "--distributed-executor-backend", "uni", "--kv-cache-memory-bytes", "67108864"),
    *("--dtype", "float32", "--max-num-batched-tokens=32768", "--enable-lora"),
)
LORA = (
    *("model/lora=default", "model.lora.target_modules=[all-linear]", "model.lora.r=8"),
    "weight_sync.server_args.max_lora_rank=16",
)


def serve(*words: str) -> list[str]:
    return [sys.executable, "-m", "offline_grpo.engine.serve", *words]


@pytest.fixture(scope="module")
def command(
    where: object, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command, and the URL that it printed. At the end a Ctrl-C ends it and its children."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "key").write_text(f"{KEY}\n")
    own = ("--port", str(choose_port("127.0.0.1", None, key="-")), "--api-key-file", "key")
    words = serve(str(model_folder), *own, "--python", preloaded_python(folder), *FAST)
    env = {**os.environ, **CPU_ENV}
    with subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            url = first.removeprefix(f"{model_folder} is served at ").strip()
            yield process, url
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) > 1
            assert KEY not in " ".join(word for child in children for word in child.cmdline())
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
            assert not processes_naming(f"--port {url.rpartition(':')[2]}")
        finally:
            process.kill()


@pytest.mark.parametrize(
    "overrides",
    [("weight_sync=reload",), ("weight_sync=shared_vllm",), ("weight_sync=lora_hotswap", *LORA)],
    ids=lambda words: words[0],
)
def test_a_trainer_uses_it(
    overrides: tuple[str, ...], command: tuple[object, str], model_folder: Path, tmp_path: Path
) -> None:
    _, url = command
    if "lora" in overrides[0]:  # adapters are on top of the first weights, and others were pushed before
        restore(url, model_folder)
    found = (*at(url), f"generation.api_key={KEY}", "train.iterations=2", "eval.interval=2")
    metrics = run(tmp_path / "run", model_folder, *found, *overrides)
    assert metrics["train_iter_001.json"]["alignment/diff_abs_mean"] < 1e-4
    restore(url, model_folder)


def test_an_adapter_that_it_has_no_room_for_is_refused_before_a_model_is_loaded(
    command: tuple[object, str], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_policy", lambda *_, **__: pytest.fail("a model was loaded"))
    words = (*at(command[1]), f"generation.api_key={KEY}", "weight_sync=lora_hotswap", *LORA, "model.lora.r=32")
    lack = r"that server has --max-lora-rank 16, below model.lora.r=32; .* --max-lora-rank 32"
    with pytest.raises(ConfigError, match=rf"^generation.base_url={command[1]}: {lack}"):
        run(tmp_path / "run", model_folder, *words)


def restore(url: str, model: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
    headers = {"Authorization": f"Bearer {KEY}"}
    steps: dict[str, Any] = {"/pause": None, "/collective_rpc": body, "/reset_prefix_cache": None, "/resume": None}
    for path, content in steps.items():
        httpx.post(f"{url}{path}", json=content, headers=headers, timeout=60).raise_for_status()


def test_an_environment_needs_the_key(command: tuple[object, str]) -> None:
    _, url = command
    body = {"prompt": "Hello", "max_tokens": 5}
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.post(f"{url}/generate", json=body).status_code == 401
    answer = httpx.post(f"{url}/generate", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert len(answer.json()["logprobs"][0]) == 5


def test_benchmarks_get_what_they_ask_for(command: tuple[object, str], model_folder: Path) -> None:
    """The requests of lm-eval 0.4: answers of a chat, and the probabilities of a text, against transformers'."""

    def asked(path: str, **body: object) -> dict[str, Any]:
        body |= {"model": "policy", "temperature": 0, "seed": 1234}
        answer = httpx.post(f"{url}/v1{path}", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        return answer.raise_for_status().json()["choices"][0]

    _, url = command
    messages = [{"role": "user", "content": "1+2="}]
    chat = asked("/chat/completions", messages=messages, max_tokens=4, stop=["<eos>"])
    assert isinstance(chat["message"]["content"], str)
    ids = list(range(5, 25))
    told = asked("/completions", prompt=[ids], max_tokens=1, logprobs=1, echo=True)["logprobs"]
    with torch.no_grad():
        logprobs = AutoModelForCausalLM.from_pretrained(model_folder)(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [logprobs[place, after].item() for place, after in enumerate(ids[1:])]
    assert told["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
    assert [len(top) > 0 for top in told["top_logprobs"][1:]] == [True] * len(ids)


def test_a_taken_port_names_its_owner(command: tuple[object, str]) -> None:
    _, url = command
    second = subprocess.run(serve("m", "--port", url.rpartition(":")[2]), capture_output=True, text=True)
    assert second.returncode == 2
    assert f"error: --port={url.rpartition(':')[2]}: is taken by" in second.stderr
