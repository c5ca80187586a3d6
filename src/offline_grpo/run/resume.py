"""`resume=PATH` starts from that run's own configuration, not from the defaults: what is typed now is applied on top of
it.

Before Hydra reads the command line, `arguments` puts the run's own overrides in front of the typed ones, so that groups
are chosen as they were. Then `own_configuration` takes the configuration that the run stored, and changes only what the
typed overrides change. So a run goes on with what it had, also where `conf/` is another one today. This module imports
no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from offline_grpo.checkpoint.files import latest_checkpoint
from offline_grpo.errors import ConfigError
from offline_grpo.report.run_files import read_yaml
from offline_grpo.run import launch, sweep_resume
from offline_grpo.run.config import key_of
from offline_grpo.run.run_dir import no_checkpoint

OVERRIDE = re.compile(r"~|\+*[^-=]+=")
"""How a word of the command line begins that is an override and not an option."""
FIXED_GROUPS = ("model", "model/lora", "task", "rollouts", "train/optimizer")
KeyPath = tuple[str, ...]

_typed: list[str] = []  # the overrides of this start, once `arguments` has put those of the run before them


def run_folder(resume: str) -> Path | None:
    """The folder of the run that `resume=PATH` names, by itself or by one of its checkpoints; None if there is no
    checkpoint.
    """
    path = Path(resume).expanduser().resolve()
    if (path / "trainer").is_dir():
        return path.parent.parent
    return path if latest_checkpoint(path / "checkpoints") is not None else None


def arguments(words: Sequence[str]) -> list[str]:
    """The command line with what it needs of the run that `resume=PATH` names; any other one as it is."""
    words = sorted(
        map(_readable, words), key=lambda word: word not in ("-m", "--multirun")
    )  # first: argparse needs all overrides in one place
    place = next((i for i, word in enumerate(words) if OVERRIDE.match(word)), len(words))
    options, typed = [*words[:place]], [*words[place:]]
    named = next((str(value) for key, value in map(_parsed, typed) if key == "resume" and value is not None), None)
    is_sweep = bool({"-m", "--multirun"} & set(words))
    sweep = sweep_resume.sweep_folder(named) if named not in (None, "auto") else None
    if named == "auto" and is_sweep:
        sweep = sweep_resume.newest_alike([word for word in typed if OVERRIDE.match(word)])
    if sweep is not None:
        return _of_sweep(sweep, words, is_named=named != "auto")
    run = run_folder(named) if named not in (None, "auto") else None
    if run is None:
        if (
            named not in (None, "auto") and not is_sweep and not Path(named).name.startswith("iter_")
        ):  # a damaged one is told in full later
            raise no_checkpoint(named)
        return list(words)
    if is_sweep:
        fix = f"start new runs from its weights: model=hf model.train_id={latest_checkpoint(run / 'checkpoints')}"
        raise ConfigError(
            f"resume={named}: goes on with one run, whose folder all jobs of --multirun would share; leave it out, or {fix}"
        )
    _typed[:] = [word for word in typed if OVERRIDE.match(word)]
    _refuse_other_groups(run)
    own = own_overrides(run)
    options += _config_dir(_hydra_record(run), words)
    return [*options, *_without(own, _typed), *typed, f"hydra.run.dir={quoted(run)}", "hydra.output_subdir=null"]


def _of_sweep(sweep: Path, words: Sequence[str], *, is_named: bool) -> list[str]:
    """The command line that goes on with a sweep: each of its jobs finds its own folder.

    Args:
        is_named: by `resume=FOLDER`; with `resume=auto`, what is typed is what the sweep was started with.
    """
    typed = [word for word in words if OVERRIDE.match(word)]
    options = [word for word in words if not OVERRIDE.match(word)]
    if not {"-m", "--multirun"} & set(options):
        options.append("--multirun")
    own = sweep_resume.overrides(sweep, typed)
    options += _config_dir(read_yaml(sweep / "multirun.yaml")["hydra"], words)
    if launch.is_main():
        print(f"going on with the sweep in {sweep}; leave resume out to start another one", flush=True)
    keys = ",".join(key for word in typed if (key := key_of(word)) not in sweep_resume.OF_ONE_START) if is_named else ""
    told = [f"+hydra.job.env_set.{sweep_resume.TYPED}={quoted(keys)}"] if keys else []
    return [*options, *own, *told, "resume=auto", f"hydra.sweep.dir={quoted(sweep)}"]


def _refuse_other_groups(run: Path) -> None:
    """Before Hydra composes, because the run's overrides need not fit another model or task."""
    choices = _hydra_record(run).get("runtime", {}).get("choices", {})
    for word in _typed:
        group, _, choice = word.partition("=")
        if group in FIXED_GROUPS and choice != choices.get(group, choice):
            raise ConfigError(
                f"{word}: the run that goes on has {group}={choices[group]}, which it cannot change; leave {group} out, or start a new run "
                f"from its weights: model=hf model.train_id={latest_checkpoint(run / 'checkpoints')} without resume"
            )


