"""Which engines a run samples from, as far as the configuration says: for training, and for evaluations if they ask
another one.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offline_grpo.engine.launcher import Launcher
from offline_grpo.engine.ports import plain_url
from offline_grpo.errors import ConfigError, require
from offline_grpo.generation.server_client import ServerClient
from offline_grpo.run.build import build, check_settings, resolve
from offline_grpo.settings import EvalConfig, RunConfig, check_url

CLIENT_RUNTIME = ("model", "tokenizer", "server", "eos_ids", "vocab_size")
"""Names under which a rollout client's constructor may ask for objects that exist only once the model is loaded."""

SERVER_CLIENT_SETTINGS = ("batch_size", "timeout_s", "max_retries")
EVAL_BACKENDS = {
    "transformers": ("offline_grpo.generation.transformers_client.TransformersClient", ("batch_size",)),
    "vllm_server": ("offline_grpo.generation.vllm_client.VllmClient", SERVER_CLIENT_SETTINGS),
    "sglang_server": ("offline_grpo.generation.sglang_client.SglangClient", SERVER_CLIENT_SETTINGS),
}
"""What a name in `eval.backend` stands for: a client's class, and its settings, which are those of the group `eval`."""


@dataclass(frozen=True)
class EngineSpec:
    """A client and its servers, before any of them exists.

    Args:
        client_node: `_target_` and settings of the rollout client.
        base_urls: of external servers; empty where the run starts them, or needs none.
        api_key: of the servers. Managed ones without a configured key get a random one, so that nobody else on the
            machine controls them.
        launcher: starts managed servers; None where none is started.
        key: the group that the client's settings come from, for messages.
        num_managed: servers that the run starts.
    """

    client_node: Mapping[str, Any]
    base_urls: Sequence[str]
    api_key: str | None = field(repr=False)
    launcher: Launcher | None
    key: str
    num_managed: int = 0

    @property
    def base_url(self) -> str | None:
        """The URLs of external servers, as one types them; None where there are none."""
        if len(self.base_urls) < 2:
            return next(iter(self.base_urls), None)
        return f"[{','.join(self.base_urls)}]"

    @property
    def num_servers(self) -> int:
        """That are asked at once."""
        return self.num_managed or len(self.base_urls)

    @property
    def client_class(self) -> Any:
        """The rollout client's class. Raises ConfigError if there is none."""
        target = resolve(self.client_node, self.key)
        if not hasattr(target, "engine_name"):
            at = f"{self.key}._target_={self.client_node['_target_']}"
            raise ConfigError(
                f"{at}: is no RolloutClient (see offline_grpo/interfaces.py), whose class has an engine_name"
            )
        return target

    @property
    def needs_server(self) -> bool:
        """Whether the client asks a server. In this process it samples otherwise."""
        return self.client_class.engine_name is not None

    @property
    def url_key(self) -> str:
        """The setting that `base_url` comes from."""
        return f"{self.key.partition('.')[0]}.base_url"

    def check_client(self) -> None:
        """Raise ConfigError if the client's settings do not fit its constructor, or are out of range."""
        settings = {name: value for name, value in self.client_node.items() if name != "_target_"}
        check_settings(self.client_class, settings, self.key, given_at_runtime=dict.fromkeys(CLIENT_RUNTIME))
        for name, is_good, rule in (
            ("batch_size", lambda value: value >= 1, "must be at least 1"),
            ("timeout_s", lambda value: value > 0, "must be above 0"),
            ("max_retries", lambda value: value >= 0, "must be 0 or more"),
        ):
            if name in settings:
                require(is_good(settings[name]), f"{self.key}.{name}", settings[name], rule)


