"""Which key somebody may have meant who typed one that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser

from offline_grpo.config.compose import folder, key_of
from offline_grpo.config.help import all_keys, defaults, groups, keys, prefix_of
from offline_grpo.errors import ConfigError

NOT_SERVED = {
    "modules_to_save": "no server loads an adapter with whole modules; adapt more layers by model.lora.target_modules",
    "use_dora": "vLLM serves no DoRA; use plain LoRA, or model.lora.use_rslora=true",
}
"""What adapters of other trainers may have -> why ours cannot."""

OF_OTHERS = "docs/from_the_seeds.md has the keys of other trainers"


def of_other_trainers() -> dict[str, str]:
    """A key of another trainer, or the end of one -> the key or the group that does the same here."""
    names = yaml.safe_load(Path(__file__).with_name("of_other_trainers.yaml").read_text())
    return {name: key for key, others in names.items() for name in others.split()}


def known_keys() -> dict[str, list[str]]:
    """Every group, and every key that a file of `conf/` explains -> the options that have it, but for presets."""
    conf = folder()
    found: dict[str, list[str]] = {key.name: [] for key in keys(conf / "config.yaml", "")}
    for group, options in groups(conf).items():
        found.setdefault(group, [])
        for option in options:
            for key in all_keys(conf / group / f"{option}.yaml", prefix_of(group)):
                found.setdefault(key.name, []).extend([f"{group}={option}"] if group != "experiment" else [])
    return found


def empty_group(key: str, words: Sequence[str]) -> str | None:
    """The hint about a setting below a group of which neither the defaults nor the command line choose an option; None
    for any other.
    """
    typed = {*map(key_of, words)}
    chosen = {*defaults(folder()), *typed, *(["engine"] if "generation" in typed else [])}  # which chooses it
    for group, options in groups(folder()).items():
        if group not in chosen and group != "experiment" and key.startswith(prefix_of(group)):
            return f"{key}: {group} is empty here; add {' or '.join(f'{group}={option}' for option in options)}"
    return None


def check_options(words: Sequence[str]) -> None:
    """Raise ConfigError for an option that Hydra does not have, such as `--learning_rate`."""
    for word in get_args_parser().parse_known_args(list(words))[1]:
        key = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("--"):
            fix = f"{key}: settings have no dashes; write {key}=..." if key in known_keys() else no_such_key(key)
            raise ConfigError(f"--{fix}")


def no_such_key(key: str) -> str:
    """That a key does not exist; names the one that was probably meant."""
    words, known = re.split("[./]", key), known_keys()
    ends, theirs = (".".join(words[place:]) for place in range(len(words))), of_other_trainers()
    renamed = next((theirs[end] for end in ends if end in theirs), None)
    others = [other for other in known if not key.startswith(f"{other}.")]
    similar = [other for other in others if re.split("[./]", other)[-1] == words[-1]]
    if not 0 < len(similar) < 4:
        place = f"{words[0]}." if words[0] in known else ""  # a group has the key, if any: its name makes none alike
        ends_of = {other[len(place) :]: other for other in others if other.replace("/", ".").startswith(place)}
        similar = [ends_of[end] for end in difflib.get_close_matches(key[len(place) :], ends_of, n=1, cutoff=0.65)]
    is_passed_on = key.startswith(("engine.args.", "engine.env."))
    chosen = next(
        (group for group, options in groups(folder()).items() if key in map(prefix_of(group).__add__, options)), None
    )
    if words[-1] in NOT_SERVED:
        fix = NOT_SERVED[words[-1]]
    elif known.get(key):
        fix = f"the chosen options have no such key; add {' or '.join(dict.fromkeys(known[key]))}"
    elif chosen is not None:
        fix = f"is an option, not a key; choose it with {chosen}={words[-1]}"
    elif renamed is not None:
        fix = f"no such key; the setting is {renamed}; {OF_OTHERS}"
    elif similar:
        others = is_passed_on * f" +{key}=... passes another on to the server"
        fix = f"no such key; did you mean {' or '.join(similar)}?{others}"
    elif is_passed_on:
        fix = f"no such key here; +{key}=... passes it to the server"
    else:
        all_of = f"`--help {words[0]}` lists those of the group" if words[0] in known else "`--help` lists all"
        fix = f"no such key; {all_of}; {OF_OTHERS}"
    return f"{key}: {fix}"
