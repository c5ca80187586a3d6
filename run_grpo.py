"""Train a language model with GRPO: `uv run run_grpo.py [GROUP=OPTION] [KEY=VALUE] ...`; `--help` lists groups and
keys.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - uv and pip refuse it too, but not whoever starts this file
    sys.exit(
        f"error: offline-grpo needs Python 3.11, 3.12 or 3.13, and this is {sys.version.split()[0]}; `uv run "
        f"run_grpo.py` brings one"
    )

from offline_grpo.__main__ import main

if __name__ == "__main__":
    main()
