"""Which engines a run samples from, as far as the configuration says: for training, and for evaluations if they ask
another one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import OmegaConf

from offline_grpo.config.build import build, check_signature, resolve
from offline_grpo.config.compose import folder
from offline_grpo.engine.engine import Engine
from offline_grpo.engine.http import plain_url
from offline_grpo.engine.server_engine import Launcher
from offline_grpo.errors import ConfigError, require
from offline_grpo.settings import RunConfig, check_url
from offline_grpo.types import SamplingParams

OF_SERVER = ("base_url", "api_key", "url_key", "launcher", "number", "log_dir", "log_numbers", "gpus", "room")
OF_MODEL = ("model", "tokenizer", "eos_ids", "vocab_size", "vision", "banned_ids", "sampling", "is_corrected")
CLIENT_RUNTIME = (*OF_MODEL, *OF_SERVER)
"""What an engine's constructor may ask for beside its settings: what exists once the model is loaded, and its server's
place. See `ServerEngine`."""
OF_SAMPLING = ("allow_truncated_sampling", "batch_invariant", *SamplingParams.__dataclass_fields__)
"""Keys of the group `generation` that say how training samples; the others are the engine's."""
OF_BOTH = ("batch_size", "timeout_s", "max_retries")
"""Settings of engines in `generation` and in `eval`."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine and its servers, before any of them exists."""

    client_node: Mapping[str, Any]  # `_target_` and settings of the engine
    base_urls: Sequence[str]  # of external servers; empty where the run starts them, or needs none
    api_key: str | None = field(repr=False)  # of the servers; managed ones always have one
    launcher: Launcher | None  # starts managed servers; None where none is started
    key: str  # the group that the engine's settings come from
    num_managed: int = 0  # servers that the run starts

    @property
    def base_url(self) -> str | None:
        """The URLs of external servers, as one types them; None where there are none."""
        if len(self.base_urls) < 2:
            return next(iter(self.base_urls), None)
        return f"[{','.join(self.base_urls)}]"

    @property
    def engine_class(self) -> type[Engine]:
        target = resolve(self.client_node, self.key)
        if not (isinstance(target, type) and issubclass(target, Engine)):
            fix = "is no RolloutClient that inherits from LocalEngine or ServerEngine (see offline_grpo/engine/)"
            raise ConfigError(f"{self.key}._target_={self.client_node['_target_']}: {fix}")
        return target

    @property
    def needs_server(self) -> bool:
        return not self.engine_class.is_local

    def engine(self, number: int = 0, **runtime: Any) -> Any:
        """An `Engine`, of several servers with the one of this number. Its constructor gets those of these objects
        (`CLIENT_RUNTIME`) that it asks for.
        """
        url = self.base_urls[number] if self.base_urls else None
        server = {"base_url": url, "api_key": self.api_key, "url_key": f"{self.key.partition('.')[0]}.base_url"}
        server |= {"launcher": self.launcher, "number": number}
        return build(self.client_node, key=self.key, protocol=Engine, **{**server, **runtime})

    def check_client(self) -> None:
        """Raise ConfigError if the engine's settings do not fit its constructor, or are out of range."""
        settings = {name: value for name, value in self.client_node.items() if name != "_target_"}
        check_signature(self.engine_class, settings, self.key, given_at_runtime=dict.fromkeys(CLIENT_RUNTIME))
        for name, is_good, rule in (
            ("batch_size", settings.get("batch_size", 1) >= 1, "must be at least 1"),
            ("timeout_s", settings.get("timeout_s", 1) > 0, "must be above 0"),
            ("max_retries", settings.get("max_retries", 0) >= 0, "must be 0 or more"),
        ):
            require(is_good, f"{self.key}.{name}", settings.get(name), rule)


