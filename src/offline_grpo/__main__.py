"""`python -m offline_grpo [GROUP=OPTION] [KEY=VALUE] ...` trains, as `run_grpo.py` and `offline-grpo` do, which call
`main`.
"""

from __future__ import annotations

import atexit
import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command that trains. Until its `StopSignal` listens, Ctrl-C ends the process with one line instead of a
    traceback; so the handler is set first, and the imports that take time come after it.
    """
    exit_code = 1

    def end_at_once() -> None:
        print(end="", flush=True)
        os._exit(exit_code)

    # Registered first, so called last at exit. After torch Python would take its modules apart for seconds;
    # `gc.freeze()` would save these too, but makes nanobind report Triton's functions as leaks.
    atexit.register(end_at_once)

    def end(number: int, _frame: object) -> None:
        os.write(2, b"\nstopped before the run began; nothing was saved\n")
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)

    from offline_grpo.commands import main as command

    try:
        command.main()
    except SystemExit as ended:
        exit_code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise


if __name__ == "__main__":
    main()
