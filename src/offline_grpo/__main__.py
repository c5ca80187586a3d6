"""`python -m offline_grpo [GROUP=OPTION] [KEY=VALUE] ...` trains, as `run_grpo.py` does."""

from __future__ import annotations

from offline_grpo.run.main import main

if __name__ == "__main__":
    main()
