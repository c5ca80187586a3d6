"""Interpreters for vLLM servers on the CPU, in place of `python -m MODULE ARGUMENTS`, that need less time to start one.

    python vllm_python.py fork -m MODULE ARGUMENTS

forks the engine: vLLM would start it as a new interpreter, which imports vLLM once more, half of the server's start.

    python vllm_python.py preload SOCKET PID
    python vllm_python.py ask SOCKET -m MODULE ARGUMENTS
    python vllm_python.py ask SOCKET SCRIPT ARGUMENTS

The first has imported vLLM and forks a server, or another program, for each of the second that asks, until process PID
ends. The second passes signals on, leaves as the server does, and takes it along when killed. For tests that need a
server; those of who ends which process start it as a run does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import time
from typing import NoReturn

from setproctitle import getproctitle, setproctitle

PR_SET_CHILD_SUBREAPER = 36
MAX_REQUEST = 2**20
CLEANERS_TAKE_S = 2.0


def preload(path: str, tests: str) -> None:
    prctl = ctypes.CDLL(None).prctl
    gone = os.pidfd_open(int(tests))  # it ends with the tests, and a server with its client
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(16)
        if os.fork():
            os._exit(0)  # so that it is nobody's child, see fork_server.py
        before = dict(os.environ)
        gc.disable()  # see preloaded.py
        import_vllm()
        gc.freeze()  # else a fork that ends spends seconds on collecting it
        gc.enable()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the keepers ended
        while gone not in select.select([listener, gone], [], [])[0]:
            client, _ = listener.accept()
            if os.fork() == 0:
                break
            client.close()
        else:
            return
    os.close(gone)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keep(client, before)


def import_vllm() -> None:
    """Import what a server on the CPU needs."""
    import vllm.entrypoints.openai.api_server
    import vllm.lora.worker_manager
    import vllm.model_executor.models.llama
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry
    from vllm.utils import system_utils

    registry._run_in_subprocess = lambda look: look()  # at a model's class, where vLLM would import all of itself
    getproctitle()  # it looks for the memory of the title beside the environment, which `have` moves
    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def keep(client: socket.socket, before: dict[str, str]) -> None:
    """Fork a server, pass the client's signals on to it, and its exit code to the client. Only the server returns from
    here.
    """
    message, descriptors, *_ = socket.recv_fds(client, MAX_REQUEST, 3)
    pid = os.fork()
    if pid == 0:
        client.close()
        request = json.loads(message)
        be_in(request["folder"], descriptors)
        have(request["environment"], before)
        run(request["words"])
        return
    os.setpgid(pid, pid)
    for descriptor in descriptors:
        os.close(descriptor)
    server = os.pidfd_open(pid)
    while server not in select.select([server, client], [], [])[0]:
        number = client.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
    end(pid, client)


def end(pid: int, client: socket.socket) -> NoReturn:
    """Say how the server ended, after what it had started has ended too."""
    _, status = os.waitpid(pid, 0)
    number = signal.SIGTERM  # which Python's resource trackers ignore: they delete the semaphores of those that end
    deadline = time.monotonic() + CLEANERS_TAKE_S
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            os.killpg(pid, number if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(0.02)
    with contextlib.suppress(OSError):  # it may have gone
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def be_in(folder: str, descriptors: list[int]) -> None:
    """Have the client's folder and standard files, and a process group."""
    os.setpgid(0, 0)
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)


def have(environment: dict[str, str], before: dict[str, str]) -> None:
    """Have the client's environment; what vLLM reads when it is imported must be the same in both."""
    set_by_import = {name: value for name, value in os.environ.items() if value != before.get(name)}
    os.environ.clear()
    os.environ.update(environment | set_by_import)
    tempfile.tempdir = None
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))


def run(words: list[str]) -> None:
    """What `python WORDS` does."""
    if words[0] != "-m":
        sys.argv, sys.path[0] = words, os.path.dirname(words[0])
        setproctitle(" ".join(["python", *words]))  # by which tests find it
        runpy.run_path(words[0], run_name="__main__")
        return
    _, *sys.argv = words
    if "TESTED_WITH_ROUTES" in os.environ:
        sys.path.append(os.path.dirname(__file__))
        import routed_vllm

        routed_vllm.install()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def fork(words: list[str]) -> None:
    from vllm.utils import system_utils

    system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    run(words)


def ask(path: str, words: list[str]) -> NoReturn:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        code = int(server.recv(16) or 1)
    if code >= 0:
        sys.exit(code)
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    raise AssertionError("the signal ends this process")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fork", *words]:
            fork(words)
        case ["preload", path, tests]:
            preload(path, tests)
        case ["ask", path, *words]:
            ask(path, words)
