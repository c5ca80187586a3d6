"""`python -m offline_grpo [GROUP=OPTION] [KEY=VALUE] ...` trains, as `run_grpo.py` and `offline-grpo` do, which call
`main`.
"""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Handle Ctrl-C, and only then import what takes time."""
    from offline_grpo.history.signals import end_at_once

    end_at_once()
    from offline_grpo.commands import main as command

    command.main()


if __name__ == "__main__":
    main()
