"""Fixtures that many tests share; the models behind them are made in factories.py."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # with xdist one process only hands out the tests: it needs no torch
    from transformers import PreTrainedModel

    from offline_grpo.types import TokenBatch

ONE_SERVER = "tests/contract/"
"""Tests that share a server, and so a process; but for those of the next line, which start servers of their own."""
OF_THEIR_OWN = tuple(
    f"{ONE_SERVER}test_{name}.py"
    for name in ("smollm2", "restarted_models", "served_architectures", "served_composites")
)
ON_RAY = tuple(f"tests/integration/test_{name}.py" for name in ("ray", "ray_trainers", "scoring_on_cluster"))
"""Tests that share a cluster."""
LONGEST_FIRST = (
    ONE_SERVER,
    *ON_RAY,
    "tests/integration/test_server_deaths.py",
    "tests/robustness/test_leftovers.py",
    "tests/unit/model/test_tiny.py",  # one of its tests takes a minute, which is much at the end
    "tests/integration/",
    "tests/conf/",
    "",
)


CACHE, TESTS = "OFFLINE_GRPO_TESTS_CACHE", "OFFLINE_GRPO_TESTS_PROCESS"
"""The folder, and the process, that all workers share."""

# Here, because what the next conftest.py imports reads them when it is imported. No test downloads anything.
os.environ["HF_HUB_OFFLINE"] = "1"
# The tensors are small: a second thread, here or in a process that a test starts, would take a core from another worker
# to wait on it. One test needs two. They sleep while they wait: spinning, they would take both cores from other tests.
os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")


def pytest_configure(config: pytest.Config) -> None:
    """With xdist, files are handed out in this order; by number of tests, long ones of few tests would come last."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    # Without compiled files every process that a test starts would compile torch or vLLM again, which takes longer than
    # the test.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Ray gives its processes the lowest priority but a few: beside other tests they would wait for minutes.
    os.environ.update(RAY_worker_niceness="0", RAY_USAGE_STATS_ENABLED="0")
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell does that to what it starts with `&`, and programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # else half of the time of the collection goes into looking for garbage among the modules, of which there is none
    gc.disable()
    if CACHE not in os.environ:  # else this is a worker
        os.environ[CACHE] = tempfile.mkdtemp(prefix="offline_grpo_tests_")
        os.environ[TESTS] = str(os.getpid())
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Folders in the order of `LONGEST_FIRST`, so that no worker is left with a long one at the end.

    Tests of GPUs are for `-m gpu`, slow or not.
    """
    if "gpu" not in config.option.markexpr:
        for_gpus = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=for_gpus)
        items[:] = [item for item in items if item not in for_gpus]
    items.sort(key=lambda item: next(i for i, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start)))


def pytest_collection_finish() -> None:
    """From here on there is garbage, but not among what has been imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with the files of `ONE_SERVER` as one, and those of `ON_RAY`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadFileOrServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(ONE_SERVER) and not nodeid.startswith(OF_THEIR_OWN):
                return ONE_SERVER
            return ON_RAY[0] if nodeid.startswith(ON_RAY) else super()._split_scope(nodeid)

    return LoadFileOrServer(config, log)


@pytest.fixture(autouse=True)
def same_signal_handlers() -> Iterator[None]:
    """A command that is run in this process ignores signals from its end on, and so would the tests after it, and
    Ctrl-C.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def cache() -> str:
    """An override: what one test, of any worker, has built is there for the others. To build a tiny model takes longer
    than to train it.
    """
    return f"cache_dir={os.environ[CACHE]}"


@pytest.fixture
def qwen2() -> PreTrainedModel:
    from factories import make_qwen2

    return make_qwen2()


@pytest.fixture
def token_batch() -> TokenBatch:
    """Twelve sequences of skewed length with random tokens, logprobs and advantages."""
    import torch
    from factories import VOCAB, make_completion, make_rollout

    from offline_grpo.train.batch import build_batch, with_advantages

    generator = torch.Generator().manual_seed(7)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, VOCAB, (n,), generator=generator).tolist())

    rollouts = []
    for i in range(12):
        completion = ids(1 + (i * i) % 17)
        logprobs = tuple((-torch.rand(len(completion), generator=generator)).tolist())
        rollouts.append(make_rollout(ids(2 + i % 5), make_completion(completion, logprobs), temperature=1.3))
    batch = build_batch(rollouts)
    return with_advantages(batch, torch.randn(12, generator=generator).tolist())


@pytest.fixture
def without_code_generation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks are traced and run as they are, which takes less time; graphs are counted from here on."""
    import functools

    import torch
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend="eager"))
    yield
    torch.compiler.reset()
