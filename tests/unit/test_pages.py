"""The pages for people: links lead somewhere, tables are tables, and what a page types exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from factories import CONF

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


def prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def columns(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row))) - 1


def commands(page: Path) -> Iterator[str]:
    """Those that train with the options of this repository, each on one line."""
    for block in re.findall(r"^```(?:bash|sh)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from (
            line
            for line in block.replace("\\\n", " ").splitlines()
            if re.search(r"run_grpo\.py|^offline-grpo ", line) and "--config-dir" not in line
        )


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for place, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
            if not place.startswith(("http:", "https:")):
                target = (page.parent / place).resolve() if place else page
                is_there = target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))
                assert is_there, f"{page.name}: {place}#{anchor}"


def test_tables_are_tables() -> None:
    for page in PAGES:
        for is_table, lines in groupby(prose(page).splitlines(), lambda line: line.startswith("|")):
            rows = list(lines) if is_table else []
            assert not rows or re.fullmatch(r"\|[\s:|-]+\|", rows[1]), f"{page.name}: {rows[0]}"
            assert {columns(row) for row in rows} <= {columns(row) for row in rows[:1]}, f"{page.name}: {rows[0]}"


def test_commands_choose_options_that_are_there() -> None:
    for page in PAGES:
        for command in commands(page):
            for group, option in re.findall(r"(?<=[\s'])([a-z_/]+)=([a-z0-9_]+)(?=[\s',]|$)", command):
                folder = CONF / group
                is_there = not folder.is_dir() or (folder / f"{option}.yaml").exists() or group.startswith("hydra/")
                assert is_there, f"{page.name}: {group}={option}: {command}"


def test_what_pages_import_is_public() -> None:
    """docs/api.md has the module, or the name."""
    public = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    for page in PAGES:
        for module, names in re.findall(r"^ *from (offline_grpo[.\w]*) import (.*)$", page.read_text(), re.MULTILINE):
            for name in names.split(", "):
                assert {module, f"{module}.{name}"} & public, f"{page.name}: from {module} import {name}"


def test_every_command_is_promised() -> None:
    source = ROOT / "src" / "offline_grpo"
    files = [path for path in source.rglob("*.py") if 'if __name__ == "__main__"' in path.read_text()]
    names = {path.relative_to(source).with_suffix("").as_posix().replace("/", ".") for path in files}
    by_others = {"__main__", "history.ray_trainers", "engine.inside_vllm.offline_grpo_server"}
    names = {name.removesuffix(".__main__") for name in names - by_others}
    [row] = re.findall(r"^\| Commands \|.*$", (ROOT / "docs" / "stability.md").read_text(), re.MULTILINE)
    assert {f"`{name}`" for name in names} <= set(re.findall(r"`[^`]+`", row))
