"""Smoke test: one small iteration of the whole pipeline in under a minute, without server, GPU or download. Prints the
recorded metrics.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from offline_grpo.config import compose


def main() -> None:
    """Train for one iteration in a temporary folder, evaluate, and print the metrics of both."""
    from offline_grpo.run import train

    compose.register()
    with tempfile.TemporaryDirectory() as folder:
        cfg = compose.composed(["experiment=smoke", f"cache_dir={folder}/cache"])
        run_dir = Path(folder) / "run"
        train(cfg, run_dir)
        for title, file in (("Train metrics", "train_iter_000.json"), ("Eval metrics", "eval_iter_000.json")):
            metrics = json.loads((run_dir / "metrics" / file).read_text())
            print(f"{title}: { {name: round(value, 4) for name, value in metrics.items()} }")


if __name__ == "__main__":
    main()
