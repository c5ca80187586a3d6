"""benchmarks/scaling_model.py: its check against the measurement holds, and docs/scaling.md has the table that it
prints.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_documented_table_is_the_models() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling_model.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) == 8
    assert "\n".join(rows) in (ROOT / "docs" / "scaling.md").read_text()
