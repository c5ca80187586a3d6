"""A resumed run has the configuration that it stored in `.hydra/`, with what is typed now on top.

Before Hydra reads the command line, `arguments` puts the run's own overrides in front of the typed ones, so that groups
are chosen as they were. Then `own_configuration` takes the configuration that the run stored, and changes only what the
typed overrides change: the run keeps its settings also where `conf/` has others today. This module imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from offline_grpo.checkpoint.files import latest_checkpoint
from offline_grpo.errors import require
from offline_grpo.redaction import flat
from offline_grpo.report.run_files import read_yaml
from offline_grpo.run import launch, sweeps
from offline_grpo.run.config import key_of, quoted
from offline_grpo.run.run_dir import local_path, no_checkpoint

OVERRIDE = re.compile(r"~|\+*[^-=]+=")
"""How a word of the command line begins that is an override and not an option."""
SWEEP_FLAGS = {"-m", "--multirun"}
ABSENT: Any = object()


def with_override(words: Sequence[str], override: str) -> list[str]:
    """A command line with one more override, before the others: argparse needs all in one place."""
    place = next((index for index, word in enumerate(words) if OVERRIDE.match(word)), len(words))
    return [*words[:place], override, *words[place:]]


def run_folder(resume: str) -> Path | None:
    """The folder of the run that `resume=PATH` names, by itself or by one of its checkpoints; None without one."""
    path = Path(resume).expanduser().resolve()
    if (path / "trainer").is_dir():
        return path.parent.parent
    return path if latest_checkpoint(path / "checkpoints") is not None else None


def arguments(words: Sequence[str]) -> list[str]:
    """The command line with what it needs of the run or sweep that is resumed; any other one as it is."""
    launch.typed[:] = words
    words = sorted(words, key=lambda word: word not in SWEEP_FLAGS)  # argparse needs all overrides in one place
    typed = [word for word in words if OVERRIDE.match(word)]
    options = [word for word in words if word not in typed]
    is_sweep = bool(SWEEP_FLAGS & set(words))
    named = _value("resume", typed)
    if named == "auto" and (place := _value("hydra.sweep.dir" if is_sweep else "hydra.run.dir", typed)) is not None:
        is_there = sweeps.sweep_folder(place) if is_sweep else run_folder(place)  # else it begins in this folder
        named = place if is_there is not None else None
    if named == "auto" and is_sweep:
        named = sweeps.newest_alike(typed)
    if named in (None, "auto"):
        return words
    named = str(named)
    if (sweep := sweeps.sweep_folder(named)) is not None:
        if launch.is_main():
            print(f"going on with the sweep in {sweep}; leave resume out to start another one", flush=True)
        options += [] if is_sweep else ["--multirun"]
        options += _config_dir(read_yaml(sweep / sweeps.RECORD)["hydra"], options)
        return [*options, *sweeps.overrides(sweep, typed), "resume=auto", f"hydra.sweep.dir={quoted(sweep)}"]
    require(not is_sweep, "resume", named, "is one run, whose folder all jobs of --multirun would share; leave it out")
    run = run_folder(named)
    typed = [word for word in typed if key_of(word) != "resume"] + [f"resume={quoted(named)}"]
    if run is None and Path(named).name.startswith("iter_"):  # a damaged one, of which more is said later
        return [*options, *typed]
    if run is None:
        raise no_checkpoint(named)
    path = Path(named).expanduser().resolve()
    is_older = path != run and path != latest_checkpoint(run / "checkpoints")
    typed += [] if is_older else [f"hydra.run.dir={quoted(run)}"]
    # Hydra takes each addition and each choice of a group once
    again = {word.partition("=")[0] for word in typed}
    own = [word for word in own_overrides(run) if word.partition("=")[0] not in again]
    return [*options, *_config_dir(_hydra_record(run), options), *own, *typed]


def own_overrides(run: Path) -> list[str]:
    """The overrides that a run was composed of, without `resume`, and the search path of its configuration."""
    path = run / ".hydra" / "overrides.yaml"
    own = [str(word) for word in read_yaml(path) or []] if path.exists() else []
    return [word for word in own if key_of(word) != "resume"] + [
        word for word in _hydra_record(run).get("overrides", {}).get("hydra", []) if key_of(word) == "hydra.searchpath"
    ]


def search_path(run: Path) -> list[str]:
    """The folders that `--config-dir` and `hydra.searchpath` added for a run, as an override for those who compose
    without its options.
    """
    sources = [source for source in _sources(_hydra_record(run)) if "command-line" in source["provider"]]
    folders = ",".join(quoted(f"{source['schema']}://{source['path']}") for source in sources)
    return [f"hydra.searchpath=[{folders}]"] if folders else []


def own_configuration(cfg: DictConfig, folder: Path) -> tuple[DictConfig, set[str]]:
    """The configuration of this start with absolute paths, and the keys that were typed for a resumed run.

    Args:
        cfg: composed today, from the run's overrides and the typed ones.
        folder: of this start; the job of a sweep resumes there.
    """
    is_job = HydraConfig.get().mode is RunMode.MULTIRUN
    words = [str(word) for word in HydraConfig.get().overrides.task]
    run = None if cfg.resume is None else run_folder(str(folder) if cfg.resume == "auto" else cfg.resume)
    typed: set[str] = set()
    if run is not None and (run / ".hydra" / "config.yaml").exists():
        own = own_overrides(run)
        new = [word for word in words if word not in own] if is_job else launch.typed
        typed = {key_of(word) for word in new if OVERRIDE.match(word)}
        now = _plain(cfg)
        before = _plain(hydra.compose("config", overrides=own)) if typed - {"resume"} else now
        cfg = OmegaConf.create(merged(read_yaml(run / ".hydra" / "config.yaml"), before, now, typed))
    for key, value in flat(_plain(cfg)).items():
        if (absolute := local_path(key, value)) != value:
            OmegaConf.update(cfg, key, absolute)
    return cfg, typed


def merged(
    stored: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], typed: set[str]
) -> dict[str, Any]:
    """`stored`, changed as `before` became `now`, and with what was typed; a component that became another one is taken
    as a whole.

    What `stored` lacks, because it is new, comes from `now`.
    """
    old, new = flat(before), flat(now)
    changed = {key for key in {**old, **new} if old.get(key, ABSENT) != new.get(key, ABSENT)}
    components = {key.rpartition(".")[0] for key in changed if key.endswith("._target_")}
    named = {key for key in (word.replace("/", ".") for word in typed) if _get(now, key) is not ABSENT}
    missing = {key for key in new if _get(stored, key) is ABSENT}
    for key in sorted(changed | components | named | missing, key=lambda key: (-key.count("."), key)):
        _put(stored, key, _get(now, key))
    return stored


def _get(node: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return ABSENT
        node = node[name]
    return node


def _put(node: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for name in parents:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    if value is ABSENT:
        node.pop(last, None)
    else:
        node[last] = value


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """Nested dicts with their interpolations."""
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def _value(key: str, typed: Sequence[str]) -> str | None:
    """The value of a key on the command line; letters beyond ASCII need no quotes of Hydra's."""
    for word in reversed(typed):
        if not word.startswith(f"{key}="):
            continue
        try:
            value = OverridesParser.create().parse_override(word).value()
        except HydraException:
            value = word.partition("=")[2]
        return None if value is None else str(value)
    return None


def _hydra_record(run: Path) -> Mapping[str, Any]:
    path = run / ".hydra" / "hydra.yaml"
    return yaml.safe_load(path.read_text())["hydra"] if path.exists() else {}


def _sources(record: Mapping[str, Any]) -> list[Mapping[str, str]]:
    return record.get("runtime", {}).get("config_sources", [])


def _config_dir(record: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """The option `--config-dir` that a run or a sweep was started with; none where `words` have it, or it had none."""
    if any(word in ("--config-dir", "-cd") or word.startswith("--config-dir=") for word in words):
        return []
    folder = next((source["path"] for source in _sources(record) if source["provider"] == "command-line"), None)
    return [] if folder is None else ["--config-dir", folder]
