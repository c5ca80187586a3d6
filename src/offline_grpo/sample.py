"""`python -m offline_grpo.sample MODEL PROMPT`: print what a model writes."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from offline_grpo import hub
from offline_grpo.commands import cli
from offline_grpo.errors import ConfigError
from offline_grpo.history.records import hide_progress_bars

DEFAULT_LENGTH = 256


def chat_template_kwargs(text: str) -> dict[str, Any]:
    """A JSON object. Raises TypeError or ValueError, which argparse tells, for anything else."""
    return dict(json.loads(text))


def run(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m offline_grpo.sample", description=__doc__)
    about = "checkpoint, run folder (its best or newest checkpoint), model folder, adapter or Hub id"
    parser.add_argument("model", metavar="MODEL", help=about)
    parser.add_argument("prompt", metavar="PROMPT", help="the user's message; - reads it from stdin")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="number of completions (default: 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the most probable token (default: 1)")
    about = f"longest completion (default: as the run trained, else {DEFAULT_LENGTH})"
    parser.add_argument("--max-new-tokens", type=int, help=about)
    parser.add_argument("--system", help="system message")
    about = "arguments of the chat template, as JSON: '{\"enable_thinking\": false}' (default: as the run trained)"
    parser.add_argument("--chat-template-kwargs", type=chat_template_kwargs, metavar="JSON", help=about)
    about = "begins every answer (default: task.assistant_prefix of the run)"
    parser.add_argument("--assistant-prefix", metavar="TEXT", help=about)
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same completions (default: 0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    cli.add_trust_option(parser)
    options = parser.parse_args(arguments)

    # What needs no model is refused at once.
    if options.n < 1:
        raise ConfigError("-n", options.n, "must be at least 1")
    if not 0 <= options.temperature < math.inf:  # as nan
        raise ConfigError("--temperature", options.temperature, "must be a number, 0 or more")
    for option in ("system", "chat_template_kwargs", "assistant_prefix"):
        if options.raw and (value := getattr(options, option)) is not None:
            fix = "there are no messages with --raw; put the text into the prompt"
            raise ConfigError(f"--{option.replace('_', '-')}", value, fix)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt.strip():
        raise ConfigError("PROMPT: is empty; give the text that the model shall answer")
    print("offline-grpo: loading ...", file=sys.stderr, flush=True)
    hub.need_model(options.model, "MODEL")  # before imports that take seconds

    from offline_grpo.checkpoint.pretrained import find_model
    from offline_grpo.config.problems import PREFIX
    from offline_grpo.generation.transformers_client import TransformersClient
    from offline_grpo.model.device import resolve_device
    from offline_grpo.model.load import context_length, read_model_config
    from offline_grpo.model.text import TokenizerCodec
    from offline_grpo.seeding import derive_seed
    from offline_grpo.types import SamplingParams, SamplingRequest

    hide_progress_bars()
    # The prompt, as the run encoded its own, and how long the completion may get.
    device = resolve_device(options.device, key="--device")
    source = find_model(options.model, trust_remote_code=options.trust_remote_code)
    config: Any = source.config
    kwargs, prefix = options.chat_template_kwargs, options.assistant_prefix
    if config is not None and not options.raw:
        kwargs = config["model"].get("chat_template_kwargs") if kwargs is None else kwargs
        prefix = config["task"].get(PREFIX) if prefix is None else prefix
    codec = TokenizerCodec(source.tokenizer(), chat_template_kwargs=kwargs or {}, assistant_prefix=prefix or "")
    messages = [{"role": "system", "content": options.system}] if options.system is not None else []
    messages.append({"role": "user", "content": prompt})
    prompt_ids = codec.tokenizer.encode(prompt) if options.raw else codec.encode(messages)
    model_config = read_model_config(source.weights, "MODEL", trust_remote_code=source.trust_remote_code)
    room = (context_length(model_config) or sys.maxsize) - len(prompt_ids)
    usual = DEFAULT_LENGTH if config is None else config["generation"]["max_new_tokens"]
    length = options.max_new_tokens if options.max_new_tokens is not None else min(usual, room)
    if not 0 < length <= room:
        fix = f"must be 1 to {room}, because the prompt has {len(prompt_ids)} tokens of the model's context"
        raise ConfigError("--max-new-tokens", length, fix)

    client = TransformersClient(model=source.load(device=device), tokenizer=codec.tokenizer, batch_size=options.n)
    request = SamplingRequest(tuple(prompt_ids), options.n, derive_seed(options.seed, "sample"))
    sampling = SamplingParams(length, temperature=options.temperature)
    [(_, completions)] = client.generate([request], sampling)
    for index, completion in enumerate(completions):
        text = codec.judged(completion.token_ids, sampling)
        print(f"{'' if index == 0 else chr(10)}--- {index + 1}\n{text}" if options.n > 1 else text)


if __name__ == "__main__":
    cli.run_command(run)