def training_engine(config: RunConfig, node: Mapping[str, Any]) -> EngineSpec:
    """What `generation` asks for.

    Args:
        node: the group `generation` without the sampling settings.

    Raises:
        ConfigError: a client whose settings do not fit its constructor, or that has no server to ask.
    """
    client_node = {name: value for name, value in node.items() if name not in ("base_url", "api_key")}
    urls, asked = urls_of(node.get("base_url")), config.placement.num_engines
    spec = EngineSpec(client_node, urls, node.get("api_key"), None, "generation")
    spec.check_client()
    where = (
        f"the servers at generation.base_url={spec.base_url} run already"
        if urls
        else "generation samples in this process"
    )
    is_free = spec.needs_server and not urls
    require(
        is_free or asked in (1, len(urls)),
        "placement.num_engines",
        asked,
        f"{where}, so this would do nothing; leave it at 1",
    )
    fix = (
        "cannot be spread over several servers, because it does not inherit from ServerClient "
        "(generation/server_client.py)"
    )
    is_one = max(asked, len(urls)) == 1 or issubclass(spec.client_class, ServerClient)
    require(is_one, "generation._target_", client_node["_target_"], fix)
    if not is_free:
        return spec
    if config.engine is None:
        raise ConfigError(
            "generation.base_url=None: no server to ask; name a running one, or let the run start one with engine=vllm"
        )
    engine = _trusting(config.engine) if config.model.trust_remote_code else config.engine
    launcher: Launcher = build(engine, key="engine")
    launcher = launcher.expecting(_num_sequences(config, client_node))
    launcher = replace(launcher, api_key=launcher.api_key or secrets.token_hex(32))
    last = 65536 - asked
    fix = f"placement.num_engines={asked} takes as many ports from there on; use {last} or less, or null"
    require(launcher.port is None or launcher.port <= last, "engine.port", launcher.port, fix)
    return replace(spec, api_key=launcher.api_key, launcher=launcher, num_managed=asked)


def _num_sequences(config: RunConfig, client_node: Mapping[str, Any]) -> int:
    """That each server samples at once: all of an iteration, if they are let in."""
    num_engines, data = config.placement.num_engines, config.data
    requests = min(
        client_node.get("batch_size", data.problems_per_iteration), -(-data.problems_per_iteration // num_engines)
    )
    return requests * data.rollouts_per_problem


def _trusting(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """The server must load what the trainer loads."""
    return {**node, "args": {**node["args"], "trust_remote_code": True}}


def evaluation_engine(settings: EvalConfig, training: EngineSpec, *, api_key: str | None) -> EngineSpec | None:
    """What evaluations ask, None where it is what training samples from.

    Args:
        api_key: of an external server, `generation.api_key`.

    Raises:
        ConfigError: a client whose settings do not fit its constructor, one that has no server to ask, or a server
        without a client.
    """
    spec = EngineSpec(_evaluation_node(settings, training), urls_of(settings.base_url), api_key, None, "eval.backend")
    is_same_client = not isinstance(settings.backend, Mapping) and issubclass(training.client_class, spec.client_class)
    same = settings.base_url is None or plain_url(settings.base_url) in map(plain_url, training.base_urls)
    is_shared = is_same_client and same
    if settings.base_url is None or is_shared:
        fix = "applies only to a separate evaluation server; set eval.base_url to one, or leave it null"
        require(settings.weight_sync is None, "eval.weight_sync", settings.weight_sync, fix)
    if is_shared:
        return None
    if settings.base_url is None and spec.needs_server:
        raise ConfigError(
            f"eval.backend={settings.backend}: training samples from elsewhere; set eval.base_url to the server "
            f"for evaluations"
        )
    if settings.base_url is not None and not spec.needs_server:
        raise ConfigError(
            f"eval.base_url={settings.base_url}: name the kind of server too: eval.backend=vllm_server or sglang_server"
        )
    spec.check_client()
    return spec


def num_shards(server_args: Mapping[str, Any]) -> int:
    """GPUs that a server splits its model over; the option is vLLM's or SGLang's."""
    return server_args.get("tensor_parallel_size") or server_args.get("tp_size") or 1


def urls_of(value: str | Sequence[str] | None) -> list[str]:
    """The URLs that a setting names: none, one, or a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def check_urls(key: str, value: Any) -> None:
    """Raise ConfigError if the setting names a URL that a client cannot ask, names one twice, or is an empty list."""
    urls = urls_of(value)
    require(value is None or len(urls) > 0, key, value, "names no server; null starts one")
    for url in urls:
        check_url(key, url)
    require(len({plain_url(url) for url in urls}) == len(urls), key, f"[{','.join(urls)}]", "names a server twice")


def _evaluation_node(settings: EvalConfig, training: EngineSpec) -> Mapping[str, Any]:
    backend = settings.backend
    if backend is None:  # training's own settings, but for those that both groups have
        shared = {name: getattr(settings, name) for name in SERVER_CLIENT_SETTINGS if name in training.client_node}
        return {**training.client_node, **shared}
    if isinstance(backend, Mapping):
        return backend
    if backend not in EVAL_BACKENDS:
        names = ", ".join(EVAL_BACKENDS)
        raise ConfigError(
            f"eval.backend={backend}: must be null, one of {names}, or a client of your own with a _target_"
        )
    target, names = EVAL_BACKENDS[backend]
    return {"_target_": target, **{name: getattr(settings, name) for name in names}}
