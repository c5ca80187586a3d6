"""benchmarks/picture.py: every bar has its number in the results, and the README shows what it draws."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_every_bar_of_the_picture_was_measured() -> None:
    found: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "picture.py"))
    values = {(panel.title, bar.name): bar.value for panel in found["PANELS"] for bar in panel.bars}
    assert len(values) == 16
    assert min(values.values()) > 0
    picture = found["IMAGES"] / "h100.png"
    assert picture.is_file()
    assert str(picture.relative_to(ROOT)) in (ROOT / "README.md").read_text()
