"""Two processes that mean one folder: one of them trains, the other is refused in a line before it has written anything."""

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from children import SMALL, metrics_of, printed, run_command, run_in_child, weights_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "run_grpo.py"
REFUSED = (
    r"^error: {key}: process {pid} writes to {folder} \(since .*, {done}: \d\); stop it with `kill -INT {pid}`, or start in another folder$"
)
WAITS = "+logger.waits._target_=children.Waits"


def started(pool: ThreadPoolExecutor, folder: Path, *words: str) -> tuple[Future, int]:
    """A command that waits at its second iteration until the file `go` is there; and its process id."""
    command = pool.submit(run_command, folder, SCRIPT, *words, WAITS)
    while not (folder / "waiting").exists():
        assert not command.done(), command.result()
        time.sleep(0.05)
    return command, int((folder / "waiting").read_text())


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def assert_refused(done, key: str, pid: int, folder: Path, what: str = "iterations recorded") -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert re.match(REFUSED.format(key=re.escape(key), pid=pid, folder=re.escape(str(folder)), done=what), line), line


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return f"cache_dir={tmp_path_factory.mktemp('cache')}"


def test_whoever_comes_second_is_refused_and_the_first_ends_as_if_it_were_alone(cache, tmp_path):
    words = (cache, *SMALL, "checkpoint.save_interval=1")
    alone = tmp_path / "alone"
    assert run_in_child(alone, *words) == 0, printed(alone)
    with ThreadPoolExecutor() as pool:
        first, pid = started(pool, tmp_path, *words)
        [run] = (tmp_path / "outputs").glob("*/*")
        before = content(run)
        for typed in (f"hydra.run.dir={run}", f"resume={run}", f"resume={run}/checkpoints/iter_000"):
            more = [] if typed.startswith("resume") else words
            assert_refused(run_command(tmp_path, SCRIPT, *more, typed, "train.lr=1e-3"), typed, pid, run)
        assert_refused(run_command(tmp_path, SCRIPT, *words, "resume=auto"), "resume=auto", pid, run)
        report = run_command(tmp_path, ROOT / "src" / "offline_grpo" / "report" / "__main__.py", str(run))
        assert report.returncode == 0, report.stderr
        (run / "report.png").unlink()
        assert content(run) == before
        assert list((tmp_path / "outputs").glob("*/*")) == [run]
        (tmp_path / "go").touch()
        assert first.result().returncode == 0, first.result().stderr
    assert metrics_of(run) == metrics_of(alone)
    assert weights_of(run) == weights_of(alone)
    assert not (run / ".lock").exists()
