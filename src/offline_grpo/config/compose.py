"""From the YAML that Hydra composes to typed settings. The dataclasses of `settings.py` are the schema that files and
overrides must fit.

This module imports no torch, so that `--help`, `--cfg job` and most refusals come at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import entry_points
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf

from offline_grpo.errors import ConfigError
from offline_grpo.model.device import TORCH_NAMES
from offline_grpo.settings import RunConfig, flat
from offline_grpo.train.schedule import LrSchedule

MAY_BE_INFINITE = ("train.grad_clip",)
OF_SEVERAL = ("logger", "experiment")
"""Groups of which several options may be chosen. Of two of another one, Hydra would make a mixture."""
PART = re.compile(r"""'[^']*'|"[^"]*"|[^\s,{}'":[\]](?:[^,{}'":[\]]|:(?!\s))*""")
"""A text in the value of an override, between the marks of lists, dicts and sweeps."""
IN_SEARCH_PATH = re.compile(r"file://([^,'\"\]]+)")

# Hydra reads dozens of files for each command, here by the parser in C.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]


def folder() -> Path:
    """The folder `conf/`: beside the package where it was installed from a wheel, else at the top of the repository."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "conf", package.parents[1] / "conf") if path.is_dir())


def packages() -> list[Path]:
    """The folders that installed packages name as entry points `offline_grpo.conf`, such as `acme_grpo.conf`."""
    found = []
    for entry in sorted(entry_points(group="offline_grpo.conf")):
        name, *below = entry.value.split(".")
        spec = find_spec(name)  # of what is outermost, because others are found by an import, which may take time
        places = (Path(place, *below) for place in (spec and spec.submodule_search_locations) or ())
        place = next(filter(Path.is_dir, places), None)
        if place is None:
            raise ConfigError(f"{entry.value}: a package's entry point {entry.group} names it, and it is no folder")
        found.append(place)
    return found


def folders(words: Sequence[str] = ()) -> list[Path]:
    """Where options are: `conf/`, and what packages and these words of a command line add."""
    added = [path for word in words if key_of(word) == "hydra.searchpath" for path in IN_SEARCH_PATH.findall(word)]
    config_dir = get_args_parser().parse_known_args(list(words))[0].config_dir
    return [folder(), *packages(), *map(Path, added if config_dir is None else [*added, config_dir])]


