"""Real vLLM servers for tests, on the CPU in fp32 or on a GPU in bf16, and what the tests do to the policies that they
serve.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from factories import generate, make_llama, make_policy, make_rollout
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from offline_grpo.engine.vllm import VllmEngine, VllmLauncher
from offline_grpo.errors import EngineDied
from offline_grpo.model.load import load_tokenizer
from offline_grpo.model.policy import Policy
from offline_grpo.model.tiny import build_char_tokenizer
from offline_grpo.train.batch import build_batch
from offline_grpo.types import Completion, SamplingParams
from offline_grpo.weight_sync.deployment import Deployment
from offline_grpo.weight_sync.reload import Reload

CPU_ARGS: dict[str, Any] = {
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "kv_cache_memory_bytes": 2**26,
    "gpu_memory_utilization": None,
}
CLIENT: dict[str, Any] = {"eos_ids": [2], "vocab_size": 1000, "batch_size": 16, "timeout_s": 120, "max_retries": 2}
"""Settings of an engine."""
VLLM_PYTHON = str(Path(__file__).with_name("vllm_python.py"))
CPU_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Without compiling: vLLM would generate the code that ranks logprobs, in each server's first answer, for seconds."""
LORA_ARGS: dict[str, Any] = {
    **yaml.safe_load(Path(__file__).parents[2].joinpath("conf/weight_sync/_lora.yaml").read_text())["server_args"],
    "max_loras": 2,
}
"""As runs start their servers, with room for two."""
IPC_ARGS: dict[str, Any] = {"weight_transfer_config": {"backend": "ipc"}}
IPC_ENV = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OFFLINE_GRPO_NEEDS_RAY": "1"}
CONTEXT = 4096


GPU_ARGS: dict[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
"""With a size given, the server measures no memory at its start, which others on the GPU would disturb."""


@dataclass(frozen=True)
class Where:
    """Where a suite runs, and how close server and trainer are there."""

    device: torch.device
    dtype: torch.dtype
    tolerance_nats: float

    @property
    def long(self) -> int:
        """Tokens that take long enough for a push in the middle of them."""
        return 300 if self.device.type == "cpu" else 3000

    @property
    def args(self) -> dict[str, Any]:
        common = {**VllmLauncher.essentials["args"], "dtype": str(self.dtype).removeprefix("torch."), "seed": 0}
        return common | (CPU_ARGS if self.device.type == "cpu" else GPU_ARGS)


CPU = Where(torch.device("cpu"), torch.float32, 1e-5)
GPU = Where(torch.device("cuda", 0), torch.bfloat16, 0.15)
GPU_FP32 = Where(torch.device("cuda", 0), torch.float32, 0.02)
"""For single tokens: those of 9000 differ by up to 1.1 nats in bf16, and by 0.05 in fp32."""


SERVER_PYTHON = os.environ.get("SERVER_PYTHON")
"""Interpreter of another environment, with another vLLM, for the servers of the contract tests."""
COMMAND_LINE: dict[str, Any] = {
    "python": SERVER_PYTHON,
    "host": "127.0.0.1",
    "port": None,
    "api_key": None,
    "start_timeout_s": 300.0,
    "env": {},
}
"""What engines of every kind have, `args` apart."""


def engine(where: Where, **changes: Any) -> VllmLauncher:
    """Settings of a server of our own."""
    settings: dict[str, Any] = {
        **COMMAND_LINE,
        "args": where.args,
        "env": VllmLauncher.essentials["env"] | (CPU_ENV if where.device.type == "cpu" else {}),
        "blackwell_workaround": False,
    }
    return VllmLauncher(**{**settings, **changes})


def make_server(
    where: Where,
    log_dir: Path,
    *,
    args: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    gpus: Sequence[int] = (0,),
    **changes: Any,
) -> VllmEngine:
    """A server, not started yet. `changes` are settings of its command line."""
    own = engine(where)
    return VllmEngine(
        launcher=engine(where, args={**where.args, **(args or {})}, env={**own.env, **(env or {})}, **changes),
        log_dir=log_dir,
        gpus=list(gpus) if where.device.type == "cuda" else None,
        **CLIENT,
    )


def forking_python(folder: Path) -> str:
    """For `engine.python`, a program in `folder`: with it servers start in little more than half the time, where there
    is no GPU.
    """
    return _program(folder / "forking_python", VLLM_PYTHON, "fork")


def _program(script: Path, *words: str) -> str:
    """`script`, made to run this interpreter with these words and its own."""
    script.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *words])} "$@"\n')
    script.chmod(0o755)
    return str(script)


