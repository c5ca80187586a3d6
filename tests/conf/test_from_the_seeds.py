"""docs/from_the_seeds.md: everything in a column called "Here" exists, and every metric in a column "Metric here" is in
the glossary.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from factories import compose_config
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from offline_grpo.config import compose
from offline_grpo.config.compose import key_of

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "from_the_seeds.md").read_text()


def rows(text: str) -> Iterator[dict[str, str]]:
    """Each row of each table as header -> cell."""
    header: list[str] | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = cells
        elif not set(line) <= set("|-"):
            assert len(cells) == len(header), f"{len(cells)} cells under {len(header)} headings: {line}"
            yield dict(zip(header, cells, strict=True))


def spans(column: str) -> list[str]:
    """The `code` in a column, each once."""
    cells = [row[column] for row in rows(DOCUMENT) if column in row]
    return list(dict.fromkeys(span for cell in cells for span in re.findall(r"`([^`]+)`", cell)))


MODULE = re.compile(r"uv run -m (offline_grpo[.\w]*)")
HERE = [span for span in spans("Here") if not MODULE.match(span)]
KEYS = [span for span in HERE if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", span)]
OVERRIDES = [span for span in HERE if "=" in span]


def overrides_of(span: str) -> dict[str, str]:
    """`uv run run_grpo.py --multirun a=1,2 b=3` -> a=1, b=3 by their keys: of a sweep, its first run."""
    words = [word for word in shlex.split(span.rpartition("run_grpo.py")[2]) if not word.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(words)
    return {
        key_of(w): f"{p.get_key_element()}={next(p.sweep_string_iterator())}" if p.is_sweep_override() else w
        for p, w in zip(parsed, words, strict=True)
    }


def compatible(every_span: list[str]) -> list[list[str]]:
    """The overrides of all spans in few lists, none of which sets a key twice (a preset stands alone): composing takes
    time.
    """
    lists: list[dict[str, str]] = []
    for overrides in map(overrides_of, every_span):
        fits = (k for k in lists if k.keys().isdisjoint(overrides) and "experiment" not in k | overrides)
        if (known := next(fits, None)) is None:
            lists.append(overrides)
        else:
            known.update(overrides)
    return [list(overrides.values()) for overrides in lists]


def test_column_holds_nothing_but_keys_overrides_and_commands():
    known = {*KEYS, *OVERRIDES, "uv sync"}
    assert [span for span in HERE if span not in known and "run_grpo.py" not in span] == []
    assert len(KEYS) >= 1
    assert len(OVERRIDES) > 80
    modules = [match[1] for span in spans("Here") if (match := MODULE.match(span))]
    assert len(modules) > 0
    assert [name for name in modules if find_spec(name) is None] == []


@pytest.mark.slow
def test_keys_exist_and_overrides_compose_and_fit():
    cfg = compose_config()
    assert [
        key for key in KEYS if key.split(".")[-1] not in (OmegaConf.select(cfg, key.rpartition(".")[0]) or cfg)
    ] == []
    for together in compatible(OVERRIDES):
        compose.typed(compose_config(*together))


def test_metrics_are_in_the_glossary():
    glossary = (ROOT / "docs" / "numerics.md").read_text().partition("## Metric glossary")[2]
    known = set(re.findall(r"`([^`]+)`", glossary))
    metrics = [re.sub(r"@\d+", "@k", span) for span in spans("Metric here") if not span.startswith("eval.")]
    assert len(metrics) > 30
    assert [name for name in metrics if name not in known] == []
