"""The pages for people: links lead somewhere, tables are tables, and what a page types exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
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
            if "run_grpo.py" in line and "--config-dir" not in line
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for place, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page)):
        if place.startswith(("http:", "https:")):
            continue
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), place
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{place}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_tables(page: Path) -> None:
    for is_table, lines in groupby(prose(page).splitlines(), lambda line: line.startswith("|")):
        rows = list(lines) if is_table else []
        assert not rows or re.fullmatch(r"\|[\s:|-]+\|", rows[1]), rows[0]
        assert {columns(row) for row in rows} <= {columns(row) for row in rows[:1]}, rows[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_choose_options_that_are_there(page: Path) -> None:
    for command in commands(page):
        for group, option in re.findall(r"(?<=[\s'])([a-z_/]+)=([a-z0-9_]+)(?=[\s',]|$)", command):
            folder = CONF / group
            assert not folder.is_dir() or (folder / f"{option}.yaml").exists() or group.startswith("hydra/"), (
                f"{group}={option}: {command}"
            )
