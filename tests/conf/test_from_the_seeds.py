"""docs/from_the_seeds.md: everything in a column called "Here" exists, and every metric in a column "Metric here" is in
the glossary.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from offline_grpo.run import config
from offline_grpo.run.build import check_settings, resolve
from offline_grpo.run.engine_spec import CLIENT_RUNTIME
from offline_grpo.types import SamplingParams

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "from_the_seeds.md").read_text()
SPLIT_OFF = {*SamplingParams.__dataclass_fields__, "allow_truncated_sampling", "base_url", "api_key"}  # by run/plan.py


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


def overrides_of(span: str) -> list[str]:
    """`uv run run_grpo.py --multirun a=1,2 b=3` -> a=1, b=3: of a sweep, its first run."""
    _, _, arguments = span.rpartition("run_grpo.py")
    words = [word for word in shlex.split(arguments) if not word.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(words)
    return [
        f"{p.get_key_element()}={next(p.sweep_string_iterator())}" if p.is_sweep_override() else w
        for p, w in zip(parsed, words, strict=True)
    ]


def compatible(every_span: list[str]) -> list[list[str]]:
    """The overrides of all spans in few lists, none of which sets a key twice (a preset stands alone): composing takes
    time.
    """
    lists: list[dict[str, str]] = []
    for span in every_span:
        overrides = {override.partition("=")[0]: override for override in overrides_of(span)}
        for known in lists:
            if known.keys().isdisjoint(overrides) and "experiment" not in known | overrides:
                known.update(overrides)
                break
        else:
            lists.append(overrides)
    return [list(overrides.values()) for overrides in lists]


@pytest.fixture(scope="module")
def hydra() -> Iterator[None]:
    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def check_components(cfg: DictConfig) -> None:
    """The settings of every `_target_` node fit its constructor's signature."""
    nodes: dict[str, Any] = {
        key: OmegaConf.select(cfg, key)
        for key in ("task", "generation", "weight_sync", "train.loss", "train.optimizer")
    }
    if cfg.engine is not None:
        nodes["engine"] = cfg.engine
    for name, node in (cfg.logger or {}).items():
        nodes[f"logger.{name}"] = node
    for key, node in nodes.items():
        plain = config.as_plain(node)
        settings = {k: v for k, v in plain.items() if k != "_target_" and not (key == "generation" and k in SPLIT_OFF)}
        check_settings(
            resolve(plain, key), settings, key, given_at_runtime=dict.fromkeys((*CLIENT_RUNTIME, "output_dir"))
        )


def test_column_holds_nothing_but_keys_overrides_and_commands():
    others = [
        span
        for span in HERE
        if span not in KEYS and span not in OVERRIDES and "run_grpo.py" not in span and span != "uv sync"
    ]

    assert others == []
    assert len(KEYS) >= 4
    assert len(OVERRIDES) > 80


def test_modules_that_are_commands_exist():
    found = [match[1] for span in spans("Here") if (match := MODULE.match(span))]

    assert len(found) > 0
    assert [name for name in found if find_spec(name) is None] == []


def test_keys_exist(hydra):
    cfg = compose("config")

    missing = [
        key
        for key in KEYS
        if OmegaConf.is_missing(cfg, key) or key.split(".")[-1] not in OmegaConf.select(cfg, key.rpartition(".")[0])
    ]

    assert missing == []


def test_overrides_compose_and_fit(hydra):
    for together in compatible(OVERRIDES):
        cfg = compose("config", together)
        config.typed(cfg)
        check_components(cfg)


def test_metrics_are_in_the_glossary():
    glossary = (ROOT / "docs" / "numerics.md").read_text().partition("## Metric glossary")[2]
    known = set(re.findall(r"`([^`]+)`", glossary))

    metrics = [re.sub(r"@\d+", "@k", span) for span in spans("Metric here") if not span.startswith("eval.")]

    assert len(metrics) > 30
    assert [name for name in metrics if name not in known] == []
