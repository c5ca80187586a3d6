"""`python fork_server.py SOCKET PID`: a server that the children in runs.py fork from, until process PID ends. It is
nobody's child, so that tests which look at theirs see none of others, and comes back once the server listens.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from multiprocessing import forkserver


def main(path: str, tests: str) -> None:
    gone = os.pidfd_open(int(tests))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        if os.fork():
            os._exit(0)
        is_needed, end = os.pipe()
        if os.fork() == 0:
            os.close(end)
            forkserver.main(listener.fileno(), is_needed, ["preloaded", "runs"])
    select.select([gone], [], [])


if __name__ == "__main__":
    main(*sys.argv[1:])
