"""The text of `--help`: every group, option and key of `conf/`, explained by the comments in the files themselves."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from offline_grpo.errors import require

WIDTH = 80
UNEXPLAINED = ("defaults", "hydra", "_target_")
USAGE = """\
Train a language model with GRPO on problems whose answers a program can check.

  uv run run_grpo.py [GROUP=OPTION] [KEY=VALUE] ...
  uv run run_grpo.py --help GROUP-OR-KEY ...    only these, such as train.lr
  uv run run_grpo.py --cfg job [OVERRIDE] ...   print the configuration
  uv run run_grpo.py --multirun KEY=A,B ...     a run for each value
  uv run run_grpo.py --hydra-help               Hydra's own options

A list is [A,B]. Quote what the shell would change: 'eval.ks=[1,4]'.
"""


@dataclass(frozen=True)
class Key:
    """A key of a file: dotted name, value as written, and the comment above it, which neighbours of one kind share."""

    name: str
    value: str
    comment: str


def help_text(conf: Path, wanted: Sequence[str] = ()) -> str:
    """The text, in lines of at most 80 columns. Raises ConfigError where nothing is called as in `wanted`.

    Args:
        wanted: groups, or beginnings of keys, to explain alone; all if empty.
    """

    def is_wanted(name: str) -> bool:
        return not wanted or any(name == word or name.startswith((f"{word}.", f"{word}/")) for word in wanted)

    lines = _section("Keys at the top", [key for key in keys(conf / "config.yaml", "") if is_wanted(key.name)])
    chosen = defaults(conf)
    for group, options in groups(conf).items():
        explained: set[Key] = set()

        def comes_later(option: str, group: str = group) -> tuple[bool, bool]:
            includes_others = "defaults:" in (conf / group / f"{option}.yaml").read_text()
            return option not in chosen.get(group, []), includes_others

        for option in sorted(options, key=comes_later):
            path = conf / group / f"{option}.yaml"
            found = [key for key in all_keys(path, prefix_of(group)) if is_wanted(key.name) or is_wanted(group)]
            new = [key for key in found if key not in explained]
            explained |= set(new)
            if new or is_wanted(group):
                lines += _section(f"{group}={option}", new, about=_about(path))
    require(bool(lines), "--help", " ".join(wanted), "nothing is called so; --help alone lists all")
    return "\n".join(lines if wanted else [USAGE, *_groups(conf), "", *lines])


def _groups(conf: Path) -> Iterator[str]:
    yield "Groups and their options (* is the default)"
    for group, options in groups(conf).items():
        names = ", ".join(f"{option}*" if option in defaults(conf).get(group, []) else option for option in options)
        yield from textwrap.wrap(names, WIDTH, initial_indent=f"  {group:<16} ", subsequent_indent=" " * 19)


def groups(conf: Path) -> dict[str, list[str]]:
    """Group -> its options, without those whose name begins with _, which others include."""
    found: dict[str, list[str]] = {}
    for path in sorted(conf.rglob("*.yaml")):
        group = path.parent.relative_to(conf).as_posix()
        if not path.stem.startswith("_") and group not in (".", "local"):
            found.setdefault(group, []).append(path.stem)
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


def prefix_of(group: str) -> str:
    """The beginning of the keys of a group's options: `train.loss.` of train/loss, "" of presets for everything."""
    return "" if group == "experiment" else group.replace("/", ".") + "."


def _section(title: str, found: Sequence[Key], about: str = "") -> list[str]:
    if not found and not about:
        return []
    lines = [title, *textwrap.wrap(about, WIDTH, initial_indent="  ", subsequent_indent="  ")]
    for key in found:
        line = f"  {key.name}={key.value}" if key.value else f"  {key.name}"
        lines.append(line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ...")
        lines += textwrap.wrap(key.comment, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return [*lines, ""]


def all_keys(path: Path, prefix: str) -> list[Key]:
    """The keys of a file, after those of the files of its group that it includes."""
    entries = [e for e in yaml.safe_load(path.read_text()).get("defaults", []) if isinstance(e, str) and e[0] != "/"]
    included = [path.with_name(f"{entry}.yaml") for entry in entries if entry != "_self_"]
    return [key for file in included for key in all_keys(file, prefix)] + keys(path, prefix)


def keys(path: Path, prefix: str) -> list[Key]:
    """The keys that a file itself explains, in its order."""
    found: list[Key] = []
    comment: list[str] = []
    above: list[tuple[int, str]] = []  # indentation and name of the keys that the line is inside of
    for line in path.read_text().splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        match = re.match(r"([A-Za-z_]\w*):(?: (.*))?$", text)
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
        elif not text:
            comment = []
        elif match is not None:
            above = [(depth, name) for depth, name in above if depth < indent] + [(indent, match[1])]
            names = [name for _, name in above]
            value = re.sub(r"\s+#.*", "", match[2] or "")
            if not set(names) & set(UNEXPLAINED) and (value or comment):
                found.append(Key(prefix + ".".join(names), value, " ".join(comment)))
            comment = []
    return found


def _about(path: Path) -> str:
    """The first comment of an option's file, unless it is that of its first key."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    is_of_key = end < len(lines) and re.match(r"(?!defaults|_target_)\w+: ", lines[end])
    return "" if is_of_key else " ".join(line.lstrip("# ") for line in lines[:end])
