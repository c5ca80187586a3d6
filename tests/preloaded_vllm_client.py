"""In place of `python` for a vLLM server, which `preloaded_vllm.py` forks: `python preloaded_vllm_client.py SOCKET -m
MODULE ARGUMENTS`.

Passes signals on, leaves as the server does, and takes it along when killed.
"""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(sys.argv[1])
    request = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    code = int(server.recv(16) or 1)
if code >= 0:
    sys.exit(code)
if -code != signal.SIGKILL:
    signal.signal(-code, signal.SIG_DFL)
os.kill(os.getpid(), -code)
