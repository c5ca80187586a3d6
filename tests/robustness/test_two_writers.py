"""Two processes that mean one folder: one of them trains, the other is refused in a line before it has written
anything.
"""

import random
import re
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from children import SMALL, metrics_of, printed, run_command, run_in_child, start_in_child, weights_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "run_grpo.py"
REFUSED = r"^error: {key}: process {pid} on \S+ writes to {folder}; stop it with `kill -INT {pid}`, or start in another"
WORDS = (*SMALL, "model.tiny.warm_start_steps=0", "checkpoint.save_interval=1")
PAIRS = 3
WAITS = "+logger.waits._target_=children.Waits"


def started(pool: ThreadPoolExecutor, folder: Path, *words: str) -> tuple[Future, int]:
    """A command that waits at its second iteration until the file `go` is there; and its process id."""
    command = pool.submit(run_command, folder, SCRIPT, *words, WAITS)
    while not (folder / "waiting").exists():
        assert not command.done(), command.result()
        time.sleep(0.05)
    return command, int((folder / "waiting").read_text())


@contextmanager
def letting_go(folder: Path):
    """At the end, whatever it is, commands that wait there go on."""
    try:
        yield
    finally:
        (folder / "go").touch()


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def assert_refused(done, key: str, pid: int, folder: Path) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert re.match(REFUSED.format(key=re.escape(key), pid=pid, folder=re.escape(str(folder))), line), line


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """The run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert run_in_child(run, cache, *WORDS) == 0, printed(run)
    return run


@pytest.mark.slow
def test_whoever_comes_second_is_refused_and_the_first_ends_as_if_it_were_alone(alone, cache, tmp_path):
    words = (cache, *WORDS)
    with ThreadPoolExecutor() as pool, letting_go(tmp_path):
        first, pid = started(pool, tmp_path, *words)
        [run] = (tmp_path / "outputs").glob("*/*")
        before = content(run)
        for typed in (f"hydra.run.dir={run}", f"resume={run}", f"resume={run}/checkpoints/iter_000"):
            more = [] if typed.startswith("resume") else words
            assert_refused(run_command(tmp_path, SCRIPT, *more, typed, "train.lr=1e-3"), typed, pid, run)
        assert_refused(run_command(tmp_path, SCRIPT, *words, "resume=auto"), "resume=auto", pid, run)
        report = run_command(tmp_path, ROOT / "src" / "offline_grpo" / "report" / "__main__.py", str(run), draws=True)
        assert report.returncode == 0, report.stderr
        for name in ("report.png", "report.html"):
            (run / name).unlink()
        assert content(run) == before
        assert list((tmp_path / "outputs").glob("*/*")) == [run]
        (tmp_path / "go").touch()
        assert first.result().returncode == 0, first.result().stderr
    assert metrics_of(run) == metrics_of(alone)
    assert weights_of(run) == weights_of(alone)
    assert not (run / ".lock").exists()


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(PAIRS)]
)
def test_of_two_that_start_at_once_one_trains(seed, alone, cache, tmp_path):
    """Both in one new folder, or both resume a run that was killed, by its path or with `resume=auto`."""
    rng, kind = random.Random(seed), ("auto", "folder", "path")[seed % 3]
    day = tmp_path / "outputs" / "2026-01-01"
    folders = [day / "00-00-00-000000"] * 2 if kind == "folder" else [day / "00-00-00-000000", day / "00-00-00-000001"]
    more = [[], []]
    if kind != "folder":
        killed = day / "00"
        kill = {("train", 2): partial(signal.raise_signal, signal.SIGKILL)}
        assert run_in_child(killed, cache, *WORDS, mishaps=kill) == -signal.SIGKILL, printed(killed)
        more = [["resume=auto" if kind == "auto" else f"resume={killed}"]] * 2
    processes = []
    for number, (folder, words) in enumerate(zip(folders, more, strict=True)):
        processes.append(start_in_child(folder, cache, *WORDS, *words))
        time.sleep(rng.uniform(0, 0.3) * (1 - number))
    for process in processes:
        process.join(120)
    said = "".join(printed(folder) for folder in dict.fromkeys(folders))
    codes = sorted(process.exitcode for process in processes)
    if codes == [0, 0]:  # the machine was so busy that the second began when the first had ended
        assert "finished: 4 of 4 iterations" in said
    else:
        assert codes == [0, 2], said
        refused = r"^error: \S+: (process \d+ on \S+ writes to \S+|there is a run in this folder);"
        assert re.search(refused, said, re.MULTILINE), said
    [run] = [path for path in day.iterdir() if (path / "metrics").is_dir()]
    assert metrics_of(run) == metrics_of(alone)
    assert weights_of(run) == weights_of(alone)
