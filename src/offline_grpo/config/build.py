"""Builds the component that a node's `_target_` names. The constructor's signature is the schema of the node."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import hydra.utils
from hydra.errors import InstantiationException

from offline_grpo.config.compose import sweep_hint
from offline_grpo.errors import ConfigError

# it logs in several lines what `resolve` reports in one
logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)

_ADVANTAGE = "offline_grpo.train.advantage"
MOVED = {
    "offline_grpo.generation.vllm_client.VllmClient": "offline_grpo.engine.vllm.VllmEngine",
    "offline_grpo.generation.sglang_client.SglangClient": "offline_grpo.engine.sglang.SglangEngine",
    f"{_ADVANTAGE}.distill.Distill": f"{_ADVANTAGE}.Distill",
    f"{_ADVANTAGE}.gdpo.GDPO": f"{_ADVANTAGE}.GDPO",
    "offline_grpo.logger.json_logger.JsonLogger": "offline_grpo.logger.JsonLogger",
    "offline_grpo.task.agent.Agent": "offline_grpo.task.environment.Agent",
    f"{_ADVANTAGE}.maxrl.MaxRL": f"{_ADVANTAGE}.MaxRL",
    f"{_ADVANTAGE}.passk.PassK": f"{_ADVANTAGE}.PassK",
    f"{_ADVANTAGE}.per_token.PerToken": f"{_ADVANTAGE}.PerToken",
    f"{_ADVANTAGE}.per_turn.PerTurn": f"{_ADVANTAGE}.PerTurn",
    f"{_ADVANTAGE}.reinforce_baseline.ReinforceBaseline": f"{_ADVANTAGE}.ReinforceBaseline",
    f"{_ADVANTAGE}.rloo.RLOO": f"{_ADVANTAGE}.RLOO",
}
"""Former paths, which the configuration of a resumed run may name."""


def build(node: Mapping[str, Any], *, key: str, protocol: type | None = None, **runtime: Any) -> Any:
    """Construct `node["_target_"]` from the node's values, plus those `runtime` objects that its signature names.
    Raises ConfigError for an unknown target or setting, a missing one, or a wrong type.

    Args:
        key: path of the node in the configuration ("train.loss"), for error messages.
        protocol: the Protocol of interfaces.py that the result must implement.
        runtime: objects that exist only at run time (policy, tokenizer, ...).
    """
    # Of the objects of the run it gets those that it names; the node must fit the rest of the signature.
    target = resolve(node, key)
    parameters = inspect.signature(target).parameters
    settings = {name: value for name, value in node.items() if name != "_target_"}
    wanted = {name: value for name, value in runtime.items() if name in parameters}
    check_signature(target, settings, key, given_at_runtime=wanted)
    component = target(**settings, **wanted)

    # A class of the user's own may be of another kind, which would show in the middle of the run.
    if protocol is not None and not isinstance(component, protocol):
        bases = protocol.__mro__[:-1]
        members = {name for base in bases for name in (*vars(base), *getattr(base, "__annotations__", {}))}
        missing = sorted(name for name in members if not name.startswith("_") and not hasattr(component, name))
        lacks = f"lacks {', '.join(missing)}" if missing else "does not inherit from it"
        fix = f"does not implement {protocol.__name__}: {lacks}; see {protocol.__module__.replace('.', '/')}.py"
        raise ConfigError(f"{key}._target_={node['_target_']}: {fix}")
    return component


def resolve(node: Mapping[str, Any], key: str) -> Any:
    """Import the class or function that a node's `_target_` names; code beside the working directory is found too."""
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        raise ConfigError(f"{key}={node}: needs a _target_, the dotted path of the component's class")
    if os.getcwd() not in sys.path:  # a script's own folder is, and a console script has neither
        sys.path.append(os.getcwd())
    name = MOVED.get(node["_target_"], node["_target_"])
    try:
        target = hydra.utils.get_object(str(name))
    except (ImportError, ValueError, AttributeError, InstantiationException) as error:
        if isinstance(error.__cause__, ConfigError):  # the module itself has said what it lacks
            raise error.__cause__ from None
        fix = f"cannot be imported ({' '.join(str(error).split())}); give the dotted path of a class"
        raise ConfigError(f"{key}._target_={name}: {fix}") from error
    if not callable(target):
        raise ConfigError(f"{key}._target_", name, "is not a class or function")
    return target


def check_signature(target: Any, settings: Mapping[str, Any], key: str, *, given_at_runtime: Mapping[str, Any]) -> None:
    """Raise ConfigError if `settings` does not fit the signature of `target`: unknown names, missing names or wrong
    types.
    """
    # Names that the signature lacks, and those that it wants and the node has not.
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters if name not in given_at_runtime]
    for name, value in settings.items():
        if name not in known and (not takes_any or name in given_at_runtime):
            fix = f"{target.__name__} has no such setting; it has {', '.join(known) or 'none'}"
            raise ConfigError(f"{key}.{name}", value, fix)
    for name in known:
        is_variadic = parameters[name].kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if parameters[name].default is inspect.Parameter.empty and not is_variadic and name not in settings:
            raise ConfigError(f"{key}.{name}: {target.__name__} needs it and it is not set")

    # Types, as far as they are plain. Of a dataclass its own hints: those of its __init__ are resolved in the module of
    # the subclass, not where a field is defined.
    hints = get_type_hints(target.__init__ if inspect.isclass(target) and not is_dataclass(target) else target)
    for name, value in settings.items():
        if name in hints and not fits(value, hints[name]):
            hint = hints[name]  # as `int | None`, not `typing.Optional[int]`
            is_class = get_origin(hint) is None and hasattr(hint, "__name__")
            wanted = hint.__name__ if is_class else str(hint).replace("typing.", "")
            fix = f"expected {wanted}, got {type(value).__name__}{sweep_hint(f'{key}.{name}', value)}"
            raise ConfigError(f"{key}.{name}={value!r}: {fix}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value matches the annotation `hint`. Annotations other than plain types accept any value."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in args)
    if origin is Literal:
        return value in args
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(fits(item, args[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool, type(None)):
        return isinstance(value, hint)
    return True
