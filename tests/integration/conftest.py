"""Whole runs in this process draw no report, which takes longer than the rest of them. Commands do, and children that
are asked to.
"""

import pytest
from children import draw_nothing

from offline_grpo.report import plots


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "save_report", draw_nothing)
