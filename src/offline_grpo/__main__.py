"""`python -m offline_grpo [GROUP=OPTION] [KEY=VALUE] ...` trains, as `run_grpo.py` and `offline-grpo` do, which call
`main`.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Handle Ctrl-C, and only then import what takes time. Until `StopSignal` listens, it ends the process in one line
    instead of a traceback.
    """

    def end(number: int, _frame: object) -> None:
        os.write(2, b"\nstopped before the run began; nothing was saved\n")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)

    from offline_grpo.commands import main as command

    command.main()


if __name__ == "__main__":
    main()
