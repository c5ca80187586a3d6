"""Whole runs in this process draw no report, which takes longer than the rest of them. Commands do, and children that
are asked to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from children import draw_nothing
from ray_machines import machines

from offline_grpo.report import plots


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "save_report", draw_nothing)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray, with two machines, for the tests of `ON_RAY`; one that loses a machine adds another."""
    with machines(2) as found:
        yield found
