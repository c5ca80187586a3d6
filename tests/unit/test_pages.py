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