def preloaded_python(folder: Path) -> str:
    """Like `forking_python`, and faster still, because vLLM is there already. Only what stands in for the server is a
    child of whoever starts it; `writers` finds the others."""
    return _program(folder / "preloaded_python", VLLM_PYTHON, "ask", _preloaded_vllm())


@cache
def _preloaded_vllm() -> str:
    """The socket of a process that has vLLM, serves all workers, and ends with the tests."""
    path, tests = Path(os.environ["OFFLINE_GRPO_TESTS_CACHE"], "vllm"), os.environ["OFFLINE_GRPO_TESTS_PROCESS"]
    log = path.with_suffix(".log")
    with log.open("ab") as errors:
        fcntl.flock(errors, fcntl.LOCK_EX)
        if not path.exists():
            subprocess.run(
                [sys.executable, VLLM_PYTHON, "preload", str(path), tests],
                stdout=errors,
                stderr=errors,
                env=engine(CPU).environment({}, None),
                start_new_session=True,  # Ctrl-C is not for it
                check=True,
            )
        fcntl.flock(errors, fcntl.LOCK_UN)  # which the process has inherited
    return str(path)


class MortalEngine(VllmEngine):
    """Of a server that somebody found, with the life of one that was started."""

    is_dead = False

    def check_alive(self, *, grace_s: float = 0.0) -> None:
        if self.is_dead:
            raise EngineDied(f"the server at {self.base_url} has ended.")


def place_of(server: VllmEngine) -> dict[str, Any]:
    return {"base_url": server.base_url, "api_key": server.api_key, "log_dir": server.log_dir}


def make_client(server: VllmEngine | str, **changes: Any) -> VllmEngine:
    """The same server as somebody asks it who did not start it; or the one at a URL."""
    where = {"base_url": server} if isinstance(server, str) else place_of(server)
    return VllmEngine(**{**CLIENT, **where, **changes})


def full_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """All weights of a policy that is in one piece."""
    for name, parameter in policy.causal_lm.named_parameters():
        yield name, parameter.data


def deploy(sync: Any, *engines: Any, sampling: SamplingParams = SamplingParams(1)) -> Deployment:  # noqa: B008 - it is frozen
    """A strategy that serves these engines; not connected yet."""
    for engine in engines:
        engine.sampling = sampling
    return Deployment(engines, sync, full_weights)


