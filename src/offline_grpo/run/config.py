"""Converts the composed YAML to typed settings. Hydra checks files and overrides against a schema made from `settings.py`.

This module does not import torch, so that `--help` and `--cfg job` are fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from offline_grpo.errors import ConfigError
from offline_grpo.settings import RunConfig

T = TypeVar("T")

TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""`train.precision` -> the dtype name that torch and the servers use; in YAML: ${torch_dtype:${train.precision}}."""


@cache
def schema(cls: type) -> type:
    """A non-frozen copy of a frozen dataclass, so that Hydra can merge YAML into it: OmegaConf makes nodes of frozen classes read-only."""
    members = []
    for member in fields(cls):
        hint = get_type_hints(cls)[member.name]
        options = [schema(option) if is_dataclass(option) else option for option in get_args(hint)]
        if is_dataclass(hint):
            hint = schema(hint)  # type: ignore[arg-type]
        elif get_origin(hint) in (Union, UnionType):
            hint = Union[tuple(options)]  # noqa: UP007 - built at run time
        members.append((member.name, hint) if member.default is MISSING else (member.name, hint, field(default=member.default)))
    return make_dataclass(cls.__name__, members)


def register() -> None:
    """Make the schema available to Hydra as `config_schema`, the first entry of the defaults list in conf/config.yaml."""
    OmegaConf.register_new_resolver("torch_dtype", TORCH_DTYPES.get, replace=True)
    ConfigStore.instance().store(name="config_schema", node=schema(RunConfig))


def typed(cfg: DictConfig) -> RunConfig:
    """The composed configuration as frozen dataclasses, with interpolations resolved and all values checked.

    Also accepts a configuration read back from `.hydra/config.yaml`: the schema is merged in again.
    """
    node = OmegaConf.merge(OmegaConf.structured(schema(RunConfig)), cfg)
    for key in sorted(OmegaConf.missing_keys(node)):
        raise ConfigError(f"{key}: has no value; set {key}=...")
    return _construct(RunConfig, as_plain(node))  # type: ignore[arg-type]


def _construct(cls: type[T], plain: Mapping[str, Any]) -> T:
    hints = get_type_hints(cls)
    values = dict(plain)
    for name, value in plain.items():
        child = next((option for option in (hints[name], *get_args(hints[name])) if is_dataclass(option)), None)
        if child is not None and value is not None:
            values[name] = _construct(child, value)  # type: ignore[type-var]
    return cls(**values)


def as_plain(cfg: DictConfig) -> Mapping[str, Any]:
    """The resolved configuration as nested dicts and lists, for loggers and checkpoints."""
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]
