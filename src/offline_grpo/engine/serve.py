"""`python -m offline_grpo.engine.serve MODEL`: the vLLM server of a run, by itself, for trainers and Atropos
environments to call.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from offline_grpo.engine.http import choose_port, is_loopback
from offline_grpo.engine.server_engine import ELSEWHERE
from offline_grpo.engine.vllm import LORA_KERNELS, VllmEngine, VllmLauncher
from offline_grpo.errors import ConfigError, exit_status, require
from offline_grpo.installed import install_command

KEY_VARIABLE = "VLLM_API_KEY"
POLL_S = 1.0
NO_KEY = "\n  without a key: any user of this machine can call it"
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # option of vLLM -> `train.precision`
EPILOG = f"""
Any other option of vLLM may follow, such as --max-num-seqs 64. A key is read from --api-key-file or the variable
{KEY_VARIABLE}: other users can read command lines. The server has POST /generate, /v1, and what weight sync needs.
"""


def parse(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, VllmLauncher]:
    """The command's options, and the server that they describe: that of a run, with its essentials."""
    parser = argparse.ArgumentParser(
        prog="python -m offline_grpo.engine.serve", description=__doc__, epilog=EPILOG, allow_abbrev=False
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="model folder or Hub id")
    add("--host", default="127.0.0.1", help="address to listen on; others than the default need a key")
    add("--port", default="9001", help="null: any free one (default: 9001)")
    add("--dtype", default="bfloat16", help="that of the trainer's train.precision (default: bfloat16)")
    add("--gpu-memory-utilization", type=float, default=0.45, metavar="FRAC", help="of the GPU (default: 0.45)")
    add("--max-model-len", type=int, metavar="TOKENS", help="prompt and completion (default: the model's limit)")
    add("--enable-lora", action="store_true", help="for weight_sync=lora_hotswap")
    add("--max-lora-rank", type=int, default=16, metavar="RANK", help="of adapters (default: 16)")
    add("--api-key-file", type=Path, metavar="FILE", help="requests must carry the key that this file holds")
    add("--python", metavar="FILE", help="interpreter that has vLLM (default: this one)")
    add("--log-dir", type=Path, default=Path("logs"), metavar="FOLDER", help="for what vLLM prints (default: logs)")
    options, others = parser.parse_known_args(words)

    # The key, without which nobody else on the network may reach the server.
    key = os.environ.get(KEY_VARIABLE) or None
    if options.api_key_file is not None:
        require(options.api_key_file.exists(), "--api-key-file", options.api_key_file, "no such file")
        key = options.api_key_file.read_text(encoding="utf-8-sig").strip()
        require(bool(key), "--api-key-file", options.api_key_file, "is empty; write the key into it")
    fix = "on that address others could control the server; give it a key by --api-key-file, or use 127.0.0.1"
    require(key is not None or is_loopback(options.host), "--host", options.host, fix)

    # Its interpreter, and its port.
    has_vllm = options.python is not None or find_spec("vllm") is not None
    fix = f"vLLM is not installed here; install it by `{install_command('vllm')}`, or name another environment's"
    require(has_vllm, "--python", options.python, fix)
    fix = "must be from 1 to 65535, or null for any free one"
    require(options.port == "null" or options.port.isdecimal(), "--port", options.port, fix)
    port = choose_port(options.host, None if options.port == "null" else int(options.port), key="--port")

    # Options that a run's server has, then those of vLLM's own that were typed.
    essentials = VllmLauncher.essentials
    args, env = {**essentials["args"], "seed": 0}, dict(essentials["env"])
    args |= {name: getattr(options, name) for name in ("dtype", "gpu_memory_utilization", "max_model_len")}
    if options.enable_lora:
        args |= {"enable_lora": True, "max_lora_rank": options.max_lora_rank, "max_loras": 1}
        env["VLLM_TUNED_CONFIG_FOLDER"] = LORA_KERNELS
    args |= passed_through(others)
    where = {"python": options.python, "host": options.host, "port": port, "api_key": key}
    return options, VllmLauncher(**where, start_timeout_s=900.0, args=args, env=env, blackwell_workaround=False)


def passed_through(words: Sequence[str]) -> dict[str, str | list[str] | bool]:
    """Options of vLLM: `["--max-num-seqs", "64", "--eager"]` as `{"max_num_seqs": "64", "eager": True}`."""
    given: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if name.replace("-", "_") in ELSEWHERE:
                raise ConfigError(f"--{name}: is decided elsewhere; a key is given by --api-key-file, a model as MODEL")
            values = given[name.replace("-", "_")] = [value] if equals else []
        elif values is None:
            raise ConfigError(f"{word}: MODEL is one word and comes first; options of vLLM begin with --")
        else:
            values.append(word)
    return {name: values[0] if len(values) == 1 else values or True for name, values in given.items()}


def run(words: Sequence[str] | None = None) -> None:
    """Serve until a signal or the server's end. Raises ConfigError or EngineError."""
    options, launcher = parse(words)
    unasked: Any = {"batch_size": 1, "timeout_s": 1.0, "max_retries": 0}  # requests are others'
    engine = VllmEngine(launcher=launcher, log_dir=options.log_dir / f"serve_{launcher.port}", **unasked)
    try:
        engine.start(options.model, {})

        # What a trainer and an environment must know of it.
        url, key = engine.base_url, launcher.api_key
        precision = f" train.precision={PRECISIONS[options.dtype]}" if options.dtype in PRECISIONS else ""
        print(
            f"""{options.model} is served at {url}{NO_KEY if key is None else ""}
  trainer:
    generation=vllm_server generation.base_url={url}{precision}{"" if key is None else " generation.api_key=KEY"}
  environment:
    --openai.server_type vllm --openai.base_url {url}/v1{"" if key is None else " --openai.api_key KEY"}
Ctrl-C ends it.""",
            flush=True,
        )
        while True:
            engine.check_alive()
            time.sleep(POLL_S)
    finally:
        engine.stop()


def main() -> None:
    """The command."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("offline_grpo").setLevel(logging.INFO)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell lets its background jobs ignore the first one
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(exit_status(run))


if __name__ == "__main__":
    main()