def save_model(folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32, **changes: int) -> Path:
    """A random Llama with everything that a name map can stumble over: grouped queries, biases, tied embeddings, a
    vocabulary of 100 that vLLM pads to 128, and llama3's rope scaling."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "original_max_position_embeddings": 128}
    rope |= {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    shape = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 160, "num_key_value_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    more = {"tie_word_embeddings": tied, "attention_bias": True, "initializer_range": 0.15, "rope_parameters": rope}
    model = make_llama(seed=0, **{**shape, **special, **more, "max_position_embeddings": CONTEXT, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.to(dtype).save_pretrained(str(folder))
    build_char_tokenizer(CONTEXT).save_pretrained(str(folder))
    return folder


def load(folder: Path, where: Where, *, shared: bool = False, lora: bool = False, rank: int = 8) -> Policy:
    """The policy of a saved model, as `load_policy` makes it."""
    device = torch.device("cpu") if shared else where.device
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=where.dtype).to(device)
    if lora:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=6, use_rslora=True, target_modules="all-linear"))
    return make_policy(model, load_tokenizer(str(folder)), compute_device=where.device)


@torch.no_grad()
def train(policy: Policy, *, seed: int, scale: float = 0.05, only: str | None = None) -> None:
    """Stand in for an optimizer: change all trained weights, or one, and publish them."""
    for index, (name, master) in enumerate(sorted(policy.masters.parameters.items())):
        if only is None or name == only:
            draw = torch.Generator().manual_seed(1000 * seed + index)
            master.add_(torch.randn(master.shape, generator=draw).to(master.device) * scale)
    policy.masters.publish()


PROMPTS = [[1] + [4 + (7 * i + j * j) % 90 for j in range(length)] for i, length in enumerate((3, 40, 200))]


def sample(
    client: VllmEngine, *, tokens: int = 12, temperature: float = 1.0, prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[Completion]:
    """One completion of each prompt; always the same seeds."""
    sampling = SamplingParams(tokens, temperature=temperature)
    groups = generate(client, prompts, sampling, group_size=1, seeds=range(len(prompts)))
    return [completion for [completion] in groups]


def score(
    policy: Policy,
    completions: Sequence[Completion],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    temperature: float = 1.0,
) -> list[Tensor]:
    """The policy's logprobs of each completion's tokens, in nats."""
    rollouts = [make_rollout(*pair, temperature=temperature) for pair in zip(prompts, completions, strict=True)]
    batch = build_batch(rollouts)
    logprobs = policy.logprobs(batch.to(policy.device)).cpu()[batch.completion_mask]
    return list(logprobs.split([len(c.token_ids) for c in completions]))


def distance(
    policy: Policy,
    completions: Sequence[Completion],
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    temperature: float = 1.0,
) -> float:
    """Mean |trainer - server| over the tokens of completions of `prompts`, in nats."""
    theirs = torch.cat([torch.tensor(c.logprobs) for c in completions])
    return (torch.cat(score(policy, completions, prompts, temperature=temperature)) - theirs).abs().mean().item()


def metric(server: VllmEngine, name: str, label: str = "") -> float:
    """A number that vLLM keeps of all its requests, or of those with a label."""
    lines = server.api.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}") and label in line)


def num_running(server: VllmEngine) -> float:
    """Requests that the server is working on."""
    return metric(server, "num_requests_running{")


def switch_of(logprobs: Sequence[float], old: Tensor, new: Tensor, where: Where) -> int:
    """How many tokens have the old policy's logprob, all others having the new one's."""
    theirs = torch.tensor(logprobs)
    close = max(5 * where.tolerance_nats, 5e-4)  # roundings reach 1.2e-4; policies differ by nats
    is_old, is_new = ((theirs - ours).abs() < close for ours in (old, new))
    fits = [k for k in range(len(theirs) + 1) if is_old[:k].all() and is_new[k:].all()]
    neither = [
        (i, (theirs - old)[i].item(), (theirs - new)[i].item())
        for i in range(len(theirs))
        if not is_old[i] and not is_new[i]
    ]
    assert fits, (
        f"tokens of neither policy, or out of order: (position, nats from the old, from the new policy) {neither[:10]}"
    )
    return fits[-1]


def serve_again(server: VllmEngine, model: Path, where: Where) -> None:
    """Give a server the weights of a saved model, whatever it serves or waits for."""
    sync = Reload(interval=1, pause_mode="abort", tolerance_nats=1.0, server_args={}, location="memory")
    client = make_client(server)
    client.resume()  # a test that failed may have left it paused
    policy = load(model, where)
    deployment = deploy(sync, client)
    deployment.connect(policy)
    deployment.push(policy, version=-1)
    deployment.close()


def processes_naming(text: str) -> list[int]:
    """Ids of processes with this text in their command line, whose words are parted by spaces."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if text in command and int(name) != os.getpid():
            found.append(int(name))
    return found


def writers(log: Path) -> list[psutil.Process]:
    """The processes of the server with this log, whoever their parents are: its output is theirs."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(OSError):
            if os.path.samefile(f"/proc/{process.pid}/fd/1", log):
                found.append(process)
    return found


def engine_core(log: Path) -> psutil.Process:
    """The process that computes, of the server with this log."""
    [core] = [process for process in writers(log) if "EngineCore" in " ".join(process.info["cmdline"])]
    return core


def kill_engine(folder: Path) -> int:
    """SIGKILL to the process that computes, as the kernel would when memory runs out, of the last server that has its
    log in `folder`.
    """
    core = engine_core(max(folder.glob("server_*.log")))
    core.kill()
    return core.pid


def stall(folder: Path, seconds: float) -> None:
    """Let the last server with its log in `folder` stand still for a while."""
    processes = writers(max(folder.glob("server_*.log")))
    for process in processes:
        process.suspend()
    threading.Timer(seconds, lambda: [process.resume() for process in processes]).start()


def serve_and_wait(folder: Path) -> None:
    """Start a server as a run does, say so by the file `up`, and wait: for a process that is killed."""
    make_server(CPU, folder, python=forking_python(folder)).start(str(save_model(folder / "model")), {})
    (folder / "up").touch()
    signal.pause()


@contextmanager
def running(server: VllmEngine, model: Path) -> Iterator[VllmEngine]:
    """The server, started, and stopped afterwards."""
    try:
        server.start(str(model), {})
        yield server
    finally:
        server.stop()