def training_engine(config: RunConfig) -> EngineSpec:
    """What `generation` asks for. Raises ConfigError for a client without a server to ask."""
    node = {name: value for name, value in config.generation.items() if name not in OF_SAMPLING}
    urls, num_engines = urls_of("generation.base_url", node.pop("base_url", None)), config.placement.num_engines
    spec = EngineSpec(node, urls, node.pop("api_key", None), None, "generation")
    spec.check_client()
    fix = "the run cannot see how a server at generation.base_url was started; leave that at null, or this at false"
    require(not (urls and config.is_batch_invariant), "generation.batch_invariant", "true", fix)
    if urls or not spec.needs_server:
        fix = "the run starts no server, so this would do nothing; leave it at 1"
        require(num_engines in (1, len(urls)), "placement.num_engines", num_engines, fix)
        return spec

    # The servers load the model of the run, as it does.
    fix = "no server to ask; name a running one, or let the run start one with engine=vllm"
    require(config.engine is not None, "generation.base_url", None, fix)
    args = dict(config.engine["args"])
    if config.model.trust_remote_code:
        args["trust_remote_code"] = True
    if config.model.quantization is not None:
        typed = args.setdefault("quantization", "bitsandbytes")
        fix = "the server rounds its base as model.quantization=nf4 does, by bitsandbytes; leave it out"
        require(typed == "bitsandbytes", "engine.args.quantization", typed, fix)

    env = dict(config.engine["env"])
    if config.is_batch_invariant:
        env["VLLM_BATCH_INVARIANT"] = "1"
        # The compiler would measure which kernels to join, which it refuses to do where all has to be repeatable.
        compiled = dict(args.get("compilation_config") or {})
        compiled["inductor_compile_config"] = {"combo_kernels": False, **compiled.get("inductor_compile_config", {})}
        args["compilation_config"] = compiled

    # Each server is ready for its share of an iteration, and nobody else on the machine controls it.
    launcher: Launcher = build({**config.engine, "args": args, "env": env}, key="engine")
    of_iteration = -(-config.data.problems_per_iteration // num_engines)
    num_requests = min(node.get("batch_size", of_iteration), of_iteration)
    launcher = launcher.expecting(num_requests * config.data.rollouts_per_problem)
    launcher = replace(launcher, api_key=launcher.api_key or secrets.token_hex(32))
    return replace(spec, api_key=launcher.api_key, launcher=launcher, num_managed=num_engines)


def evaluation_engine(config: RunConfig, training: EngineSpec) -> EngineSpec | None:
    """What evaluations ask, None where it is what training samples from. Raises ConfigError for a client without a
    server, and for a server without a client.
    """
    settings = config.eval
    url, backend = settings.base_url, settings.backend
    if isinstance(backend, Mapping):
        node: Mapping[str, Any] = backend
    elif backend is None:  # training's own settings, but for those that both groups have
        node = training.client_node
        node = {**node, **{name: getattr(settings, name) for name in OF_BOTH if name in node}}
    else:
        options = {file.stem: file for file in (folder() / "generation").glob("*.yaml")}
        fix = f"must be null, one of {', '.join(sorted(options))}, or a client of your own with a _target_"
        require(backend in options, "eval.backend", backend, fix)
        option: Any = OmegaConf.load(options[backend])
        node = {"_target_": option["_target_"], **{name: getattr(settings, name) for name in OF_BOTH if name in option}}
    spec = EngineSpec(node, [] if url is None else [url], config.generation.get("api_key"), None, "eval.backend")

    # It is training's engine, unless it is of another kind, or at another address.
    is_same_client = not isinstance(backend, Mapping) and issubclass(training.engine_class, spec.engine_class)
    is_shared = is_same_client and (url is None or plain_url(url) in map(plain_url, training.base_urls))
    fix = "applies only to a separate evaluation server; set eval.base_url to one, or leave it null"
    is_separate = url is not None and not is_shared
    require(is_separate or settings.weight_sync is None, "eval.weight_sync", settings.weight_sync, fix)
    if is_shared:
        return None
    fix = "training samples from elsewhere; set eval.base_url to the server for evaluations"
    require(url is not None or not spec.needs_server, "eval.backend", backend, fix)
    fix = "name the kind of server too: eval.backend=vllm_server or sglang_server"
    require(url is None or spec.needs_server, "eval.base_url", url, fix)
    spec.check_client()
    return spec


def num_shards(server_args: Mapping[str, Any]) -> int:
    """GPUs that a server splits its model over; the option is vLLM's or SGLang's."""
    return server_args.get("tensor_parallel_size") or server_args.get("tp_size") or 1


def urls_of(key: str, value: str | Sequence[str] | None) -> list[str]:
    """The servers of a setting. Raises ConfigError for a URL that a client cannot ask, one twice, or an empty list."""
    urls = [] if value is None else [value] if isinstance(value, str) else list(value)
    require(value is None or len(urls) > 0, key, value, "names no server; null starts one")
    for url in urls:
        check_url(key, url)
    require(len({plain_url(url) for url in urls}) == len(urls), key, f"[{','.join(urls)}]", "names a server twice")
    return urls