def typed_keys() -> set[str]:
    """What the command line sets by itself in a start with `resume=PATH`: keys, or groups as `train/loss`."""
    return {key_of(word) for word in _typed}


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


def own_configuration(cfg: DictConfig) -> DictConfig:
    """The configuration that the run to go on with has stored, with what the command line changes; `cfg` for any other
    start.

    Args:
        cfg: composed today, from the run's overrides and the typed ones.
    """
    run = run_folder(cfg.resume) if cfg.resume not in (None, "auto") else None
    stored_in = run / ".hydra" / "config.yaml" if run is not None else None
    if run is None or stored_in is None or not stored_in.exists():
        return cfg
    stored = read_yaml(stored_in)
    now = _plain(cfg)
    before = _plain(hydra.compose("config", overrides=_without(own_overrides(run), ["resume="]))) if _typed else now
    return OmegaConf.create(merged(stored, before, now, typed_keys()))


def merged(
    stored: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any], typed: set[str]
) -> dict[str, Any]:
    """`stored`, changed as `before` became `now`, and with what was typed; a component that became another one is taken
    as a whole.

    What `stored` lacks, because it is new, comes from `now`.
    """
    old, new, own = dict(_leaves(before)), dict(_leaves(now)), dict(_leaves(stored))
    changed = [path for path in {**old, **new} if old.get(path, _ABSENT) != new.get(path, _ABSENT)]
    parents = [path[:-1] for path in changed if path[-1] == "_target_"]
    named = [tuple(re.split("[./]", key)) for key in typed]
    missing = [path for path in new if path not in own and _get(stored, path) is _ABSENT]
    for path in sorted(
        {*missing, *changed, *parents, *(path for path in named if _get(now, path) is not _ABSENT)},
        key=len,
        reverse=True,
    ):
        _put(stored, path, _get(now, path))
    return stored


def quoted(path: Path | str) -> str:
    """A path, or any other text, as the value of an override: bare where Hydra reads that as the same text, which
    `true` is not.
    """
    text = str(path)
    is_plain = re.fullmatch(r"[\w/.:+@%-]+", text, re.ASCII) is not None
    if is_plain and OverridesParser.create().parse_override(f"key={text}").value() == text:
        return text
    return QuotedString(text, Quote.single).with_quotes()


_ABSENT: Any = object()


def _leaves(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if not isinstance(node, Mapping) or not node:
        yield path, node
        return
    for name, child in node.items():
        yield from _leaves(child, (*path, str(name)))


def _get(node: Any, path: KeyPath) -> Any:
    for name in path:
        if not isinstance(node, Mapping) or name not in node:
            return _ABSENT
        node = node[name]
    return node


def _put(node: dict[str, Any], path: KeyPath, value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    if value is _ABSENT:
        node.pop(path[-1], None)
    else:
        node[path[-1]] = value


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """Nested dicts with their interpolations."""
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def _readable(word: str) -> str:
    """`resume=PATH` as Hydra reads it, which needs quotes around letters beyond ASCII; any other word as it is."""
    key, _, path = word.partition("=")
    try:
        if key == "resume":
            OverridesParser.create().parse_override(word)
    except HydraException:
        return f"resume={quoted(path)}"
    return word


def _parsed(word: str) -> tuple[str, Any]:
    """Key and value of an override; a word that is none has no key."""
    if not word.startswith("resume="):
        return "", None
    return "resume", OverridesParser.create().parse_override(word).value()


def _without(own: Sequence[str], typed: Sequence[str]) -> list[str]:
    """`own` without what is typed again: Hydra takes each addition and each choice of a group once."""
    again = {word.partition("=")[0] for word in typed}
    return [word for word in own if word.partition("=")[0] not in again]


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
