"""Two processes that mean one folder: one of them trains, the other is refused in a line before it has written
anything.
"""

import random
import re
import signal
import time
from functools import partial

import pytest
from runs import SMALL, metrics_of, printed, run_in_child, start_in_child, weights_of

WORDS = (*SMALL, "model.tiny.warm_start_steps=0", "checkpoint.save_interval=1")
PAIRS = 2


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """The run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert run_in_child(run, cache, *WORDS) == 0, printed(run)
    return run


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed else []) for seed in range(PAIRS)]
)
def test_of_two_that_start_at_once_one_trains(seed, alone, cache, tmp_path):
    """Both resume a run that was killed, or both are in one new folder."""
    rng, is_new = random.Random(seed), seed == 1
    day = tmp_path / "outputs" / "2026-01-01"
    folders = [day / "00-00-00-000000"] * 2 if is_new else [day / "00-00-00-000000", day / "00-00-00-000001"]
    more = [[], []]
    if not is_new:
        killed = day / "00"
        kill = {("train", 2): partial(signal.raise_signal, signal.SIGKILL)}
        assert run_in_child(killed, cache, *WORDS, mishaps=kill) == -signal.SIGKILL, printed(killed)
        more = [["resume=auto"]] * 2
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
        refused = r"^error: \S+: (process \d+ on \S+ is using \S+|this folder has a run);"
        assert re.search(refused, said, re.MULTILINE), said
    [run] = [path for path in day.iterdir() if (path / "metrics").is_dir()]
    assert metrics_of(run) == metrics_of(alone)
    assert weights_of(run) == weights_of(alone)
