"""The text of `--help`: every group, option and key of `conf/`, explained by the comments in the files themselves; and
which key somebody may have meant who typed one that does not exist.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra._internal.utils import get_args_parser

from offline_grpo.config.compose import defaults, folder, folders, groups, key_of
from offline_grpo.errors import ConfigError
from offline_grpo.installed import module_command, run_command

WIDTH = 80
UNEXPLAINED = ("defaults", "hydra", "_target_")
NOT_SERVED = {
    "modules_to_save": "no server loads an adapter with whole modules; adapt more layers by model.lora.target_modules",
    "use_dora": "vLLM serves no DoRA; use plain LoRA, or model.lora.use_rslora=true",
}
"""What adapters of other trainers may have -> why ours cannot."""

OF_OTHERS = "docs/from_the_seeds.md has the keys of other trainers"
USAGE = f"""\
Train a language model with GRPO on problems whose answers a program can check.

  {run_command()} [GROUP=OPTION] [KEY=VALUE] ...
  {run_command()} --help GROUP-OR-KEY ...    only these, such as train.lr
  {run_command()} --cfg job [OVERRIDE] ...   print the configuration
  {run_command()} --multirun KEY=A,B ...     a run for each value
  {run_command()} --hydra-help               Hydra's own options
  {module_command("play")} [OVERRIDE] ...    play one problem, or type it
  {module_command("score")} [OVERRIDE] ... TEXT   the reward of a text

A list is [A,B]. Quote what the shell would change: 'eval.ks=[1,4]'.
"""


@dataclass(frozen=True)
class Key:
    """A key of a file: dotted name, value as written, and the comment above it, which neighbours of one kind share."""

    name: str
    value: str
    comment: str


def help_text(places: Sequence[Path], wanted: Sequence[str] = ()) -> str:
    """The text, in lines of at most 80 columns. Raises ConfigError where nothing is called as in `wanted`.

    Args:
        places: folders of options, first `conf/`.
        wanted: groups, or beginnings of keys, to explain alone; all if empty.
    """

    def is_wanted(name: str) -> bool:
        return not wanted or any(name == word or name.startswith((f"{word}.", f"{word}/")) for word in wanted)

    lines = _section("Keys at the top", [key for key in keys(places[0] / "config.yaml", "") if is_wanted(key.name)])
    chosen, names = defaults(places[0]), list[str]()
    for group, options in groups(places).items():
        # Its options in a line, then each with the keys that none before it has: first the default, then those that
        # include no others.
        text = ", ".join(f"{option}*" if option in chosen.get(group, []) else option for option in options)
        names += textwrap.wrap(text, WIDTH, initial_indent=f"  {group:<16} ", subsequent_indent=" " * 19)
        texts = {option: (place / group / f"{option}.yaml").read_text() for option, place in options.items()}
        order = [(name not in chosen.get(group, []), "defaults:" in text, name) for name, text in texts.items()]
        explained: set[Key] = set()
        for *_, option in sorted(order):
            found = all_keys(places, group, option)
            new = [key for key in found if key not in explained and (is_wanted(key.name) or is_wanted(group))]
            explained |= set(new)
            if new or is_wanted(group):
                # What is said of the option: the first comment of its file, unless it is that of its first key.
                written = [line for line in texts[option].splitlines() if not line.startswith("# @package")]
                end = next((i for i, line in enumerate(written) if not line.startswith("#")), len(written))
                is_of_key = end < len(written) and re.match(r"(?!defaults|_target_)\w+: ", written[end])
                about = "" if is_of_key else " ".join(line.lstrip("# ") for line in written[:end])
                lines += _section(f"{group}={option}", new, about)
    if not lines:
        raise ConfigError(f"--help={no_such_key(wanted[0])}")
    head = [USAGE, "Groups and their options (* is the default)", *names, ""]
    return "\n".join(lines if wanted else [*head, *lines])


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


def all_keys(places: Sequence[Path], group: str, option: str) -> list[Key]:
    """The keys of an option's file, after those of the files of its group that it includes."""
    path = next(path for place in places if (path := place / group / f"{option}.yaml").is_file())
    entries = [e for e in yaml.safe_load(path.read_text()).get("defaults", []) if isinstance(e, str) and e[0] != "/"]
    included = [key for entry in entries if entry != "_self_" for key in all_keys(places, group, entry)]
    return included + keys(path, prefix_of(group))


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


# What somebody may have meant.


def of_other_trainers() -> dict[str, str]:
    """A key of another trainer, or the end of one -> the key or the group that does the same here."""
    names = yaml.safe_load(Path(__file__).with_name("of_other_trainers.yaml").read_text())
    return {name: key for key, others in names.items() for name in others.split()}


def known_keys() -> dict[str, list[str]]:
    """Every group, and every key that a file of `conf/` explains -> the options that have it, but for presets."""
    places = folders()
    found: dict[str, list[str]] = {key.name: [] for key in keys(places[0] / "config.yaml", "")}
    for group, options in groups(places).items():
        found.setdefault(group, [])
        for option in options:
            for key in all_keys(places, group, option):
                found.setdefault(key.name, []).extend([f"{group}={option}"] if group != "experiment" else [])
    return found


def empty_group(key: str, words: Sequence[str]) -> str | None:
    """The hint about a setting below a group of which neither the defaults nor the command line choose an option; None
    for any other.
    """
    typed = {*map(key_of, words)}
    chosen = {*defaults(folder()), *typed, *(["engine"] if "generation" in typed else [])}  # which chooses it
    for group, options in groups(folders(words)).items():
        if group not in chosen and group != "experiment" and key.startswith(prefix_of(group)):
            return f"{key}: {group} is empty here; add {' or '.join(f'{group}={option}' for option in options)}"
    return None


def check_options(words: Sequence[str]) -> None:
    """Raise ConfigError for an option that Hydra does not have, such as `--learning_rate`."""
    for word in get_args_parser().parse_known_args(list(words))[1]:
        key = word.lstrip("-").partition("=")[0].replace("-", "_")
        if meant := difflib.get_close_matches(
            word, ("--multirun", "--config-dir", "--help", "--cfg"), n=1, cutoff=0.75
        ):
            raise ConfigError(f"{word}: no such option; did you mean {meant[0]}?")
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
        (group for group, options in groups(folders()).items() if key in map(prefix_of(group).__add__, options)), None
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