def groups(places: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """Group -> its options -> the folder of each. Without options whose name begins with _, which others include."""
    found: dict[str, dict[str, Path]] = {}
    for place in places:
        for path in sorted(place.rglob("*.yaml")):
            group = path.parent.relative_to(place).as_posix()
            if not path.stem.startswith("_") and group not in (".", "local"):
                found.setdefault(group, {}).setdefault(path.stem, place)
    return found


def defaults(conf: Path) -> dict[str, list[str]]:
    """Group -> the options that are chosen by default, in `config.yaml` or in the file of the group above."""
    chosen: dict[str, list[str]] = {}
    for path in (conf / "config.yaml", *conf.glob("*/default.yaml")):
        prefix = "" if path.parent == conf else f"{path.parent.name}/"
        for entry in yaml.safe_load(path.read_text()).get("defaults", []):
            for name, option in entry.items() if isinstance(entry, dict) else ():
                if option is not None and " " not in name:
                    chosen[prefix + name] = option if isinstance(option, list) else [option]
    return chosen


def register() -> None:
    """Make the schema available to Hydra as `config_schema`, the first entry of the defaults list in conf/config.yaml.

    In YAML, ${torch_dtype:${train.precision}} is what torch and servers call a format, and ${packaged:FILE} a file of
    the package.
    """
    OmegaConf.register_new_resolver("torch_dtype", TORCH_NAMES.get, replace=True)
    OmegaConf.register_new_resolver("packaged", lambda file: str(Path(__file__).parents[1] / file), replace=True)
    ConfigStore.instance().store(name="config_schema", node=RunConfig)


def composed(overrides: Sequence[str]) -> DictConfig:
    """What `run_grpo.py` would run with these overrides, after `register`. Raises Hydra's own errors for what cannot be
    composed.
    """
    is_in_job = GlobalHydra.instance().is_initialized()  # of a sweep
    with nullcontext() if is_in_job else initialize_config_dir(config_dir=str(folder()), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def typed(cfg: DictConfig) -> RunConfig:
    """The composed configuration, or a re-read `.hydra/config.yaml`, as dataclasses: interpolations resolved, checks
    passed. Raises ConfigError, or OmegaConf's own errors for keys that the schema lacks and values of other types.
    """
    # merged into the schema, because `+KEY=VALUE` has added keys that it lacks
    node = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.to_container(cfg))
    for key in sorted(OmegaConf.missing_keys(node)):
        raise ConfigError(f"{key}: has no value; set {key}=...")
    config = OmegaConf.to_object(node)
    assert isinstance(config, RunConfig)
    for key, value in flat(OmegaConf.to_container(node, resolve=True)).items():
        if isinstance(value, float) and not isfinite(value) and key not in MAY_BE_INFINITE:
            raise ConfigError(key, value, "must be a finite number")
    return config


def fresh_schedule(config: RunConfig) -> LrSchedule:
    """The learning-rate schedule of a run that is not resumed."""
    num_updates = config.train.iterations * config.planned_updates
    return LrSchedule(kind=config.train.schedule, num_updates=num_updates, warmup_steps=config.train.warmup_steps)


def key_of(word: str) -> str:
    """The key that an override sets, without the marks that add or delete: `++train.lr=1` sets `train.lr`. A word that
    is no override is its own key.
    """
    return word.lstrip("+~").partition("=")[0]


def quoted(path: Path | str) -> str:
    """A path, or any other text, as the value of an override: in quotes unless Hydra reads it bare as the same text."""
    text = str(path)
    is_plain = re.fullmatch(r"[\w/.:+@%-]+", text, re.ASCII) is not None
    if is_plain and OverridesParser.create().parse_override(f"key={text}").value() == text:
        return text
    return QuotedString(text, Quote.single).with_quotes()


def readable(words: Sequence[str], places: Sequence[Path] | None = None) -> list[str]:
    """The overrides of a command line as Hydra can read them: text that its parser does not take, such as `=`, `#` or a
    letter that is not in ASCII, gets quotes. Raises ConfigError for GROUP=null, for a dot in place of its slash, and
    for an option that two of the `places` have, the folders of these words by default.
    """
    places = folders(words) if places is None else places
    parser, options = OverridesParser.create(), groups(places)
    nested = {group.replace("/", "."): group for group in (*options, "hydra/sweeper") if "/" in group}

    def is_read(value: str) -> bool:
        try:
            parser.parse_override(f"key={value}")
        except HydraException:
            return False
        return True

    found = []
    for word in words:
        key, sign, value = word.partition("=")
        name = key.lstrip("+")
        if name in nested and re.match(r"(?!null$)[^{$]", value):
            raise ConfigError(f"{word}: is an option of a group; choose it with {nested[name]}={value}")
        if name in options and value == "null":
            raise ConfigError(f"{word}: a group needs an option; choose one of {', '.join(options[name])}")
        if name in options and name not in OF_SEVERAL and re.match(r"\[.*,", value):
            raise ConfigError(f"{word}: takes one option; for a run with each, --multirun {key}={value.strip('[]')}")
        owners = [str(place) for place in places if (place / name / f"{value}.yaml").is_file()]
        if name in options and len(owners) > 1:
            raise ConfigError(f"{word}: {' and '.join(owners)} have this option; rename one")
        # first each part of a list or a sweep, then the whole
        parts = PART.sub(lambda part: part[0] if is_read(part[0]) else quoted(part[0]), value)
        found.append(f"{key}{sign}{next(filter(is_read, (value, parts, quoted(value))), value)}")
    return found


def sweep_hint(key: str, value: object) -> str:
    """A hint on sweep syntax, for users who wrote a list where a single value is expected."""
    if not isinstance(value, (list, ListConfig)):
        return ""
    return f"; to sweep over it: --multirun {key}={','.join(str(item) for item in value)}"


def as_plain(cfg: DictConfig) -> Mapping[str, Any]:
    """The resolved configuration as nested dicts and lists, for loggers and checkpoints. Infinity is the text "inf", as
    JSON has no such number; OmegaConf reads it as one."""
    text = json.dumps(OmegaConf.to_container(cfg, resolve=True))
    return json.loads(text, parse_constant=lambda name: str(float(name)))
